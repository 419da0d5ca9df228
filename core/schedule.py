"""What is due when, by name: backends, rollouts, and requests that wait."""

from __future__ import annotations

import heapq


class Schedule:
    """Names by the time at which they are due; setting a name's time anew replaces it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due_at: dict[str, float] = {}

    def put(self, name: str, due_at: float) -> None:
        """Make a name due at a time; infinity leaves it as it is."""
        if due_at < float("inf") and self._due_at.get(name) != due_at:
            self._due_at[name] = due_at  # an entry of the heap with another time counts no more
            heapq.heappush(self._heap, (due_at, name))

    def put_earlier(self, name: str, due_at: float) -> None:
        """Make a name due at a time, unless it is due before."""
        if due_at < self._due_at.get(name, float("inf")):
            self.put(name, due_at)

    def drop(self, name: str) -> None:
        """Make a name due no more."""
        self._due_at.pop(name, None)
        while self._heap and self._due_at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)

    def take(self, now: float) -> set[str]:
        """Return, and drop, what is due."""
        names = set()
        while self._heap and self._heap[0][0] <= now:
            due_at, name = heapq.heappop(self._heap)
            if self._due_at.get(name) == due_at:
                del self._due_at[name]
                names.add(name)
        return names

    def next_at(self) -> float:
        """Return when :meth:`take` may have something, at the earliest; infinity for never."""
        return self._heap[0][0] if self._heap else float("inf")
