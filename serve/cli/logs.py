"""The log files of a host, as they stand or as they grow: as lines, and as events.

Theory of operation. The processes of a host log what happens to files of their own. Commands read
them by polling, line by line. A command that stays (``greenroom start --block``) prints what
happens on its standard output, a container's log: a thread of it follows the files of the parts
that the system is made of, not what replicas print, and writes one line per record: as it is, or as
a JSON object.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click

from greenroom.actors.runtime.logs import one_line
from greenroom.actors.runtime.settings import JSON, HostSettings

PARTS = ("host", "controller", "proxy", "front")  # whose records are events
_POLL_S = 0.2
_RECORD = re.compile(
    r"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,(\d{3}))?(?: [+-]\d{4}\])? (?:\[?(\d+)\]? )?"
    r"\[?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\]? (.*)"
)
_MORE = re.compile(r"\s|Traceback ")  # of the record before


class Line(NamedTuple):
    """One line of one log."""

    log: str
    text: str


class Logs:
    """The logs in a folder that a pattern and a name pick; files that appear later join in.

    ``name`` picks the logs whose name contains it, whatever characters separate its words: that of
    an application, a deployment, a replica, or ``controller``.
    """

    def __init__(self, folder: Path, pattern: str = "*.log", name: str | None = None) -> None:
        self._folder = folder
        self._pattern = pattern
        self._name = name
        self._read: dict[Path, int] = {}  # where what was read of each ends

    def names(self) -> list[str]:
        """Return the names of the logs there are."""
        return [path.stem for path in self._paths()]

    def skip(self) -> None:
        """Go to the end: only what is written from now on is read."""
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):  # deleted between the listing and now
                self._read[path] = path.stat().st_size

    def tail(self, count: int) -> list[Line]:
        """Return the last lines of each log, and go to the end."""
        lines: list[Line] = []
        for path in self._paths():
            lines += deque(self._new_lines(path), maxlen=count)
        return lines

    def read(self) -> Iterator[Line]:
        """Return the lines that were completed since the last call."""
        for path in self._paths():
            yield from self._new_lines(path)

    def follow(self, wait: Callable[[float], bool]) -> Iterator[Line]:
        """Return lines as they are written, until ``wait(seconds)`` says True."""
        while True:
            yield from self.read()
            if wait(_POLL_S):
                yield from self.read()
                return

    def _paths(self) -> list[Path]:
        wanted = _slug(self._name or "")
        return [p for p in sorted(self._folder.glob(self._pattern)) if wanted in _slug(p.stem)]

    def _new_lines(self, path: Path) -> Iterator[Line]:
        try:
            with path.open("rb") as file:
                begin = self._read.get(path, 0)
                if file.seek(0, os.SEEK_END) < begin:  # truncated
                    begin = 0
                file.seek(begin)
                for line in file:
                    if not line.endswith(b"\n"):  # not complete yet
                        break
                    begin += len(line)
                    self._read[path] = begin
                    yield Line(path.stem, line[:-1].decode("utf-8", "replace"))
        except FileNotFoundError:  # deleted between the listing and now
            self._read.pop(path, None)


def _slug(name: str) -> str:
    return re.sub(r"[^0-9a-z]+", "-", name.lower())


# --- Events ---------------------------------------------------------------------------------------


class Event(NamedTuple):
    """One record of a log, or what a process has printed; ``time`` as ISO 8601, in UTC."""

    time: str
    level: str
    part: str
    pid: int | None
    message: str

    def shown(self, log_format: str) -> str:
        """Return the one line for it."""
        if log_format == JSON:
            return json.dumps(self._asdict())
        return f"{self.time} {self.level} {self.part}: {one_line(self.message)}"


def event(part: str, message: str) -> Event:
    """Return what happens now."""
    return Event(_iso(datetime.now(UTC)), "INFO", part, None, message)


def events_of(lines: list[Line]) -> list[Event]:
    """Make events of log lines; those that go on with a record are part of its message."""
    found: list[Event] = []
    for part, text in lines:
        record = _RECORD.fullmatch(text)
        if record is not None:
            second, milliseconds, pid, level, message = record.groups()
            try:
                at = datetime.strptime(second, "%Y-%m-%d %H:%M:%S").astimezone(UTC)
            except ValueError:  # digits that are no date
                found.append(event(part, text))
                continue
            at = at.replace(microsecond=int(milliseconds or 0) * 1000)
            found.append(Event(_iso(at), level, part, int(pid) if pid else None, message))
        elif found and found[-1].part == part and _MORE.match(text):
            found[-1] = found[-1]._replace(message=f"{found[-1].message}\n{text}")
        elif text:
            found.append(event(part, text))
    return found


class _Nowhere(io.StringIO):
    def write(self, text: str) -> int:
        return len(text)


def print_event(what: Event, settings: HostSettings) -> None:
    """Print an event; the command goes on without a reader, which Ctrl-C may have ended first."""
    try:
        click.echo(what.shown(settings.log_format))
    except BrokenPipeError:
        sys.stdout = _Nowhere()  # else what is buffered is an error at the end of the process


@contextlib.contextmanager
def show_events(settings: HostSettings) -> Iterator[Callable[[Event], None]]:
    """Print what is logged from now on, until the end; gives what prints an event of the caller's.

    The thread begins with the first of these: processes may be forked before.
    """
    logs = [Logs(settings.logs_dir, pattern=f"{part}.log") for part in PARTS]
    for each in logs:
        each.skip()
    ended = threading.Event()

    show = partial(print_event, settings=settings)

    def follow() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(_POLL_S)
            found = [happened for log in logs for happened in events_of(list(log.read()))]
            for happened in sorted(found, key=lambda each: each.time):
                show(happened)

    thread = threading.Thread(target=follow, name="greenroom-events", daemon=True)

    def begin(what: Event) -> None:
        show(what)
        if not thread.is_alive():
            thread.start()

    try:
        yield begin
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()


def _iso(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
