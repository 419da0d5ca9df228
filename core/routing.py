"""The router: which backend, which replica, queueing, limits, time limits, what deaths mean.

Theory of operation. Each query gets a ticket. A ticket is *queued* at its backend, *assigned* to one
replica, or ended. Queues are first in, first out per backend; a replica never holds more than
max_ongoing_requests tickets; the replica with the fewest is taken first. A ticket's slot is taken at
assignment and given back when the replica reports its outcome or rejects it, or dies: not when the
caller has lost interest, because the replica may still be busy with it.

Every method takes the time and returns effects, in the order in which to perform them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from understudy.core.tables import BackendTable, EndpointTable, ReplicaTable
from understudy.core.traffic import choose_backend

MAX_ATTEMPTS = 3  # a query that kills its replica must not kill all of them in turn
SATURATED_S = 0.02  # how long a replica that rejected a ticket is left alone
RETRY_AFTER_S = 1.0


class QueryLike(Protocol):
    """What the router reads of a query."""

    @property
    def id(self) -> int: ...
    @property
    def endpoint(self) -> str | None: ...
    @property
    def path(self) -> str: ...
    @property
    def http_method(self) -> str: ...
    @property
    def timeout_s(self) -> float | None: ...
    @property
    def repeatable(self) -> bool: ...
    @property
    def shard_key(self) -> str | None: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """One query while the router has it."""

    number: int
    caller: Hashable
    query: Any  # QueryLike
    endpoint: str
    route: str
    backend: str
    submitted_at: float
    deadline_at: float | None = None
    replica: str | None = None
    attempts: int = 0
    answered: bool = False  # by the router itself; the replica may still be busy with it


class Assign(NamedTuple):
    """Send the ticket to the replica."""

    replica: str
    ticket: Ticket


class Cancel(NamedTuple):
    """Tell the replica to drop the ticket, which keeps its slot until the outcome comes."""

    replica: str
    ticket: Ticket


class Refuse(NamedTuple):
    """Answer the caller with an error; ``kind`` is a class in core.errors."""

    caller: Hashable
    query_id: int
    kind: str
    text: str
    retry_after_s: float | None = None
    allowed: tuple[str, ...] = ()


class Ended(NamedTuple):
    """For the metrics: a ticket ended with this HTTP status after this many seconds."""

    endpoint: str
    backend: str
    status: int
    seconds: float


Effect = Assign | Cancel | Refuse | Ended
Effects = list[Effect]


@dataclass(slots=True)
class _Replica:
    table: ReplicaTable
    backend: str
    ongoing: dict[int, Ticket] = field(default_factory=dict)
    saturated_until: float = 0.0
    retired: bool = False  # no longer in the table; lives on until its tickets are done

    def has_room(self, limit: int, now: float) -> bool:
        return not self.retired and len(self.ongoing) < limit and now >= self.saturated_until


@dataclass(slots=True)
class _Backend:
    table: BackendTable
    queue: deque[Ticket] = field(default_factory=deque)
    replicas: dict[str, _Replica] = field(default_factory=dict)


class Router:
    """All tickets of one proxy. ``draw`` returns a uniform random number in [0, 1)."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._endpoints: dict[str, EndpointTable] = {}
        self._routes: list[tuple[str, str]] = []  # (prefix, endpoint), longest first
        self._backends: dict[str, _Backend] = {}
        self._replicas: dict[str, _Replica] = {}
        self._tickets: dict[int, Ticket] = {}
        self._by_query: dict[tuple[Hashable, int], Ticket] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._numbers = itertools.count(1)

    # --- Tables ---------------------------------------------------------------------------------

    def routes(self) -> dict[str, str]:
        """Return prefix -> endpoint."""
        return {prefix: self._endpoints[name].name for prefix, name in sorted(self._routes)}

    def load(self) -> dict[str, tuple[int, int]]:
        """Return backend -> (queued, ongoing)."""
        return {
            tag: (len(b.queue), sum(len(r.ongoing) for r in b.replicas.values()))
            for tag, b in self._backends.items()
        }

    def ongoing(self) -> dict[str, int]:
        """Return replica -> tickets it has."""
        return {tag: len(replica.ongoing) for tag, replica in self._replicas.items()}

    def set_endpoint(self, name: str, table: EndpointTable | None) -> None:
        """Take an endpoint's newest table; None forgets it. Tickets it has run on."""
        if table is None:
            self._endpoints.pop(name, None)
        else:
            self._endpoints[name] = table
        routes = ((e.route, e.name) for e in self._endpoints.values() if e.route is not None)
        self._routes = sorted(routes, key=lambda item: len(item[0]), reverse=True)

    def set_backend(self, tag: str, table: BackendTable | None, now: float) -> Effects:
        """Take a backend's newest table; None forgets it and routes what is queued anew."""
        backend = self._backends.setdefault(tag, _Backend(table or BackendTable(tag=tag)))
        backend.table = table or BackendTable(tag=tag, unavailable="it was deleted")
        current = {replica.tag: replica for replica in backend.table.replicas}
        for old in list(backend.replicas.values()):
            if current.get(old.table.tag) != old.table:
                self._retire(backend, old)
        for replica in backend.table.replicas:
            if replica.tag not in backend.replicas:
                new = _Replica(replica, tag)
                backend.replicas[replica.tag] = self._replicas[replica.tag] = new
        if table is None:
            del self._backends[tag]
            return [e for ticket in list(backend.queue) for e in self._reroute(ticket, now)]
        return self._fill(backend, now)

    def _retire(self, backend: _Backend, replica: _Replica) -> None:
        replica.retired = True
        del backend.replicas[replica.table.tag]
        if not replica.ongoing:
            self._drop(replica)

    # --- Queries --------------------------------------------------------------------------------

    def submit(self, caller: Hashable, query: QueryLike, now: float) -> Effects:
        """Route a new query. A repeat of one that is still here is ignored."""
        if (caller, query.id) in self._by_query:
            return []
        endpoint = self._find_endpoint(query)
        if endpoint is None:
            return [self._not_found(caller, query)]
        if query.http_method and endpoint.methods and query.http_method not in endpoint.methods:
            text = f"{query.http_method} is not allowed; allowed are {', '.join(endpoint.methods)}"
            kind = "MethodNotAllowedError"
            return [Refuse(caller, query.id, kind, text, None, endpoint.methods)]
        ticket = Ticket(
            number=next(self._numbers),
            caller=caller,
            query=query,
            endpoint=endpoint.name,
            route=endpoint.route or "/",
            backend="",
            submitted_at=now,
        )
        self._tickets[ticket.number] = ticket
        self._by_query[caller, query.id] = ticket
        return self._route(ticket, endpoint, now)

    def cancel(self, caller: Hashable, query_id: int, now: float) -> Effects:
        """Drop a query wherever it is; the caller no longer wants an answer."""
        ticket = self._by_query.get((caller, query_id))
        return [] if ticket is None else self._abandon(ticket, 499, now)

    def caller_lost(self, caller: Hashable, now: float) -> Effects:
        """Drop all queries of a caller that died."""
        lost = [ticket for ticket in self._tickets.values() if ticket.caller == caller]
        return [effect for ticket in lost for effect in self._abandon(ticket, 499, now)]

    def expire(self, now: float) -> Effects:
        """Answer what is past its deadline; to be called at :meth:`next_deadline_at`."""
        effects: Effects = []
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = self._tickets.get(heapq.heappop(self._deadlines)[1])
            if ticket is None or ticket.answered:
                continue
            text = f"no answer within {now - ticket.submitted_at:.3g} s"
            effects.append(Refuse(ticket.caller, ticket.query.id, "QueryTimeoutError", text))
            effects += self._abandon(ticket, 408, now)
        return effects

    def next_deadline_at(self) -> float | None:
        """Return when the next query's time is up."""
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
                effects += self._end(ticket, status, now)
        holder.saturated_until = 0.0
        return effects + self._after_release(holder, now)

    def rejected(
        self, replica: str, numbers: Iterable[int], now: float, *, draining: bool
    ) -> Effects:
        """Queue again, at the front, tickets that the replica had no room for."""
        holder = self._replicas.get(replica)
        if holder is None:
            return []
        holder.saturated_until = float("inf") if draining else now + SATURATED_S
        tickets = [t for n in numbers if (t := holder.ongoing.pop(n, None)) is not None]
        effects = self._put_back(tickets, now)
        return effects + self._after_release(holder, now)

    def unsent(self, replica: str, numbers: Iterable[int], now: float) -> Effects:
        """Queue again tickets that never left for the replica, whatever their method."""
        holder = self._replicas.get(replica)
        tickets = [holder.ongoing.pop(n) for n in numbers if n in holder.ongoing] if holder else []
        for ticket in tickets:
            ticket.attempts -= 1
        return self._put_back(tickets, now)

    def replica_lost(self, replica: str, now: float) -> Effects:
        """Send what a dead replica had to others where it may be repeated; fail the rest."""
        holder = self._replicas.get(replica)
        if holder is None:
            return []
        holder.retired = True
        tickets, holder.ongoing = list(holder.ongoing.values()), {}
        backend = self._backends.get(holder.backend)
        if backend is not None:
            backend.replicas.pop(replica, None)
        self._drop(holder)
        repeat = [t for t in tickets if t.query.repeatable and t.attempts < MAX_ATTEMPTS]
        effects: Effects = []
        for ticket in tickets:
            if ticket.answered:
                effects += self._end(ticket, 499, now)
            elif ticket not in repeat:
                effects += self._fail(ticket, "ReplicaUnavailableError", _died(ticket), now)
        return effects + self._put_back([t for t in repeat if not t.answered], now)

    def wake(self, now: float) -> Effects:
        """Try again replicas that had rejected; to be called SATURATED_S after a rejection."""
        return [e for backend in list(self._backends.values()) for e in self._fill(backend, now)]

    # --- Inside -----------------------------------------------------------------------------------

    def _find_endpoint(self, query: QueryLike) -> EndpointTable | None:
        if query.endpoint is not None:
            return self._endpoints.get(query.endpoint)
        for prefix, name in self._routes:
            if prefix == "/" or query.path == prefix or query.path.startswith(prefix + "/"):
                return self._endpoints[name]
        return None

    def _not_found(self, caller: Hashable, query: QueryLike) -> Refuse:
        if query.endpoint is not None:
            text = f"no endpoint is named {query.endpoint!r}"
            return Refuse(caller, query.id, "DeploymentUnavailableError", text, 5.0)
        text = f"Path {query.path!r} not found. Ping /-/routes for available routes."
        return Refuse(caller, query.id, "RouteNotFoundError", text)

    def _route(self, ticket: Ticket, endpoint: EndpointTable, now: float) -> Effects:
        tag = choose_backend(endpoint.traffic, ticket.query.shard_key, self._draw)
        backend = self._backends.get(tag) if tag is not None else None
        if backend is None:
            text = f"endpoint {endpoint.name!r} has no backend with traffic"
            return self._fail(ticket, "DeploymentUnavailableError", text, now)
        ticket.backend = backend.table.tag
        if backend.table.unavailable and not backend.replicas:
            text = f"{endpoint.name} is unavailable: {backend.table.unavailable}"
            return self._fail(ticket, "DeploymentUnavailableError", text, now)
        if (replica := self._least_loaded(backend, now)) is not None and not backend.queue:
            self._set_deadline(ticket, backend.table)
            return [self._assign(ticket, replica)]
        limit = backend.table.max_queued_requests
        if 0 <= limit <= len(backend.queue):
            text = f"{endpoint.name} has {len(backend.queue)} queries queued, its limit"
            return self._fail(ticket, "BackPressureError", text, now)
        self._set_deadline(ticket, backend.table)
        backend.queue.append(ticket)
        return []

    def _reroute(self, ticket: Ticket, now: float) -> Effects:
        endpoint = self._endpoints.get(ticket.endpoint)
        if endpoint is None:
            text = f"{ticket.endpoint} was deleted"
            return self._fail(ticket, "DeploymentUnavailableError", text, now)
        return self._route(ticket, endpoint, now)

    def _set_deadline(self, ticket: Ticket, table: BackendTable) -> None:
        given = ticket.query.timeout_s
        timeout_s = given if given is not None else table.request_timeout_s
        if timeout_s is not None and ticket.deadline_at is None:
            ticket.deadline_at = ticket.submitted_at + timeout_s
            heapq.heappush(self._deadlines, (ticket.deadline_at, ticket.number))

    def _least_loaded(self, backend: _Backend, now: float) -> _Replica | None:
        limit = backend.table.max_ongoing_requests
        free = [r for r in backend.replicas.values() if r.has_room(limit, now)]
        return min(free, key=lambda r: len(r.ongoing), default=None)

    def _assign(self, ticket: Ticket, replica: _Replica) -> Assign:
        tag = replica.table.tag
        ticket.replica = tag
        ticket.attempts += 1
        replica.ongoing[ticket.number] = ticket
        # Last in the dict comes last among equally loaded ones: round robin.
        siblings = self._backends[replica.backend].replicas
        siblings[tag] = siblings.pop(tag)
        return Assign(tag, ticket)

    def _fill(self, backend: _Backend, now: float) -> Effects:
        effects: Effects = []
        while backend.queue and (replica := self._least_loaded(backend, now)) is not None:
            effects.append(self._assign(backend.queue.popleft(), replica))
        if backend.queue and backend.table.unavailable and not backend.replicas:
            for ticket in list(backend.queue):
                text = f"{ticket.endpoint} is unavailable: {backend.table.unavailable}"
                effects += self._fail(ticket, "DeploymentUnavailableError", text, now)
        return effects

    def _after_release(self, replica: _Replica, now: float) -> Effects:
        if replica.retired and not replica.ongoing:
            self._drop(replica)
        backend = self._backends.get(replica.backend)
        return [] if backend is None else self._fill(backend, now)

    def _put_back(self, tickets: list[Ticket], now: float) -> Effects:
        effects: Effects = []
        touched: dict[str, _Backend] = {}
        for ticket in reversed(tickets):
            ticket.replica = None
            backend = self._backends.get(ticket.backend)
            if ticket.answered:
                effects += self._end(ticket, 499, now)
            elif backend is None:
                effects += self._reroute(ticket, now)
            else:
                backend.queue.appendleft(ticket)
                touched[ticket.backend] = backend
        return effects + [e for backend in touched.values() for e in self._fill(backend, now)]

    def _abandon(self, ticket: Ticket, status: int, now: float) -> Effects:
        if ticket.replica is None:
            return self._end(ticket, status, now)
        if ticket.answered:
            return []
        ticket.answered = True
        return [Cancel(ticket.replica, ticket)]

    def _fail(self, ticket: Ticket, kind: str, text: str, now: float) -> Effects:
        refusal = Refuse(ticket.caller, ticket.query.id, kind, text, RETRY_AFTER_S)
        return [refusal, *self._end(ticket, 503, now)]

    def _end(self, ticket: Ticket, status: int, now: float) -> Effects:
        if self._tickets.pop(ticket.number, None) is None:
            return []
        self._by_query.pop((ticket.caller, ticket.query.id), None)
        backend = self._backends.get(ticket.backend)
        if ticket.replica is None and backend is not None and ticket in backend.queue:
            backend.queue.remove(ticket)
        return [Ended(ticket.endpoint, ticket.backend, status, now - ticket.submitted_at)]

    def _drop(self, replica: _Replica) -> None:
        if self._replicas.get(replica.table.tag) is replica:
            del self._replicas[replica.table.tag]


def _died(ticket: Ticket) -> str:
    if ticket.query.repeatable:
        return f"{ticket.endpoint}: {ticket.attempts} replicas died with this query under way"
    return f"{ticket.endpoint}: the replica died with this query under way; it may have run"
