"""The status snapshot: what ``greenroom status --json`` prints, in a file for outside readers.

The file is replaced as a whole, so a reader never sees half of it. It is not fsynced, because it is
worthless after a crash of the host. It is written soon after a change and at least every
:data:`HEARTBEAT_S`, but never so often that it takes more than a fiftieth of a CPU, however large
the cluster is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from greenroom.actors.runtime.loop import Loop
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
        self._machine = loop.machine
        self._path = path
        self._read = read
        self._has_changed = asyncio.Event()
        self._is_closed = False
        loop.start(self._keep_writing())

    def changed(self) -> None:
        """Have the file written soon."""
        self._has_changed.set()

    def close(self) -> None:
        """Write no more, and remove the file: nothing runs that it could tell of."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # read-only by now; its age tells that it is old
            self._path.unlink(missing_ok=True)

    async def _keep_writing(self) -> None:
        heartbeat_s, is_failing = None, False  # nothing is written before the first change
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_changed.wait(), heartbeat_s)
            await asyncio.sleep(DELAY_S)
            self._has_changed.clear()
            begun_at = self._machine.monotonic()
            try:
                if self._is_closed:
                    return
                self._replace()
                is_failing = False
            except OSError as error:
                if not is_failing:
                    logger.warning("the status file %s cannot be written: %s", self._path, error)
                is_failing = True
            took_s = self._machine.monotonic() - begun_at
            pause_s = max(PERIOD_S, PAUSE_PER_COST * took_s) - DELAY_S
            heartbeat_s = max(HEARTBEAT_S - pause_s - DELAY_S, 0.0)
            await asyncio.sleep(pause_s)

    def _replace(self) -> None:
        content = {"schema": SCHEMA, "written_at": time.time(), **self._read()}
        write_private(self._path, json.dumps(content, default=str))
