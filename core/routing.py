"""The router: which backend, which replica, queueing, limits, time limits, what deaths mean.

Theory of operation. Each query gets a ticket. A ticket is *queued* at its backend, *assigned* to
one replica, or ended. Queues are first in, first out per backend; a replica never holds more than
max_ongoing_requests tickets; the replica with the fewest is taken first. A ticket's slot is taken
at assignment and given back when the replica reports its outcome or rejects it, or dies: not when
the caller has lost interest, because the replica may still be busy with it.

Every method takes the time and returns effects, in the order in which to perform them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from understudy.core.balancing import Levels, RoutedReplica
from understudy.core.errors import (
    BackPressureError,
    DeploymentUnavailableError,
    MethodNotAllowedError,
    QueryTimeoutError,
    ReplicaUnavailableError,
    UnderstudyError,
)
from understudy.core.refusals import died, not_found, refusal, unavailable
from understudy.core.routes import Routes
from understudy.core.tables import BackendTable, EndpointTable, ReplicaTable
from understudy.core.tickets import Assign, Cancel, Effects, Ended, QueryLike, Ticket
from understudy.core.traffic import choose_backend

MAX_ATTEMPTS = 3  # a query that kills its replica must not kill all of them in turn
SATURATED_S = 0.02  # how long a replica that rejected a ticket is left alone
CANCELLED_STATUS = 499


@dataclass(slots=True, eq=False)
class _Backend:
    table: BackendTable
    queue: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)
    replicas: dict[str, RoutedReplica] = field(default_factory=dict)
    levels: Levels = field(default_factory=Levels)


class Router:
    """All tickets of one proxy. ``draw`` returns a uniform random number in [0, 1)."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._endpoints: dict[str, EndpointTable] = {}
        self._routes = Routes()
        self._backends: dict[str, _Backend] = {}
        self._replicas: dict[str, RoutedReplica] = {}  # also the retired ones with tickets
        self._saturated: list[RoutedReplica] = []
        self._tickets: dict[Hashable, dict[int, Ticket]] = {}  # by caller, then query id
        self._timed: dict[int, Ticket] = {}  # those with a deadline, by number
        self._deadlines: list[tuple[float, int]] = []  # a heap; ended ones leave it late
        self._numbers = itertools.count(1)

    # --- Tables ---------------------------------------------------------------------------------

    def routes(self) -> dict[str, str]:
        """Return prefix -> endpoint."""
        return self._routes.all()

    def load(self) -> dict[str, tuple[int, int]]:
        """Return backend -> (queued, ongoing)."""
        ongoing = dict.fromkeys(self._backends, 0)
        for replica in self._replicas.values():
            ongoing[replica.backend] = ongoing.get(replica.backend, 0) + len(replica.ongoing)
        return {tag: (len(b.queue), ongoing[tag]) for tag, b in self._backends.items()}

    def ongoing(self) -> dict[str, int]:
        """Return replica -> tickets it has."""
        return {tag: len(replica.ongoing) for tag, replica in self._replicas.items()}

    def set_endpoint(self, name: str, table: EndpointTable | None, now: float) -> Effects:
        """Take an endpoint's newest table; None forgets it.

        What replicas have of it runs on. What is queued where it has no traffic any more is routed
        anew: nothing may run there again.
        """
        old = self._endpoints.pop(name, None)
        if old is not None and old.route is not None:
            self._routes.remove(old.route, name)
        if table is not None:
            self._endpoints[name] = table
            if table.route is not None:
                self._routes.set(table.route, name)
        left = set(old.traffic) - set(table.traffic if table is not None else ()) if old else set()
        return [e for tag in sorted(left) for e in self._route_queue_anew(tag, name, now)]

    def set_backend(self, tag: str, table: BackendTable | None, now: float) -> Effects:
        """Take a backend's newest table; None forgets it and routes what is queued anew."""
        backend = self._backends.setdefault(tag, _Backend(table or BackendTable(tag=tag)))
        backend.table = table or BackendTable(tag=tag, unavailable="it was deleted")
        current = {replica.tag: replica for replica in backend.table.replicas}
        for old in list(backend.replicas.values()):
            if current.get(old.table.tag) != old.table:
                self._retire(backend, old)
        effects: Effects = []
        for replica in backend.table.replicas:
            if replica.tag not in backend.replicas:
                effects += self._add_replica(backend, replica, now)
        if table is not None:
            return effects + self._fill(backend, now)
        del self._backends[tag]
        tickets = list(backend.queue.values())
        return effects + [e for ticket in tickets for e in self._reroute(ticket, now)]

    # --- Queries --------------------------------------------------------------------------------

    def submit(self, caller: Hashable, query: QueryLike, now: float) -> Effects:
        """Route a new query. A repeat of one that is still here is ignored."""
        tickets = self._tickets.get(caller)
        if tickets is not None and query.id in tickets:
            return []
        name = query.endpoint if query.endpoint is not None else self._routes.find(query.path)
        endpoint = self._endpoints.get(name) if name is not None else None
        if endpoint is None:
            return [not_found(caller, query)]
        if query.http_method and endpoint.methods and query.http_method not in endpoint.methods:
            text = f"{query.http_method} is not allowed; allowed are {', '.join(endpoint.methods)}"
            return [refusal(caller, query, MethodNotAllowedError, text, endpoint.methods)]
        ticket = Ticket(
            next(self._numbers), caller, query, endpoint.name, endpoint.route or "/", now
        )
        if tickets is None:
            tickets = self._tickets[caller] = {}
        tickets[query.id] = ticket
        return self._route(ticket, endpoint, now)

    def cancel(self, caller: Hashable, query_id: int, now: float) -> Effects:
        """Drop a query wherever it is; the caller no longer wants an answer."""
        ticket = self._tickets.get(caller, {}).get(query_id)
        return [] if ticket is None else self._abandon(ticket, CANCELLED_STATUS, now)

    def caller_lost(self, caller: Hashable, now: float) -> Effects:
        """Drop all queries of a caller that died."""
        lost = list(self._tickets.get(caller, {}).values())
        return [e for ticket in lost for e in self._abandon(ticket, CANCELLED_STATUS, now)]

    def expire(self, now: float) -> Effects:
        """Answer what is past its deadline; to be called at :meth:`next_deadline_at`."""
        effects: Effects = []
        while self._deadlines and self._deadlines[0][0] <= now:
            due_at, number = heapq.heappop(self._deadlines)
            ticket = self._timed.get(number)
            if ticket is None or ticket.abandoned:
                continue
            text = f"no answer within {due_at - ticket.submitted_at:.6g} s"
            effects.append(refusal(ticket.caller, ticket.query, QueryTimeoutError, text))
            effects += self._abandon(ticket, QueryTimeoutError.http_status, now)
        return effects

    def next_deadline_at(self) -> float | None:
        """Return when the next query's time is up."""
        while self._deadlines and self._deadlines[0][1] not in self._timed:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # --- Replicas -------------------------------------------------------------------------------

    def finished(self, replica: str, outcomes: Iterable[tuple[int, int]], now: float) -> Effects:
        """Free the slots of (ticket, status) pairs, and give them to what waits."""
        holder = self._replicas.get(replica)
        if holder is None:
            return []
        effects: Effects = []
        for number, status in outcomes:
            ticket = holder.ongoing.pop(number, None)
            if ticket is not None:
                effects.append(self._end(ticket, ticket.abandoned or status, now))
        holder.saturated_until = 0.0
        return self._after_release(holder, effects, now)

    def rejected(
        self, replica: str, numbers: Iterable[int], now: float, *, draining: bool
    ) -> Effects:
        """Queue again, at the front, tickets that the replica had no room for."""
        holder = self._replicas.get(replica)
        if holder is None:
            return []
        holder.draining |= draining
        holder.saturated_until = now + SATURATED_S
        self._saturated.append(holder)
        tickets = [t for n in numbers if (t := holder.ongoing.pop(n, None)) is not None]
        for ticket in tickets:
            ticket.attempts -= 1
        effects = self._after_release(holder, [], now)
        return effects + self._put_back(tickets, now)

    def replica_lost(self, replica: str, unsent: Iterable[int], now: float) -> Effects:
        """Send what a dead replica had to others where it may be repeated; fail the rest.

        ``unsent`` are tickets that never left for the replica; any of them may be repeated.
        """
        holder = self._replicas.pop(replica, None)
        if holder is None:
            return []
        backend = self._backends.get(holder.backend)
        if backend is not None and backend.replicas.get(replica) is holder:
            self._retire(backend, holder)
        not_run = set(unsent)
        effects: Effects = []
        again: list[Ticket] = []
        for ticket in holder.ongoing.values():
            if ticket.number in not_run:
                ticket.attempts -= 1
                again.append(ticket)
            elif ticket.abandoned or (ticket.query.repeatable and ticket.attempts < MAX_ATTEMPTS):
                again.append(ticket)
            else:
                effects += self._fail(ticket, ReplicaUnavailableError, died(ticket), now)
        holder.ongoing = {}
        return effects + self._put_back(again, now)

    def wake(self, now: float) -> Effects:
        """Try again replicas that had rejected; to be called SATURATED_S after a rejection."""
        saturated, self._saturated = self._saturated, []
        effects: Effects = []
        for holder in saturated:
            if holder.saturated_until > now:
                self._saturated.append(holder)
            else:
                effects = self._after_release(holder, effects, now)
        return effects

    # --- Inside: replicas -----------------------------------------------------------------------

    def _add_replica(self, backend: _Backend, table: ReplicaTable, now: float) -> Effects:
        effects: Effects = []
        holder = self._replicas.get(table.tag)
        if holder is not None and holder.table != table:
            effects = self.replica_lost(table.tag, (), now)  # another process has its tag by now
            holder = None
        if holder is None:
            holder = self._replicas[table.tag] = RoutedReplica(table, backend.table.tag)
        holder.retired = False  # it may be back: a new controller begins with an empty table
        backend.replicas[table.tag] = holder
        self._set_level(backend, holder, now)
        return effects

    def _retire(self, backend: _Backend, replica: RoutedReplica) -> None:
        replica.retired = True
        del backend.replicas[replica.table.tag]
        backend.levels.remove(replica)
        if not replica.ongoing:
            self._replicas.pop(replica.table.tag, None)

    def _after_release(self, replica: RoutedReplica, effects: Effects, now: float) -> Effects:
        """Use a replica's room, if it may be used; return ``effects`` and those of that."""
        if replica.retired:
            if not replica.ongoing and self._replicas.get(replica.table.tag) is replica:
                del self._replicas[replica.table.tag]
            return effects
        backend = self._backends[replica.backend]
        self._set_level(backend, replica, now)
        return effects + self._fill(backend, now) if backend.queue else effects

    def _set_level(self, backend: _Backend, replica: RoutedReplica, now: float) -> None:
        if replica.draining or replica.saturated_until > now:
            backend.levels.remove(replica)
        else:
            backend.levels.place(replica)

    # --- Inside: tickets ------------------------------------------------------------------------

    def _route(self, ticket: Ticket, endpoint: EndpointTable, now: float) -> Effects:
        tag = choose_backend(endpoint.traffic, ticket.query.shard_key, self._draw)
        backend = self._backends.get(tag) if tag is not None else None
        if backend is None:
            text = f"endpoint {endpoint.name!r} has no backend with traffic"
            return self._fail(ticket, DeploymentUnavailableError, text, now)
        table = backend.table
        ticket.backend = table.tag
        self._set_deadline(ticket, table)
        if not backend.queue:
            replica = backend.levels.least_loaded(table.max_ongoing_requests)
            if replica is not None:
                return [_assign(ticket, backend, replica)]
        if table.unavailable and not backend.replicas:
            return self._fail(ticket, DeploymentUnavailableError, unavailable(ticket, table), now)
        queued = len(backend.queue)
        if 0 <= table.max_queued_requests <= queued:
            text = f"{endpoint.name} has {queued} queries queued, its limit"
            return self._fail(ticket, BackPressureError, text, now)
        backend.queue[ticket.number] = ticket
        return []

    def _reroute(self, ticket: Ticket, now: float) -> Effects:
        endpoint = self._endpoints.get(ticket.endpoint)
        if endpoint is None:
            text = f"{ticket.endpoint} was deleted"
            return self._fail(ticket, DeploymentUnavailableError, text, now)
        return self._route(ticket, endpoint, now)

    def _route_queue_anew(self, tag: str, endpoint: str, now: float) -> Effects:
        backend = self._backends.get(tag)
        if backend is None:
            return []
        tickets = [ticket for ticket in backend.queue.values() if ticket.endpoint == endpoint]
        for ticket in tickets:
            del backend.queue[ticket.number]
        return [e for ticket in tickets for e in self._reroute(ticket, now)]

    def _set_deadline(self, ticket: Ticket, table: BackendTable) -> None:
        given = ticket.query.timeout_s
        timeout_s = given if given is not None else table.request_timeout_s
        if timeout_s is not None and ticket.deadline_at is None:
            ticket.deadline_at = ticket.submitted_at + timeout_s
            self._timed[ticket.number] = ticket
            heapq.heappush(self._deadlines, (ticket.deadline_at, ticket.number))

    def _fill(self, backend: _Backend, now: float) -> Effects:
        effects: Effects = []
        queue, table = backend.queue, backend.table
        while queue:
            replica = backend.levels.least_loaded(table.max_ongoing_requests)
            if replica is None:
                break
            effects.append(_assign(queue.popitem(last=False)[1], backend, replica))
        if queue and table.unavailable and not backend.replicas:
            tickets = list(queue.values())
            queue.clear()
            for ticket in tickets:
                text = unavailable(ticket, table)
                effects += self._fail(ticket, DeploymentUnavailableError, text, now)
        return effects

    def _put_back(self, tickets: list[Ticket], now: float) -> Effects:
        """Queue tickets again, before all others and in their order."""
        effects: Effects = []
        back: list[tuple[Ticket, _Backend]] = []
        for ticket in tickets:
            ticket.replica = None
            endpoint = self._endpoints.get(ticket.endpoint)
            backend = self._backends.get(ticket.backend)
            if ticket.abandoned:
                effects.append(self._end(ticket, ticket.abandoned, now))
            elif endpoint is None or backend is None or ticket.backend not in endpoint.traffic:
                effects += self._reroute(ticket, now)
            else:
                back.append((ticket, backend))
        for ticket, backend in reversed(back):
            backend.queue[ticket.number] = ticket
            backend.queue.move_to_end(ticket.number, last=False)
        for backend in dict.fromkeys(backend for _, backend in back):
            effects += self._fill(backend, now)
        return effects

    def _abandon(self, ticket: Ticket, status: int, now: float) -> Effects:
        if ticket.replica is None:
            self._backends[ticket.backend].queue.pop(ticket.number, None)
            return [self._end(ticket, status, now)]
        if ticket.abandoned:
            return []
        ticket.abandoned = status
        return [Cancel(ticket.replica, ticket)]

    def _fail(self, ticket: Ticket, kind: type[UnderstudyError], text: str, now: float) -> Effects:
        answer = refusal(ticket.caller, ticket.query, kind, text)
        return [answer, self._end(ticket, kind.http_status, now)]

    def _end(self, ticket: Ticket, status: int, now: float) -> Ended:
        tickets = self._tickets[ticket.caller]
        del tickets[ticket.query.id]
        if not tickets:
            del self._tickets[ticket.caller]
        if ticket.deadline_at is not None:
            del self._timed[ticket.number]
        return Ended(ticket.endpoint, ticket.backend, status, now - ticket.submitted_at)


def _assign(ticket: Ticket, backend: _Backend, replica: RoutedReplica) -> Assign:
    ticket.replica = tag = replica.table.tag
    ticket.attempts += 1
    replica.ongoing[ticket.number] = ticket
    backend.levels.place(replica)
    return Assign(tag, ticket)
