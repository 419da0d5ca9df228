"""When a connection is read, and how much at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

READ = 256 * 1024  # bytes, as asyncio does
MOST_READ = 1024 * 1024  # of a body that is taken as fast as it comes


class Flow(FlowControl):
    """uvicorn's, which says when nothing is read, and when reading goes on."""

    def __init__(
        self,
        transport: asyncio.Transport,
        on_paused: Callable[[], None],
        on_resumed: Callable[[], None],
    ) -> None:
        super().__init__(transport)
        self._reader: Any = transport
        self._on_paused, self._on_resumed = on_paused, on_resumed

    def pause_reading(self) -> None:
        """Read no more for now."""
        if not self.read_paused:
            self._on_paused()
        super().pause_reading()

    def resume_reading(self) -> None:
        """Go on reading."""
        if self.read_paused:
            self._on_resumed()
        super().resume_reading()

    def read_at_once(self, size: int) -> None:
        """Read up to so many bytes at once from now on, where the transport is asyncio's own."""
        if hasattr(self._reader, "max_size"):
            self._reader.max_size = size
