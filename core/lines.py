"""The queries that wait for one backend: a line for each endpoint, and the lines take turns.

Theory of operation. Each line is first in, first out. Whenever a replica has room, the line whose
turn it is gives its first ticket and goes to the end of the order of turns. So a flood of one
endpoint makes its own line long, and nobody else's: who shares a backend with it gets every second
turn, or as many as it has queries for.

Lines that begin go before those that stand, as in RFC 8290 (4.1 and 4.2): an endpoint that asks
for less than its share never waits for the turns of others, only for a replica. A line that was
served keeps its place in the order when it runs empty, until its turn has come once: else one
could stay new for ever by asking for one thing at a time, and those that stand would starve.
"""

from __future__ import annotations

from collections import OrderedDict

from greenroom.core.tickets import Ticket

_Line = OrderedDict[int, Ticket]  # by number


class Lines:
    """Tickets in the order in which replicas get them; ``size`` is how many there are."""

    __slots__ = ("_lines", "_new", "_standing", "size")

    def __init__(self) -> None:
        self.size = 0
        self._lines: dict[str, _Line] = {}  # by endpoint; each is in one of the two
        self._new: OrderedDict[str, _Line] = OrderedDict()  # in the order of turns
        self._standing: OrderedDict[str, _Line] = OrderedDict()

    def add(self, ticket: Ticket) -> None:
        """Have a ticket wait after all others of its endpoint."""
        self._line_for(ticket)[ticket.number] = ticket
        self.size += 1

    def put_first(self, ticket: Ticket) -> None:
        """Have a ticket wait before all others: it had its turn already."""
        name, line = ticket.endpoint, self._line_for(ticket)
        line[ticket.number] = ticket
        line.move_to_end(ticket.number, last=False)
        self._standing.pop(name, None)
        self._new[name] = line
        self._new.move_to_end(name, last=False)
        self.size += 1

    def first(self) -> Ticket | None:
        """Return the ticket whose turn it is; None when nobody waits."""
        while self._new:
            name, line = next(iter(self._new.items()))
            if line:
                return next(iter(line.values()))
            del self._new[name]
            self._standing[name] = line
        while self._standing:
            name, line = next(iter(self._standing.items()))
            if line:
                return next(iter(line.values()))
            del self._standing[name], self._lines[name]
        return None

    def take(self, ticket: Ticket) -> None:
        """Take out the ticket that :meth:`first` has returned; the next line has its turn."""
        name = ticket.endpoint
        line = self._new.pop(name, None)
        if line is None:
            line = self._standing.pop(name)
        self._standing[name] = line
        self._remove(ticket, line)

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that waits here, whoever's turn it is."""
        self._remove(ticket, self._lines[ticket.endpoint])

    def take_all(self, endpoint: str | None = None) -> list[Ticket]:
        """Take out what waits, or what waits of one endpoint; return it as it came."""
        names = self._lines if endpoint is None else self._lines.keys() & {endpoint}
        tickets = sorted(
            (ticket for name in names for ticket in self._lines[name].values()),
            key=lambda ticket: ticket.number,
        )
        for ticket in tickets:
            self.remove(ticket)
        return tickets

    def length(self, endpoint: str) -> int:
        """Return how many of an endpoint wait."""
        line = self._lines.get(endpoint)
        return 0 if line is None else len(line)

    def ahead(self, endpoint: str) -> int:
        """Return how many will have had their turn before one more of this endpoint has."""
        own = self.length(endpoint)
        return sum(min(len(line), own) for line in self._lines.values())

    def longest_beside(self, endpoint: str) -> Ticket | None:
        """Return the newest ticket of the longest line, if that stays longer without it.

        Longer than the endpoint's own with one more, that is; None where no line is.
        """
        line = max(self._lines.values(), key=len, default=None)
        if line is None or len(line) < self.length(endpoint) + 2:
            return None
        return next(reversed(line.values()))

    def _line_for(self, ticket: Ticket) -> _Line:
        line = self._lines.get(ticket.endpoint)
        if line is None:
            line = self._lines[ticket.endpoint] = self._new[ticket.endpoint] = OrderedDict()
        return line

    def _remove(self, ticket: Ticket, line: _Line) -> None:
        del line[ticket.number]
        self.size -= 1
        if not self.size:  # nobody is kept waiting, so nobody is owed a turn
            self._lines.clear()
            self._new.clear()
            self._standing.clear()
