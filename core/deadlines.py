"""When the time of queries is up."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from greenroom.core.tickets import Ticket

SPARE = 100  # ended ones that are not worth cleaning up after


class Deadlines:
    """The tickets that have a deadline, until they end; the time of each comes up once.

    Ended ones leave the heap when their time comes, or when they are most of it: queries that are
    cancelled by the thousands may have hours left.
    """

    def __init__(self) -> None:
        self._timed: dict[int, Ticket] = {}  # by number
        self._heap: list[tuple[float, int]] = []  # of deadlines

    def __bool__(self) -> bool:
        return bool(self._timed)

    def set(self, ticket: Ticket, at: float) -> None:
        """Give a ticket its deadline."""
        ticket.deadline_at = at
        self._timed[ticket.number] = ticket
        if len(self._heap) > 2 * len(self._timed) + SPARE:
            self._heap = [each for each in self._heap if each[1] in self._timed]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (at, ticket.number))

    def forget(self, ticket: Ticket) -> None:
        """Know of a ticket whose time does not count any more: it has ended, say."""
        self._timed.pop(ticket.number, None)

    def due(self, now: float) -> Iterator[Ticket]:
        """Return the tickets whose time is up, the first due first; each is returned once."""
        while self._heap and self._heap[0][0] <= now:
            ticket = self._timed.get(heapq.heappop(self._heap)[1])
            if ticket is not None:
                yield ticket

    def next_at(self) -> float | None:
        """Return when the next one is due."""
        while self._heap and self._heap[0][1] not in self._timed:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
