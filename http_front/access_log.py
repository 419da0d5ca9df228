"""The access log: one JSON line per request, written a few times a second.

A line costs the request an append to a list; formatting and writing happen for some lines at once,
within FLUSH_S. Not for all of that time, as requests wait meanwhile: that was 8 ms at 16
connections. gunicorn's own access log halves the throughput. Several workers append to the same
file: O_APPEND and one write per flush keep their lines whole.

A log that cannot be written must not stop the serving: the lines are dropped, and the first failure
is reported on stderr.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import NamedTuple

from greenroom.actors.runtime.state_dir import make_private, open_private

FLUSH_S = 0.2
MOST_WAITING = 256

_logger = logging.getLogger(__name__)


class Entry(NamedTuple):
    """One finished request; ``finished_at`` in seconds since the epoch."""

    finished_at: float
    request_id: str
    method: str
    path: str
    status: int
    duration_s: float
    bytes_out: int
    client: tuple[str, int] | None
    trace_id: str = ""  # where this worker traces


class AccessLog:
    """Appends entries to ``path``; used from one event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[Entry] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_torn = False  # the file ends within a line of ours
        self._has_failed = False

    def add(self, entry: Entry) -> None:
        """Note a finished request; it is in the file within FLUSH_S."""
        self._waiting.append(entry)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        elif len(self._waiting) >= MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting; never raises."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        try:
            self._write("".join(map(line, waiting)).encode("ascii"))
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            text = "cannot write the access log %s: %s; serving goes on without it"
            _logger.error(text, self._path, error.strerror)

    def _write(self, lines: bytes) -> None:
        make_private(self._path.parent)
        file = open_private(self._path)  # anew: the host process may have rotated it
        try:
            if self._is_torn and os.fstat(file).st_size:
                lines = b"\n" + lines
            rest = memoryview(lines)
            while rest:
                written = os.write(file, rest)
                rest = rest[written:]
                self._is_torn = bool(rest)
        finally:
            os.close(file)


def line(entry: Entry) -> str:
    """Return the entry as one line of JSON; by hand, as json.dumps takes four times as long."""
    at = entry.finished_at
    # Of a client behind a trusted proxy it is what X-Forwarded-For says: anything.
    client = quoted(f"{entry.client[0]}:{entry.client[1]}") if entry.client else "null"
    trace = f',"trace_id":"{entry.trace_id}"' if entry.trace_id else ""
    return (
        f'{{"time":"{_second(int(at))}.{int(at * 1000) % 1000:03d}Z"'
        f',"request_id":{quoted(entry.request_id)},"method":{quoted(entry.method)}'
        f',"path":{quoted(entry.path)},"status":{entry.status}'
        f',"duration_ms":{entry.duration_s * 1000:.3f},"bytes":{entry.bytes_out}'
        f',"client":{client}{trace}}}\n'
    )


@lru_cache(2)
def _second(at: int) -> str:
    """Format a time to the second; most lines of a flush share it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
