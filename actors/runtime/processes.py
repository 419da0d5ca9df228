"""Processes by pid: who they are, whether they live, and which belong to a host's system.

A pid alone is not an identity, because the kernel uses it again; a pid with its start time is.

Every process of a system carries a *mark*: the variable GREENROOM_SYSTEM with the folder of the
host's own files, in the block of memory that ``/proc/PID/environ`` shows. Children have it by fork
and by exec, whoever their parent is later, so whoever starts or stops the system finds all of them.
A process of another user or of another PID namespace, such as a container's, is never ours.

A *record* in ``run/`` says more of a process: its role, its incarnation, what a replica works in.
Records are soft state. On a disk that takes nothing a process goes without one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import setproctitle

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.state_dir import write_private
from greenroom.core.errors import StartError

logger = logging.getLogger(__name__)

# Fields of /proc/PID/stat, see proc(5), counted after the command's closing parenthesis.
_STAT_STATE, _STAT_PARENT, _STAT_START_TICKS = 0, 1, 19
_STAT_ENV_START, _STAT_ENV_END = 47, 48
MARK = "GREENROOM_SYSTEM"
WRITE_AGAIN_S = 5.0
TITLE_BYTES = 256  # of the block, which titles may use; they begin before it

HOST_ROLE = "host"
FRONT_ROLE = "http master"
WORKER_ROLE = "http worker"
ADMIN_ROLE = "thespian admin"
LOGGER_ROLE = "thespian logger"
_TITLE = "greenroom: "
_TITLED = (HOST_ROLE, FRONT_ROLE, WORKER_ROLE, "proxy", "controller", "replica")
_COMMANDS = (  # how command lines begin: titles of ours, and Thespian's
    *((_TITLE + role, role) for role in _TITLED),
    ("RepairedMultiProcAdmin ", ADMIN_ROLE),
    ("MultiProcAdmin ", ADMIN_ROLE),
    ("logger ", LOGGER_ROLE),
    ("Replica ", "replica"),
)
_PROGRAMS = (  # what those have in them that were started by ``python -c``
    ("import be_host", HOST_ROLE),
    ("greenroom.actors.host.process import main", HOST_ROLE),
    ("import be_front", FRONT_ROLE),
)


def identify(pid: int, incarnation: str = "") -> Process | None:
    """Return the live process ``pid``, or None when there is none (a zombie counts as none)."""
    fields = _stat(pid)
    if not fields or fields[_STAT_STATE] in "ZX":
        return None
    return Process(pid, int(fields[_STAT_START_TICKS]), incarnation)


def parent_pid(pid: int) -> int:
    """Return the pid of a process's parent, 0 when it is gone."""
    fields = _stat(pid)
    return int(fields[_STAT_PARENT]) if fields else 0


def _stat(pid: int) -> list[str]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def this_process() -> Process:
    """Identify the calling process, with a new random incarnation."""
    process = identify(os.getpid(), secrets.token_hex(8))
    assert process is not None, "the calling process is alive"
    return process


def is_alive(process: Process) -> bool:
    """Tell whether this very process, not a later one of the same pid, is alive."""
    now = identify(process.pid)
    return now is not None and now.start_ticks == process.start_ticks


def open_pidfd(process: Process) -> int | None:
    """Open a descriptor that becomes readable when the process ends; None when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if is_alive(process):
        return fd
    os.close(fd)
    return None


def send_signal(process: Process, number: int) -> bool:
    """Signal this very process; False when it is gone."""
    fd = open_pidfd(process)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def wait_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Wait until the processes are gone; return those that are not within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    left = [process for process in processes if is_alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(0.005)
        left = [process for process in left if is_alive(process)]
    return left


def kill_all(processes: Iterable[Process], timeout_s: float = 5.0) -> list[Process]:
    """SIGKILL the processes and wait; return those that outlive ``timeout_s``."""
    processes = list(processes)
    for process in processes:
        send_signal(process, signal.SIGKILL)
    return wait_gone(processes, timeout_s)


def command_line(pid: int) -> str:
    """Return a process's command line in one string, "" when it is gone."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return command.replace(b"\0", b" ").decode(errors="replace").strip()


