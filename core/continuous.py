"""Which streams a continuous batch steps, and which wait for a place.

Theory of operation. A stream *waits* until there is a place, then it is *live* until it is removed:
finished, failed, left by its caller, or past its deadline. Places are given in the order in which
streams came, and only between steps. At most ``max_waiting`` wait.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class ContinuousBatch(Generic[T]):
    """The streams of one batch, each with its deadline. ``now`` never goes back."""

    def __init__(self, max_size: int, max_waiting: int) -> None:
        self._max_size = max_size
        self._max_waiting = max_waiting
        self._live: dict[T, float] = {}  # with their deadlines, in the order of admission
        self._waiting: dict[T, float] = {}

    @property
    def live(self) -> list[T]:
        """The streams that have a place, those that came first before the others."""
        return list(self._live)

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    def add(self, stream: T, deadline_at: float | None) -> bool:
        """Let a stream wait for a place; return False where too many do."""
        free = self._max_size - len(self._live)
        if len(self._waiting) >= self._max_waiting + free:
            return False
        self._waiting[stream] = math.inf if deadline_at is None else deadline_at
        return True

    def remove(self, stream: T) -> None:
        """Forget a stream; harmless when it is not here."""
        self._live.pop(stream, None)
        self._waiting.pop(stream, None)

    def expire(self, now: float) -> list[T]:
        """Remove and return the streams whose deadlines are past."""
        late = [s for each in (self._live, self._waiting) for s, at in each.items() if at <= now]
        for stream in late:
            self.remove(stream)
        return late

    def admit(self) -> list[T]:
        """Give free places to those that wait; return the streams that got one."""
        number = min(self._max_size - len(self._live), len(self._waiting))
        admitted = list(self._waiting)[:number]
        for stream in admitted:
            self._live[stream] = self._waiting.pop(stream)
        return admitted
