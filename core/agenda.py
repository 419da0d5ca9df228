"""What the controller reconciles next: what was touched, is due, or has waited for an event.

Theory of operation. As in Kubernetes' controllers, a *key*, which is a kind and a name, is
reconciled whenever something that it depends on may have changed. That compares what is wanted with
what is there and takes the next step, so once too often does no harm. At its end it is said here
when to reconcile it again: at a time, or once upon an event. So a turn costs what it touches.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable

from greenroom.core.records import Key

NEVER = float("inf")
HELD = "held"  # the event that proxies hold more, or are fewer: :meth:`LongPoll.held_by_all`
ROOM = "room"  # the event that there may be more room for replicas


class Agenda:
    """Keys to reconcile. ``now`` is always monotonic seconds."""

    def __init__(self) -> None:
        self._touched: dict[str, set[str]] = {}  # names by kind
        self._heap: list[tuple[float, Key]] = []
        self._due_at: dict[Key, float] = {}  # an entry of the heap with another time counts no more
        self._waiting: dict[Hashable, set[Key]] = {}  # by event

    def touch(self, kind: str, *names: str) -> None:
        """Look at these at the next opportunity."""
        if names:
            self._touched.setdefault(kind, set()).update(names)

    def at(self, kind: str, name: str, due_at: float) -> None:
        """Look at a key at this time, in place of the one that was set before."""
        key = kind, name
        if due_at == NEVER:
            self._due_at.pop(key, None)
        elif self._due_at.get(key) != due_at:
            self._due_at[key] = due_at
            heapq.heappush(self._heap, (due_at, key))

    def by(self, kind: str, name: str, due_at: float) -> None:
        """Look at a key at this time, unless it is due before."""
        if due_at < self._due_at.get((kind, name), NEVER):
            self.at(kind, name, due_at)

    def upon(self, event: Hashable, kind: str, name: str) -> None:
        """Reconcile a key when the event happens next. That a key was reconciled is one, too."""
        self._waiting.setdefault(event, set()).add((kind, name))

    def happened(self, event: Hashable) -> None:
        """Look at what has waited for an event."""
        for kind, name in self._waiting.pop(event, ()):
            self.touch(kind, name)

    def drop(self, kind: str, name: str, event: Hashable) -> None:
        """Look at a key no more, at no time nor upon this event."""
        self.at(kind, name, NEVER)
        waiting = self._waiting.get(event, set())
        waiting.discard((kind, name))
        if not waiting:
            self._waiting.pop(event, None)

    def first(self, kinds: Iterable[str], now: float) -> str:
        """Return the first of these kinds of which any is to be reconciled now; "" for none."""
        self._touch_due(now)
        return next((kind for kind in kinds if kind in self._touched), "")

    def take(self, kind: str, now: float) -> list[str]:
        """Return, and drop, the names of a kind that are to be reconciled now."""
        self._touch_due(now)
        return sorted(self._touched.pop(kind, ()))

    def next_at(self) -> float:
        """Return when there is something to reconcile, if nothing happens before."""
        return float("-inf") if self._touched else self._next_due_at()

    def _touch_due(self, now: float) -> None:
        while self._next_due_at() <= now:
            key = heapq.heappop(self._heap)[1]
            del self._due_at[key]
            self.touch(*key)

    def _next_due_at(self) -> float:
        while self._heap and self._due_at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER
