"""The tickets of a router that have not ended: whose they are, and by when they must end."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator

from greenroom.core.copies import Copies
from greenroom.core.deadlines import Deadlines
from greenroom.core.queueing import RoutedBackend
from greenroom.core.tables import BackendTable, EndpointTable
from greenroom.core.tickets import Dropped, Ended, QueryLike, Ticket


class OpenTickets:
    """All tickets, in ``by_caller`` those that somebody wants answered, by caller and query id."""

    def __init__(self) -> None:
        self.by_caller: dict[Hashable, dict[int, Ticket]] = {}
        self.copies = Copies()
        self.deadlines = Deadlines()
        self._numbers = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self.by_caller or self.copies.open or self.deadlines)

    def open(
        self, caller: Hashable, query: QueryLike, endpoint: EndpointTable, now: float
    ) -> Ticket:
        """Make a query's ticket."""
        ticket = Ticket(
            next(self._numbers), caller, query, endpoint.name, endpoint.route or "/", now
        )
        tickets = self.by_caller.get(caller)
        if tickets is None:
            tickets = self.by_caller[caller] = {}
        tickets[query.id] = ticket
        return ticket

    def copy(self, original: Ticket, backend: RoutedBackend, now: float) -> Ticket | None:
        """Have a copy wait at its shadow; None where it cannot."""
        copy = self.copies.make(original, next(self._numbers), backend, now)
        if copy is not None:
            self.limit(copy, backend.table)
        return copy

    def find(self, caller: Hashable, query_id: int) -> Ticket | None:
        """Return the ticket of a query, if it has not ended."""
        tickets = self.by_caller.get(caller)
        return None if tickets is None else tickets.get(query_id)

    def of(self, caller: Hashable) -> list[Ticket]:
        """Return all tickets of a caller, the oldest first."""
        return list(self.by_caller.get(caller, {}).values())

    def unanswered(self) -> Iterator[Ticket]:
        """Return all that wait or run, copies included."""
        for tickets in (*self.by_caller.values(), self.copies.open):
            for ticket in tickets.values():
                if not ticket.answered:
                    yield ticket

    def limit(self, ticket: Ticket, table: BackendTable) -> None:
        """Set a ticket's deadline, where its query or its backend has one; the first set stays.

        The shorter of both holds: a query's is how long its caller waits, a backend's how long an
        answer of it may take, and neither is a reason to go on past the other.
        """
        timeout_s = ticket.query.timeout_s
        own_s = table.request_timeout_s
        if timeout_s is None or (own_s is not None and own_s < timeout_s):
            timeout_s = own_s
        if timeout_s is not None and ticket.deadline_at is None:
            self.deadlines.set(ticket, ticket.submitted_at + timeout_s)

    def end(self, ticket: Ticket, status: int, now: float) -> Ended | Dropped:
        """Forget a ticket; return what the metrics are to hear."""
        if ticket.deadline_at is not None:
            self.deadlines.forget(ticket)
        if ticket.caller is None:
            return self.copies.end(ticket, status, now)
        tickets = self.by_caller[ticket.caller]
        del tickets[ticket.query.id]
        if not tickets:
            del self.by_caller[ticket.caller]
        return Ended(ticket.endpoint, ticket.backend, status, now - ticket.submitted_at)
