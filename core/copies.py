"""The copies of queries that a router has made for shadows, and what they keep in memory."""

from __future__ import annotations

from collections import Counter

from greenroom.core.queueing import RoutedBackend
from greenroom.core.tickets import Dropped, Ended, Ticket

COPY_S = 0.005  # how long copies wait, so that queries go first, and for others to go along with
COPY_MORE_S = 0.001  # for queries to be let in between
MAX_COPIED_BYTES = 32 * 1024 * 1024  # of calls that copies for one shadow keep in memory


class Copies:
    """All copies that have not ended, by number, in ``open``."""

    def __init__(self) -> None:
        self.open: dict[int, Ticket] = {}
        self._bytes: Counter[str] = Counter()  # by shadow; those without any leave it

    def make(
        self, original: Ticket, number: int, backend: RoutedBackend, now: float
    ) -> Ticket | None:
        """Have a copy wait at its shadow; None where it cannot follow.

        What follows a query goes to one replica only, so there is no copy of such.
        """
        tag, size = backend.table.tag, len(original.query.call)
        if original.query.follows or not backend.takes_copies:
            return None
        held = self._bytes[tag]
        if held and held + size > MAX_COPIED_BYTES:
            return None
        copy = Ticket(number, None, original.query, original.endpoint, original.route, now, tag)
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
