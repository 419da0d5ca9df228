"""The copies of queries that a router makes for shadows, and what they keep in memory.

A query that is to be copied is on its way first: that a copy is due is noted, and no more, until
its router is told to make those that are.
"""

from __future__ import annotations

from collections import Counter

from understudy.core.queueing import RoutedBackend
from understudy.core.tables import EndpointTable
from understudy.core.tickets import Dropped, DueCopy, Ended, Ticket

COPY_S = 0.005  # how long copies wait, so that queries go first, and for others to go along with
MAX_COPIED_BYTES = 32 * 1024 * 1024  # of calls that copies for one shadow keep in memory


class Copies:
    """All copies that have not ended, by number, in ``open``; ``due`` are those to be made."""

    def __init__(self) -> None:
        self.open: dict[int, Ticket] = {}
        self.due: list[DueCopy] = []
        self._bytes: Counter[str] = Counter()  # by shadow; those without any leave it

    def take_due(self) -> list[DueCopy]:
        """Return what is to be made, and forget it."""
        due, self.due = self.due, []
        return due

    def make(
        self,
        due: DueCopy,
        number: int,
        backend: RoutedBackend,
        endpoint: EndpointTable,
        now: float,
    ) -> Ticket | None:
        """Have a copy wait at its shadow; None where it cannot follow.

        What follows a query goes to one replica only, so there is no copy of such.
        """
        original, tag, pairing = due
        size = len(original.query.call)
        if original.query.follows or not backend.takes_copies:
            return None
        held = self._bytes[tag]
        if held and held + size > MAX_COPIED_BYTES:
            return None
        if pairing is not None:
            number = pairing.number
        copy = Ticket(number, None, original.query, original.endpoint, original.route, now, tag)
        if pairing is not None and tag in endpoint.compares:
            copy.compare = (pairing._replace(settings=endpoint.compares[tag]),)
        self.open[number] = copy
        backend.copies.add(copy)
        self._bytes[tag] = held + size
        original.copies += (copy,)
        return copy

    def of(self, original: Ticket) -> list[Ticket]:
        """Return the copies of a query that have not ended."""
        return [copy for copy in original.copies if copy.number in self.open]

    def end(self, copy: Ticket, status: int, now: float) -> Ended | Dropped:
        """Forget a copy; return what the metrics are to hear."""
        del self.open[copy.number]
        self._bytes[copy.backend] -= len(copy.query.call)
        if not self._bytes[copy.backend]:
            del self._bytes[copy.backend]
        if not copy.attempts:
            return Dropped(copy.endpoint, copy.backend)
        seconds = now - copy.submitted_at
        return Ended(copy.endpoint, copy.backend, status, seconds, is_copy=True)
