"""The status snapshot: what ``greenroom status --json`` prints, in a file for outside readers.

The file is replaced as a whole, so a reader never sees half of it. It is not fsynced, because it is
worthless after a crash of the host. It is written soon after a change and at least every
:data:`HEARTBEAT_S`, but never so often that it takes more than a fiftieth of a CPU, however large
the cluster is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.actors.runtime.state_dir import write_private

logger = logging.getLogger(__name__)

SCHEMA = 1  # raised when a field changes its meaning or goes; new fields may come at any time
DELAY_S = 0.1  # after a change, so that what comes with it is there too
PERIOD_S = 1.0
HEARTBEAT_S = 10.0
PAUSE_PER_COST = 50.0  # seconds of pause for each second that writing took


class StatusFile:
    """Writes what ``read`` returns to ``path``; used on the loop's thread only."""

    def __init__(self, loop: Loop, path: Path, read: Callable[[], dict[str, Any]]) -> None:
        self._loop = loop
        self._path = path
        self._read = read
        self._not_before = 0.0
        self._due_at = float("inf")
        self._timer: Timer | None = None
        self._failing = False

    def changed(self) -> None:
        """Schedule a write of the file."""
        self._write_at(max(self._loop.machine.monotonic() + DELAY_S, self._not_before))

    def close(self) -> None:
        """Write no more, and remove the file: nothing runs that it could tell of."""
        if self._timer is not None:
            self._timer.cancel()
        self._due_at = -1.0
        with contextlib.suppress(OSError):  # read-only by now; its age tells that it is old
            self._path.unlink(missing_ok=True)

    def _write_at(self, due_at: float) -> None:
        if self._due_at <= due_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_at = due_at
        self._timer = self._loop.call_later(due_at - self._loop.machine.monotonic(), self._write)

    def _write(self) -> None:
        begun_at = self._loop.machine.monotonic()
        self._due_at, self._timer = float("inf"), None
        try:
            self._replace()
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning("the status file %s cannot be written: %s", self._path, error)
            self._failing = True
        now = self._loop.machine.monotonic()
        self._not_before = now + max(PERIOD_S, PAUSE_PER_COST * (now - begun_at))
        self._write_at(max(now + HEARTBEAT_S, self._not_before))

    def _replace(self) -> None:
        content = {"schema": SCHEMA, "written_at": time.time(), **self._read()}
        write_private(self._path, json.dumps(content, default=str))
