"""The log files of a host: readable by their owner only, and not kept forever."""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import logging
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.runtime.state_dir import make_private, open_private

# Taken at import: inside an actor Thespian has replaced the logging module's manager, and asking it
# would give another logger than the one that our modules' loggers are under.
OUR_LOGGER = logging.getLogger("greenroom")
logger = logging.getLogger(__name__)
KEPT_PER_DEPLOYMENT = 20
_REPLICA = "replica-"
ACCESS_LOG = "access.log"
_PIECE = 1024 * 1024
MAX_END_BYTES = 128 * 1024
LAST_BYTES = 16 * 1024  # in which the reason of an end is sought
MAX_NAMES = 500

# Characters that end a line, control a terminal or cannot be encoded; not tabs and line feeds.
_escapable = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def without_controls(text: str) -> str:
    """Return ``text`` with its control characters but tabs and line feeds written as escapes."""
    return _escapable.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return ``text``, which may be a client's, as it may stand in a line of a log."""
    return without_controls(text).replace("\n", "\\n")


def one_record(text: str) -> str:
    """Return ``text`` so that only its first line can be taken for a record's; others are indented.

    What a request says may be in any message or exception: it must not forge lines, nor steer the
    reader's terminal.
    """
    return without_controls(text).replace("\n", "\n  ")


class LineFormatter(logging.Formatter):
    """Formats records as text for our logs: see :func:`one_record`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text, with its traceback."""
        return one_record(super().format(record))


class LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # none before Python 3.11
    """Writes records to the log with this descriptor; what a full disk does not take is lost.

    Nothing of it is kept in a buffer, here or in stderr's, where it would fail later: at a fork, or
    when the log is closed.
    """

    def __init__(self, fd: int) -> None:
        raw = os.fdopen(fd, "ab", buffering=0)
        super().__init__(io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
        self.setFormatter(LineFormatter("%(asctime)s %(process)d %(levelname)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:  # logging's name
        """Tell of a mistake in the call, but not of a disk: stderr is most often a log on it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def open_log(settings: HostSettings, name: str) -> int:
    """Open ``logs/<name>.log`` of the state dir for appending; return the descriptor."""
    make_private(settings.logs_dir)
    return open_private(settings.logs_dir / f"{name}.log")


def open_log_or_stderr(settings: HostSettings, name: str) -> int:
    """Open a log, or duplicate stderr, the host process's log, where the disk takes none."""
    try:
        return open_log(settings, name)
    except OSError as error:
        logger.warning("host.log has what %s.log would: it cannot be opened: %s", name, error)
        return os.dup(2)


def replica_log(tag: str) -> str:
    """Return the name of a replica's log; file systems take no ``/``."""
    return _REPLICA + "".join(c if c.isalnum() or c in "_.#:-" else "_" for c in tag)


def configure_logging(settings: HostSettings, role: str) -> None:
    """Send this process's log records to ``logs/<role>.log`` of the state dir, and nowhere else.

    Thespian replaces the root logger by one that mails each record to its logger, at 200 us
    each, and from whatever thread logs, which its transport does not survive. The one from before
    is put back as Python makes it, so that user code's records go to stderr, or to the handlers
    that it adds.
    """
    logging.root = logging.Logger.root = OUR_LOGGER.manager.root
    logging.Logger.manager = OUR_LOGGER.manager
    logging.root.handlers.clear()
    OUR_LOGGER.propagate = False
    OUR_LOGGER.setLevel(logging.INFO)
    OUR_LOGGER.handlers[:] = [LogHandler(open_log_or_stderr(settings, role))]


def log_to_stderr() -> None:
    """Undo :func:`configure_logging`, in a process that was forked from one that had a log."""
    for handler in OUR_LOGGER.handlers[:]:
        OUR_LOGGER.removeHandler(handler)
        handler.stream.close()  # type: ignore[attr-defined]  # a StreamHandler, see above
    OUR_LOGGER.propagate = True
    OUR_LOGGER.setLevel(logging.NOTSET)


def redirect_output(settings: HostSettings, name: str) -> None:
    """Append what this process and its C code print to ``logs/<name>.log`` of the state dir."""
    fd = open_log_or_stderr(settings, name)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # no plain TextIO


class RenamedLogs:
    """Opens the logs of this process again where another program has renamed them, as logrotate.

    Looked at once a second (liveness.py): what a process prints, and what its loggers write.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, os.stat_result]] = {}  # by descriptor: name and file

    def reopen(self) -> None:
        """Check, and open again; what cannot be opened now may be at the next check."""
        handlers = [*OUR_LOGGER.handlers, logging.lastResort]  # the latter is a replica's own
        fds = {1, 2}
        for handler in handlers:
            with contextlib.suppress(AttributeError, OSError, ValueError):  # one of user code's
                fds.add(handler.stream.fileno())  # type: ignore[union-attr]  # it may be None
        for fd in fds:
            with contextlib.suppress(OSError):
                self._follow(fd)

    def _follow(self, fd: int) -> None:
        file = os.fstat(fd)
        name, known = self._known.get(fd, ("", None))
        if known is None or not os.path.samestat(known, file):
            name = os.readlink(f"/proc/self/fd/{fd}")
            self._known[fd] = (name if name.endswith(".log") else "", file)
        elif name and not _is_at(name, file):
            fresh = open_private(Path(name))
            os.dup2(fresh, fd, inheritable=fd in {1, 2})
            os.close(fresh)
            self._known[fd] = name, os.fstat(fd)


def _is_at(path: str, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(path), file)
    except FileNotFoundError:
        return False


def end_of_log(folder: Path, log: str | None, after: int | None) -> dict[str, Any]:
    """Return the end of a log: whole lines, MAX_END_BYTES at most; empty without such a log.

    ``next`` is the offset to go on from, as ``after``; ``skipped`` says whether there are earlier
    lines that were not asked for. A log that is shorter than the offset was rotated, and begins
    anew. Without a name the answer is the logs there are, those that were written last first.
    """
    if log is None:
        return {"logs": _names(folder)}
    if log not in {path.stem for path in folder.glob("*.log")}:
        return {}
    try:
        opened = (folder / f"{log}.log").open("rb")
    except FileNotFoundError:  # deleted meanwhile
        return {}
    with opened as file:
        size = file.seek(0, os.SEEK_END)
        wanted = 0 if after is None or after > size else after
        begin = max(wanted, size - MAX_END_BYTES)
        file.seek(begin)
        content = file.read(MAX_END_BYTES)
    is_skipped = begin > wanted
    if is_skipped:
        begin += content.find(b"\n") + 1
        content = content[content.find(b"\n") + 1 :]
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.decode("utf-8", "replace").splitlines()
    return {"log": log, "lines": lines, "next": begin + len(whole), "skipped": is_skipped}


def last_lines(path: Path) -> list[str]:
    """Return what a log says last, without empty lines; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            read = file.read(LAST_BYTES).decode("utf-8", "replace")
    except OSError:  # rotated, or there is none
        return []
    return [line.strip() for line in read.splitlines() if line.strip()]


def _names(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in folder.glob("*.log"):
        with contextlib.suppress(OSError):  # deleted meanwhile
            state = path.stat()
            found.append({"log": path.stem, "bytes": state.st_size, "written_at": state.st_mtime})
    return sorted(found, key=lambda each: each["written_at"], reverse=True)[:MAX_NAMES]


def prune_replica_logs(
    logs_dir: Path, replicas: Iterable[Process], keep: int = KEPT_PER_DEPLOYMENT
) -> None:
    """Delete logs of replicas that are gone, but for the newest ``keep`` of each deployment.

    ``replicas`` are those that run: what they write to is kept, however long it was silent.
    """
    in_use = {path for process in replicas for path in _outputs(process)}
    gone: dict[str, list[tuple[float, Path]]] = defaultdict(list)
    for path in logs_dir.glob(f"{_REPLICA}*.log"):
        if os.path.realpath(path) not in in_use:
            gone[_deployment(path.stem)].append((_written_at(path), path))
    for paths in gone.values():
        for _, path in sorted(paths, reverse=True)[keep:]:
            for each in (*logs_dir.glob(f"{glob.escape(path.name)}.*"), path):
                each.unlink(missing_ok=True)


def rotate_logs(logs_dir: Path, max_bytes: int, files: int) -> None:
    """Move what is in logs of over ``max_bytes`` to files of their own, ``files`` of each at most.

    Many processes may have such a log open, some of them only as their standard output: so it is
    copied, and then emptied. What is written in between is lost. The access log, which has the most
    lines, is moved, and loses none: those who write it look at its name before they do.
    """
    for path in logs_dir.glob("*.log"):
        try:
            if path.lstat().st_size <= max_bytes:
                continue
            if path.name != ACCESS_LOG:
                _copy_and_empty(path, files)
            elif files:
                path.replace(_make_room(path, files))
            else:
                path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            OUR_LOGGER.warning("the log %s cannot be rotated: %s", path, error)


def _make_room(path: Path, files: int) -> Path:
    """Move the earlier parts of a log to the next numbers, ``files`` at most; return the first."""
    parts = [path.with_name(f"{path.name}.{number}") for number in range(1, files + 1)]
    for older, newer in reversed(list(itertools.pairwise(parts))):
        with contextlib.suppress(FileNotFoundError):
            older.replace(newer)
    return parts[0]


def _copy_and_empty(path: Path, files: int) -> None:
    if files:
        copy = path.with_name(f"{path.name}.new")
        copy.unlink(missing_ok=True)  # of a rotation that was interrupted
        try:
            with path.open("rb") as source, os.fdopen(open_private(copy), "ab") as target:
                shutil.copyfileobj(source, target, _PIECE)
                copy.replace(_make_room(path, files))
        except OSError:
            copy.unlink(missing_ok=True)
            raise
    os.truncate(path, 0)


def _deployment(stem: str) -> str:
    """Return what the replicas of all versions of a deployment have in common in their names.

    A replica is named after its backend, and a deployment's backend after its code:
    ``app#deployment#code#replica``.
    """
    parts = stem.split("#")
    return "#".join(parts[:-2] if len(parts) > 3 else parts[:-1])


def _outputs(process: Process) -> list[str]:
    links = []
    for number in (1, 2):
        try:
            links.append(os.readlink(f"/proc/{process.pid}/fd/{number}"))
        except OSError:  # it has ended
            continue
    return links


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