def child_pids(pid: int) -> list[int]:
    """Return the pids of the direct children, of all the process's threads."""
    pids: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, children.read_text(encoding="ascii").split())
    return pids


def descendants(pids: Iterable[int]) -> list[Process]:
    """Return the processes that live under these, at any depth."""
    found: dict[int, Process] = {}
    frontier = list(pids)
    while frontier:
        new = {pid for parent in frontier for pid in child_pids(parent)} - set(found)
        children = {pid: process for pid in new if (process := identify(pid)) is not None}
        found.update(children)
        frontier = list(children)
    return list(found.values())


def role_of(pid: int) -> str:
    """Return what a process of ours is by its command line, "" where that does not say it."""
    command = command_line(pid)
    for begin, role in _COMMANDS:
        if command.startswith(begin):
            return role
    return next((role for program, role in _PROGRAMS if program in command), "")


def mark_of(folder: Path) -> str:
    """Return the value of :data:`MARK` of the system whose host's own files are in ``folder``."""
    return os.path.realpath(folder)


def can_mark(folder: Path) -> bool:
    """Tell whether this process has room for the mark where ``/proc/PID/environ`` shows it.

    And no mark of another system, which it would have, too.
    """
    block, other = _environ_block(), os.environ.get(MARK, mark_of(folder))
    has_room = len(block) > len(_entry(folder)) + TITLE_BYTES
    return has_room and other == mark_of(folder)


def mark(folder: Path) -> None:
    """Mark this process, and with it all that it starts."""
    is_possible = can_mark(folder)
    os.environ[MARK] = mark_of(folder)
    if is_possible:
        _show_mark()


def _show_mark() -> None:
    """Write the mark where ``/proc/PID/environ`` shows it, which titles have overwritten.

    The libraries' own copy of the environment is elsewhere once there are titles.
    """
    entry = os.fsencode(f"\0{MARK}={os.environ[MARK]}\0")
    block = _environ_block()
    if len(block) >= len(entry):
        ctypes.memmove(block.stop - len(entry), entry, len(entry))


