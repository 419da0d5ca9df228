"""When a connection is read, and how much at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

READ = 256 * 1024  # bytes, as asyncio does
MOST_READ = 1024 * 1024  # of a body that is taken as fast as it comes


class Flow(FlowControl):
    """uvicorn's, which says when reading goes on after a pause."""

    def __init__(self, transport: asyncio.Transport, on_resumed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._reader: Any = transport
        self._on_resumed = on_resumed

    def resume_reading(self) -> None:
        """Go on reading."""
        if self.read_paused:
            self._on_resumed()
        super().resume_reading()

    def read_at_once(self, size: int) -> None:
        """Read up to so many bytes at once from now on, where the transport is asyncio's own."""
        if hasattr(self._reader, "max_size"):
            self._reader.max_size = size
