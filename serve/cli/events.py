"""What happens on a host, for the standard output of a command that stays: a container's log.

Theory of operation. The processes of a host log what happens to files of their own.
A thread of the command follows those of the parts that the system is made of, not what replicas
print, and writes one line per record: as it is, or as a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import NamedTuple

import click

from greenroom.actors.runtime.logs import one_line
from greenroom.actors.runtime.settings import JSON, HostSettings
from greenroom.serve.cli.logs import Line, Logs

PARTS = ("host", "controller", "proxy", "front")
POLL_S = 0.2
_RECORD = re.compile(
    r"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,(\d{3}))?(?: [+-]\d{4}\])? (?:\[?(\d+)\]? )?"
    r"\[?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\]? (.*)"
)
_MORE = re.compile(r"\s|Traceback ")  # of the record before


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
    return Event(_iso(datetime.now(timezone.utc)), "INFO", part, None, message)


def events_of(lines: list[Line]) -> list[Event]:
    """Make events of log lines; those that go on with a record are part of its message."""
    found: list[Event] = []
    for part, text in lines:
        record = _RECORD.fullmatch(text)
        if record is not None:
            second, milliseconds, pid, level, message = record.groups()
            at = datetime.strptime(second, "%Y-%m-%d %H:%M:%S").astimezone(timezone.utc)
            at = at.replace(microsecond=int(milliseconds or 0) * 1000)
            found.append(Event(_iso(at), level, part, int(pid) if pid else None, message))
        elif found and found[-1].part == part and _MORE.match(text):
            found[-1] = found[-1]._replace(message=f"{found[-1].message}\n{text}")
        elif text:
            found.append(event(part, text))
    return found


@contextlib.contextmanager
def shown(settings: HostSettings) -> Iterator[Callable[[Event], None]]:
    """Print what is logged from now on, until the end; gives what prints an event of the caller's.

    The thread begins with the first of these: processes may be forked before.
    """
    logs = [Logs(settings.logs_dir, pattern=f"{part}.log") for part in PARTS]
    for each in logs:
        each.skip()
    ended = threading.Event()

    def show(what: Event) -> None:
        click.echo(what.shown(settings.log_format))

    def follow() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(POLL_S)
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