def is_marked(pid: int, folders: Iterable[Path]) -> bool:
    """Tell whether a process, of this user and PID namespace, belongs to a host's system."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        wanted = {_entry(folder) for folder in folders}
        return bool(wanted & set(environ)) and (
            os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
        )
    except OSError:  # it is gone, or shows nothing of itself
        return False


def _entry(folder: Path) -> bytes:
    return os.fsencode(f"{MARK}={mark_of(folder)}")


def _environ_block() -> range:
    fields = _stat(os.getpid())
    return range(int(fields[_STAT_ENV_START]), int(fields[_STAT_ENV_END]))


class RunRecords:
    """The processes of a host's system, by their marks and by their records in ``folder``.

    The folder is beside the logs in the folder of the host's own files. ``others`` are folders that
    the same system may be marked with.
    """

    def __init__(
        self, folder: Path, *others: Path, call_later: Callable[..., object] | None = None
    ) -> None:
        self._folder = folder
        self._marks = (folder.parent, *others)
        self._owed: dict[Process, dict[str, object]] = {}  # what the disk has not taken
        self._call_later = call_later

    def add(self, process: Process, role: str, title: str | None = None, **more: str) -> None:
        """Record a process under its role and, for the calling one, show its title.

        ``more`` is what :meth:`details` returns. Where the disk takes no record that is written
        later: by itself with ``call_later``, else by :meth:`write_owed`.
        """
        if title is not None:
            show_title(title)
        self._owed[process] = {"role": role, **process._asdict(), "more": more}
        self.write_owed()

    def write_owed(self) -> None:
        """Write the records that the disk has not taken so far, if it does now."""
        for process, record in list(self._owed.items()):
            path = self._path(process)
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_private(path, json.dumps(record))
            except OSError as error:
                logger.warning(
                    "process %d, %s, is not on record for now: %s: %s",
                    process.pid,
                    record["role"],
                    path,
                    error.strerror,
                )
                if self._call_later is not None:
                    self._call_later(WRITE_AGAIN_S, self.write_owed)
                return
            del self._owed[process]

    def remove(self, process: Process) -> None:
        """Forget a process; harmless when there is no record, or it cannot be removed."""
        self._owed.pop(process, None)
        with contextlib.suppress(OSError):  # whoever reads it sees that the process is gone
            self._path(process).unlink(missing_ok=True)

    def alive(self) -> dict[Process, str]:
        """Return the recorded processes that live, with their roles; drop the other records."""
        found: dict[Process, str] = {}
        try:
            paths = list(self._folder.glob("*.json"))
        except PermissionError:
            return found  # somebody else's: nothing of ours can be there
        for path in paths:
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                role = record.pop("role")
                record.pop("more", None)
                process = Process(**record)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # removed meanwhile, or written by something else
            if is_alive(process):
                found[process] = role
            else:
                self.remove(process)
        return found

    def found(self) -> dict[Process, str]:
        """Return all processes of the system but the calling one, on record or not."""
        found = self.alive()
        known = {(process.pid, process.start_ticks) for process in found}
        for process in self._marked():
            if (process.pid, process.start_ticks) not in known:
                found[process] = role_of(process.pid)
        return {process: role for process, role in found.items() if process.pid != os.getpid()}

    def find(self, *roles: str) -> list[Process]:
        """Return the live processes of these roles; unlike :meth:`with_role` also without records.

        It looks at every process of the machine.
        """
        return [process for process, role in self.found().items() if role in roles]

    def with_role(self, *roles: str) -> list[Process]:
        """Return the recorded live processes of these roles."""
        return [process for process, role in self.alive().items() if role in roles]

    def details(self, role: str) -> list[dict[str, str]]:
        """Return what the live processes of a role have recorded besides."""
        found = []
        for process in self.with_role(role):
            with contextlib.suppress(OSError, ValueError):  # it ended meanwhile
                record = json.loads(self._path(process).read_text(encoding="utf-8"))
                found.append(dict(record.get("more") or {}))
        return found

    def is_ready(self, process: Process) -> bool:
        """Tell whether the system of this host process answers: its title says so."""
        return command_line(process.pid) == _TITLE + HOST_ROLE

    def _marked(self) -> Iterator[Process]:
        for name in os.listdir("/proc"):
            if name.isdigit() and is_marked(int(name), self._marks):
                process = identify(int(name))
                if process is not None:
                    yield process

    def _path(self, process: Process) -> Path:
        return self._folder / f"{process.pid}-{process.start_ticks}.json"


def show_title(title: str) -> None:
    """Have ``ps`` show the calling process under this title."""
    setproctitle.setproctitle(f"{_TITLE}{title}")
    if MARK in os.environ:
        _show_mark()


# It finds its place by the first variable that this process began with, so before any is set anew;
# what the environment's block showed is gone then.
setproctitle.getproctitle()
if MARK in os.environ:
    _show_mark()


# The limit of open files, which most systems set low for processes that wait with select().

MOST = 65_536  # more than a process here can serve; some systems allow a thousand million
LEAST = 256  # an idle process has 40; each connection, replica and caller is one more


def raise_limit() -> int:
    """Raise this process's limit as far as is of use, and its children's with it; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def require_open_files() -> None:
    """Raise the limit; StartError where a host cannot work with what is allowed."""
    limit = raise_limit()
    if 0 <= limit < LEAST:
        raise StartError(
            f"this user may have {limit} files open at once (ulimit -Hn), and a host needs "
            f"{LEAST}, better thousands: raise the hard limit, by `ulimit -Hn`, LimitNOFILE= of "
            "systemd, or --ulimit nofile= of a container"
        )
