"""The router: which backend, which replica, queueing, limits, time limits, what deaths mean.

Theory of operation. Each query gets a ticket. A ticket is *queued* at its backend, *assigned* to
one replica, or ended. Queues are first in, first out per endpoint and backend, and the endpoints of
a backend take turns (lines.py); a replica never holds more than max_ongoing_requests tickets; the
replica with the fewest is taken first. A ticket's slot is taken
at assignment and given back when the replica reports its outcome or rejects it, or dies: not when
the caller has lost interest, because the replica may still be busy with it. An answered ticket has
no slot, and is kept until its answer is known to have arrived: its replica may die before that.

Where an endpoint has shadows, some queries that were let in get a copy: a ticket without a caller,
which runs once or not at all, and whose end nobody hears of but the metrics.

Every method takes the time and returns effects, in the order in which to perform them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from greenroom.core.errors import (
    BackPressureError,
    DeploymentUnavailableError,
    GreenroomError,
    MethodNotAllowedError,
    QueryTimeoutError,
    ReplicaUnavailableError,
    RouteNotFoundError,
)
from greenroom.core.routing.queues import RoutedBackend, RoutedReplica
from greenroom.core.routing.tables import BackendTable, EndpointTable, ReplicaTable
from greenroom.core.routing.tickets import (
    Cancel,
    Compare,
    Dropped,
    Effects,
    Ended,
    Pairing,
    QueryLike,
    Refuse,
    Starved,
    Ticket,
)
from greenroom.core.routing.traffic import (
    RoutedEndpoint,
    Routes,
    choose_shadows,
    may_be_resent,
    repeat,
)

# The replicas that a router knows of, with the tickets that they hold.

SATURATED_S = 0.02  # how long a replica that rejected a ticket is left alone


class ReplicaSlots:
    """Replicas by tag: those of the newest tables, and retired ones until their tickets are done.

    A retired replica gets no more tickets. One that has rejected a ticket *rests* for SATURATED_S,
    or until it has done something.
    """

    def __init__(self, own_host: str = "") -> None:
        self._own_host = own_host
        self.by_tag: dict[str, RoutedReplica] = {}
        self._resting: list[RoutedReplica] = []

    def ongoing(self, among: Iterable[str] | None = None) -> dict[str, int]:
        """Return replica -> tickets it has, of all or of those among these."""
        tags = self.by_tag if among is None else self.by_tag.keys() & set(among)
        return {tag: len(self.by_tag[tag].ongoing) for tag in tags}

    def add(self, backend: RoutedBackend, table: ReplicaTable, now: float) -> None:
        """Have a replica get tickets; one that was retired may be back with those it has.

        A new controller begins with empty tables.
        """
        replica = self.by_tag.get(table.tag)
        if replica is None:
            is_near = table.host in {"", self._own_host}
            replica = RoutedReplica(table, backend.table.tag, is_near=is_near)
            self.by_tag[table.tag] = replica
        replica.retired = False
        backend.replicas[table.tag] = replica
        self.set_level(backend, replica, now)

    def retire(self, backend: RoutedBackend, replica: RoutedReplica) -> None:
        """Give a replica no more tickets."""
        replica.retired = True
        del backend.replicas[replica.table.tag]
        backend.levels_of(replica).remove(replica)
        self.forget_if_done(replica)

    def forget_if_done(self, replica: RoutedReplica) -> None:
        """Forget a retired replica that holds nothing any more."""
        if replica.ongoing or replica.unconfirmed:
            return
        if self.by_tag.get(replica.table.tag) is replica:
            del self.by_tag[replica.table.tag]

    def rest(self, replica: RoutedReplica, now: float) -> None:
        """Leave a replica that has rejected a ticket alone for a moment."""
        replica.saturated_until = now + SATURATED_S
        self._resting.append(replica)

    def rested(self, now: float) -> list[RoutedReplica]:
        """Return those that have rested by now; each is returned once."""
        resting, self._resting = self._resting, []
        rested: list[RoutedReplica] = []
        for replica in resting:
            (self._resting if replica.saturated_until > now else rested).append(replica)
        return rested

    def set_level(self, backend: RoutedBackend, replica: RoutedReplica, now: float) -> None:
        """Have a replica's backend choose it by the load it has now, if it may be chosen."""
        if replica.draining or replica.saturated_until > now:
            backend.levels_of(replica).remove(replica)
        else:
            backend.levels_of(replica).place(replica)


# When the time of queries is up.

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


# How many tickets wait and how many replicas have, told in the ways that others ask for.

LoadByBackend = dict[str, tuple[int, int]]
LoadByEndpoint = dict[tuple[str, str], tuple[int, int]]


def by_backend(tickets: Iterable[Ticket]) -> LoadByBackend:
    """Return backend -> (queued, ongoing), of the backends that have any."""
    load: LoadByBackend = {}
    for ticket in tickets:
        queued, ongoing = load.get(ticket.backend, (0, 0))
        waits = ticket.replica is None
        load[ticket.backend] = (queued + waits, ongoing + (not waits))
    return load


def by_endpoint(
    endpoints: Mapping[str, RoutedEndpoint], tickets: Iterable[Ticket]
) -> tuple[LoadByEndpoint, LoadByEndpoint]:
    """Return (endpoint, backend) -> (queued, ongoing), of queries and of shadows' copies.

    All pairs that may have any are there, also those that have none.
    """
    queries: LoadByEndpoint = {}
    copies: LoadByEndpoint = {}
    for name, endpoint in endpoints.items():
        queries.update(dict.fromkeys([(name, tag) for tag in endpoint.split.tags], (0, 0)))
        copies.update(dict.fromkeys([(name, tag) for tag in endpoint.table.shadows], (0, 0)))
    for ticket in tickets:
        load, pair = copies if ticket.is_copy else queries, (ticket.endpoint, ticket.backend)
        queued, ongoing = load.get(pair, (0, 0))
        waits = ticket.replica is None
        load[pair] = (queued + waits, ongoing + (not waits))
    return queries, copies


def overdue(tickets: Iterable[Ticket], before: float) -> Counter[tuple[str, str]]:
    """Return how many queries of each (endpoint, backend) are here since before that time.

    Without open WebSockets, which are not slow.
    """
    return Counter(
        (ticket.endpoint, ticket.backend)
        for ticket in tickets
        if ticket.submitted_at < before and not (ticket.is_copy or ticket.is_open_socket)
    )


# What callers are told when the router does not have their query run.


def refusal(
    caller: Hashable,
    query: QueryLike,
    kind: type[GreenroomError],
    text: str,
    allowed: tuple[str, ...] = (),
    after_s: float | None = None,
) -> Refuse:
    """Make the answer with this kind of error; ``after_s`` replaces its usual retry_after_s."""
    after_s = kind.retry_after_s if after_s is None else after_s
    return Refuse(caller, query.id, kind.__name__, text, after_s, allowed)


def not_found(caller: Hashable, query: QueryLike) -> Refuse:
    """Make the answer where there is no endpoint."""
    if query.endpoint is not None:
        text = f"no endpoint is named {query.endpoint!r}"
        return refusal(caller, query, DeploymentUnavailableError, text)
    text = f"Path {query.path!r} not found. Ping /-/routes for available routes."
    return refusal(caller, query, RouteNotFoundError, text)


def unavailable(ticket: Ticket, table: BackendTable) -> str:
    """Say why no replica is to be expected."""
    return f"{ticket.endpoint} is unavailable: {table.unavailable}"


def no_time_left(ticket: Ticket, run_s: float, now: float) -> str:
    """Say why a query is not begun when its turn has come."""
    left_s = ticket.left_s(now)
    if left_s <= 0:
        return f"no answer within {ticket.time_limit_s:.6g} s"
    return (
        f"no answer within {ticket.time_limit_s:.6g} s: when its turn came {left_s:.3g} s were "
        f"left, and a query takes about {run_s:.3g} s"
    )


def proxy_died(endpoint: str) -> str:
    """Say why a query that an earlier router may have had run is not taken."""
    return f"{endpoint}: the proxy died with this query under way; it may have run"


# The copies of queries that a router has made for shadows, and what they keep in memory.

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


# The tickets of a router that have not ended: whose they are, and by when they must end.


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


# The making of copies for shadows: some ms after their queries were let in, which go first.

AT_ONCE = 8
Fill = Callable[[RoutedBackend, float], Effects]


class Copying:
    """Makes the copies of a router's queries; ``fill`` gives what waits at a backend its room."""

    def __init__(
        self,
        endpoints: Mapping[str, RoutedEndpoint],
        backends: Mapping[str, RoutedBackend],
        tickets: OpenTickets,
        fill: Fill,
    ) -> None:
        self._endpoints = endpoints
        self._backends = backends
        self._tickets = tickets
        self._fill = fill
        self._due: list[tuple[Ticket, list[str]]] = []  # queries, and their shadows

    @property
    def is_due(self) -> bool:
        """Whether there are copies to be made."""
        return bool(self._due)

    def later(self, original: Ticket, endpoint: EndpointTable, draw: Callable[[], float]) -> None:
        """Note which shadows are to get a copy: all else can wait until the query has left."""
        if shadows := choose_shadows(endpoint.shadows, draw):
            self._due.append((original, shadows))
            if endpoint.compares and not endpoint.compares.keys().isdisjoint(shadows):
                original.compare = None

    def make(self, now: float) -> Effects:
        """Make some of those that are due, where that costs nobody anything.

        Of many only a half: queries that come meanwhile wait for what is done at once.
        """
        count = max(AT_ONCE, len(self._due) // 2)
        due, self._due = self._due[:count], self._due[count:]
        effects: Effects = []
        for original, shadows in due:
            places: tuple[Pairing, ...] = ()
            for tag in shadows:
                places += self._copy(original, tag, effects, now)
            if original.compare is None:
                original.compare = places
                if original.replica is not None:  # else they go with its assignment
                    effects.append(Compare(original.replica, original))
        return effects

    def _copy(
        self, original: Ticket, tag: str, effects: Effects, now: float
    ) -> tuple[Pairing, ...]:
        """Have one shadow run a query, too; return where its answer is to be compared."""
        endpoint = self._endpoints.get(original.endpoint)
        backend = self._backends.get(tag)
        copy = None
        if backend is not None and endpoint is not None and endpoint.copies_to(tag, original):
            copy = self._tickets.copy(original, backend, now)
        if copy is None or backend is None or endpoint is None:
            effects.append(Dropped(original.endpoint, tag))
            return ()
        compare = endpoint.table.compares.get(tag)
        places = () if compare is None else backend.pair(copy, compare)
        if not (backend.replicas or backend.queue.size or backend.copies.size > 1):
            effects.append(Starved(tag))
        effects += self._fill(backend, now)
        return places


CANCELLED_STATUS = 499


class Router:
    """All tickets of one proxy. ``draw`` returns a uniform random number in [0, 1).

    Replicas on ``own_host`` are taken first, while they have room.
    """

    def __init__(self, draw: Callable[[], float], own_host: str = "") -> None:
        self._draw = draw
        self._endpoints: dict[str, RoutedEndpoint] = {}
        self._routes = Routes()
        self._backends: dict[str, RoutedBackend] = {}
        self._holders = ReplicaSlots(own_host)
        self._tickets = OpenTickets()
        self._with_traffic: Counter[str] = Counter()  # endpoints by backend
        self._copying = Copying(self._endpoints, self._backends, self._tickets, self._fill)

    # --- Tables ---------------------------------------------------------------------------------

    def routes(self) -> dict[str, str]:
        """Return prefix -> endpoint."""
        return self._routes.all()

    def unready(self) -> dict[str, tuple[str, ...]]:
        """Return endpoint -> its backends that had replicas and have none; () if it is lost."""
        unready: dict[str, tuple[str, ...]] = {}
        for name, endpoint in sorted(self._endpoints.items()):
            missed = tuple(tag for tag in endpoint.split.tags if self._is_missed(tag))
            if missed or endpoint.table.unavailable:
                unready[name] = missed
        return unready

    def _is_missed(self, tag: str) -> bool:
        backend = self._backends.get(tag)
        return backend is not None and backend.table.is_expected and not backend.replicas

    def busy(self) -> dict[str, tuple[int, int]]:
        """Return backend -> (queued, ongoing) of those that have any, copies included."""
        return by_backend(self._tickets.unanswered())

    def load_by_endpoint(self) -> tuple[LoadByEndpoint, LoadByEndpoint]:
        """Return (endpoint, backend) -> (queued, ongoing), of queries and of shadows' copies."""
        return by_endpoint(self._endpoints, self._tickets.unanswered())

    def overdue(self, before: float) -> Counter[tuple[str, str]]:
        """Return how many queries of each (endpoint, backend) are open since before that time."""
        return overdue(self._tickets.unanswered(), before)

    def ongoing(self, among: Iterable[str] | None = None) -> dict[str, int]:
        """Return replica -> tickets it has, of all that it knows or of those among these."""
        return self._holders.ongoing(among)

    def set_endpoint(self, name: str, table: EndpointTable | None, now: float) -> Effects:
        """Take an endpoint's newest table; None forgets it.

        What replicas have of it runs on. What is queued where it has no traffic any more is routed
        anew, and copies where it has no shadow any more are dropped: nothing may run there again.
        """
        nothing = RoutedEndpoint(EndpointTable(name=name))
        old = self._endpoints.pop(name, nothing)
        if old.table.route is not None:
            self._routes.remove(old.table.route, name)
        new = nothing if table is None else RoutedEndpoint(table, old.budgets)
        if table is not None:
            self._endpoints[name] = new
            if table.route is not None:
                self._routes.set(table.route, name)
        left = old.places() - new.places()  # before slots are free that its queue must not get
        effects = [e for at in sorted(left) for e in self._route_queue_anew(at, name, now)]
        return effects + self._note_traffic(old, new, now)

    def _note_traffic(self, old: RoutedEndpoint, new: RoutedEndpoint, now: float) -> Effects:
        """Keep slots free for queries where a shadow has traffic, too, and not where it has not."""
        self._with_traffic.update(new.split.tags)
        self._with_traffic.subtract(old.split.tags)
        effects: Effects = []
        for tag in sorted({*old.split.tags, *new.split.tags}):
            if not self._with_traffic[tag]:
                del self._with_traffic[tag]
            backend = self._backends.get(tag)
            if backend is not None:
                backend.has_traffic = tag in self._with_traffic
                effects += self._fill(backend, now)
        return effects

    def set_backend(self, tag: str, table: BackendTable | None, now: float) -> Effects:
        """Take a backend's newest table; None forgets it and routes what is queued anew."""
        backend = self._backends.setdefault(tag, RoutedBackend(table or BackendTable(tag=tag)))
        backend.table = table or BackendTable(tag=tag, unavailable="it was deleted")
        backend.has_traffic = tag in self._with_traffic
        backend.resize()
        current = {replica.tag: replica for replica in backend.table.replicas}
        for old in list(backend.replicas.values()):
            if current.get(old.table.tag) != old.table:
                self._holders.retire(backend, old)
        effects: Effects = []
        for replica in backend.table.replicas:
            if replica.tag not in backend.replicas:
                effects += self._add_replica(backend, replica, now)
        if table is not None:
            return effects + self._fill(backend, now)
        del self._backends[tag]
        tickets = backend.take_waiting()
        return effects + [e for ticket in tickets for e in self._reroute(ticket, now)]

    # --- Queries --------------------------------------------------------------------------------

    def submit(
        self, caller: Hashable, query: QueryLike, now: float, *, resent: bool = False
    ) -> Effects:
        """Route a new query. A repeat of one that is still here is ignored.

        One that is ``resent`` was another router's, now dead, and may have run: it is refused
        unless it may be repeated wherever it could have been.
        """
        tickets = self._tickets.by_caller.get(caller)
        if tickets is not None and query.id in tickets:
            return []
        name = query.endpoint if query.endpoint is not None else self._routes.find(query.path)
        endpoint = self._endpoints.get(name) if name is not None else None
        if endpoint is None:
            return [not_found(caller, query)]
        table = endpoint.table
        if query.http_method and table.methods and query.http_method not in table.methods:
            text = f"{query.http_method} is not allowed; allowed are {', '.join(table.methods)}"
            return [refusal(caller, query, MethodNotAllowedError, text, table.methods)]
        if resent and not may_be_resent(query, endpoint, self._backends):
            return [refusal(caller, query, ReplicaUnavailableError, proxy_died(table.name))]
        ticket = self._tickets.open(caller, query, table, now)
        effects = self._route(ticket, endpoint, now)
        if table.shadows and self._tickets.find(caller, query.id) is not None:  # it was let in
            self._copying.later(ticket, table, self._draw)
        return effects

    @property
    def has_copies_due(self) -> bool:
        """Whether :meth:`make_copies` is to be called, COPY_S later: queries come first."""
        return self._copying.is_due

    def make_copies(self, now: float) -> Effects:
        """Have shadows run what queries ask for, where that costs nobody anything."""
        return self._copying.make(now)

    def cancel(self, caller: Hashable, query_id: int, now: float) -> Effects:
        """Drop a query wherever it is; the caller no longer wants an answer."""
        ticket = self._tickets.find(caller, query_id)
        return [] if ticket is None else self._abandon(ticket, CANCELLED_STATUS, now)

    def caller_lost(self, caller: Hashable, now: float) -> Effects:
        """Drop all queries of a caller that died."""
        lost = self._tickets.of(caller)
        return [e for ticket in lost for e in self._abandon(ticket, CANCELLED_STATUS, now)]

    def expire(self, now: float) -> Effects:
        """Answer what is past its deadline; to be called at :meth:`next_deadline_at`."""
        effects: Effects = []
        for ticket in self._tickets.deadlines.due(now):
            if ticket.abandoned or ticket.answered:
                continue
            if not ticket.is_copy:
                text = f"no answer within {ticket.time_limit_s:.6g} s"
                effects.append(refusal(ticket.caller, ticket.query, QueryTimeoutError, text))
            effects += self._drop(ticket, QueryTimeoutError.http_status, now)
        return effects

    def next_deadline_at(self) -> float | None:
        """Return when the next query's time is up."""
        return self._tickets.deadlines.next_at()

    # --- Replicas -------------------------------------------------------------------------------

    def finished(self, replica: str, outcomes: Iterable[tuple[int, int]], now: float) -> Effects:
        """Free the slots of (ticket, status) pairs, and give them to what waits."""
        holder = self._holders.by_tag.get(replica)
        if holder is None:
            return []
        effects: Effects = []
        outcomes = list(outcomes)
        self._heard(holder, [number for number, _ in outcomes], now)
        before = len(holder.ongoing)
        for number, status in outcomes:
            ticket = holder.ongoing.pop(number, None)
            if ticket is not None:
                effects.append(self._tickets.end(ticket, ticket.abandoned or status, now))
        holder.saturated_until = 0.0
        return self._after_release(holder, effects, now, before - len(holder.ongoing))

    def holds(self, replica: str, models: Iterable[str]) -> None:
        """Know which multiplexed models a replica has; queries for them go there if they can."""
        if replica in self._holders.by_tag:
            self._holders.by_tag[replica].models = frozenset(models)

    def begun(self, replica: str, numbers: Iterable[int], now: float) -> None:
        """Note that parts of answers have left, which nobody can take back.

        A WebSocket is answered by that, as far as time limits and latencies go: it may stay open.
        """
        holder = self._holders.by_tag.get(replica)
        if holder is None:
            return
        numbers = list(numbers)
        self._heard(holder, numbers, now)
        for number in numbers:
            ticket = holder.ongoing.get(number)
            if ticket is not None:
                ticket.begun = True
                if ticket.is_open_socket:
                    ticket.answered_at = now
                    self._tickets.deadlines.forget(ticket)

    def answered(self, replica: str, outcomes: Iterable[tuple[int, int]], now: float) -> Effects:
        """Free the slots of (ticket, status) pairs whose answers are on their way to callers.

        :meth:`delivered` ends them; copies end here, for their answers go nowhere.
        """
        holder = self._holders.by_tag.get(replica)
        if holder is None:
            return []
        effects: Effects = []
        outcomes = list(outcomes)
        self._heard(holder, [number for number, _ in outcomes], now)
        before, ticket = len(holder.ongoing), None
        for number, status in outcomes:
            ticket = holder.ongoing.pop(number, None)
            if ticket is None:
                continue
            if ticket.caller is None:
                effects.append(self._tickets.end(ticket, ticket.abandoned or status, now))
                continue
            ticket.answered = ticket.abandoned or status
            if not ticket.is_open_socket:
                ticket.answered_at = now
            holder.unconfirmed[number] = ticket
        holder.saturated_until = 0.0
        # One of those that came together will do; how long a WebSocket is open says nothing.
        if ticket is not None and not (holder.retired or ticket.is_open_socket):
            self._backends[holder.backend].pace.ran(now - ticket.assigned_at)
        return self._after_release(holder, effects, now, before - len(holder.ongoing))

    def delivered(self, replica: str, numbers: Iterable[int]) -> Effects:
        """End answered tickets: their callers have the answers, or are dead."""
        holder = self._holders.by_tag.get(replica)
        if holder is None:
            return []
        unconfirmed = holder.unconfirmed
        effects: Effects = [
            self._tickets.end(ticket, ticket.answered, ticket.answered_at)
            for number in numbers
            if (ticket := unconfirmed.pop(number, None)) is not None
        ]
        if holder.retired:
            self._holders.forget_if_done(holder)
        return effects

    def rejected(
        self, replica: str, numbers: Iterable[int], now: float, *, draining: bool
    ) -> Effects:
        """Queue again, at the front, tickets that the replica had no room for."""
        holder = self._holders.by_tag.get(replica)
        if holder is None:
            return []
        numbers = list(numbers)
        self._heard(holder, numbers, now)
        holder.draining |= draining
        self._holders.rest(holder, now)
        tickets = [t for n in numbers if (t := holder.ongoing.pop(n, None)) is not None]
        for ticket in tickets:
            ticket.attempts -= 1
        effects = self._after_release(holder, [], now)
        return effects + self._put_back(tickets, now)

    def replica_lost(self, replica: str, unsent: Iterable[int], now: float) -> Effects:
        """Send what a dead replica had to others where it may be repeated; fail the rest.

        ``unsent`` are tickets that never left for the replica; any of them may be repeated. So are
        repeatable ones that it answered when nobody knows whether the answer arrived: callers
        ignore a second one. Copies are not, once they left: one that kills a replica must not kill
        the next.
        """
        holder = self._holders.by_tag.pop(replica, None)
        if holder is None:
            return []
        backend = self._backends.get(holder.backend)
        if backend is not None and backend.replicas.get(replica) is holder:
            self._holders.retire(backend, holder)
        not_run = set(unsent)
        # Those that are surely not answered first, as far as the budget goes.
        had = [*holder.ongoing.values(), *holder.unconfirmed.values()]
        holder.ongoing, holder.unconfirmed = {}, {}
        return self._again_or_fail(had, not_run, now)

    def undelivered(self, replica: str, numbers: Iterable[int], now: float) -> Effects:
        """Deal with answers that a broken link kept from callers as if the replica had died."""
        holder = self._holders.by_tag.get(replica)
        if holder is None:
            return []
        found = [holder.ongoing.pop(n, None) or holder.unconfirmed.pop(n, None) for n in numbers]
        effects = self._after_release(holder, [], now)
        return effects + self._again_or_fail([t for t in found if t is not None], set(), now)

    def _again_or_fail(self, tickets: list[Ticket], not_run: set[int], now: float) -> Effects:
        effects: Effects = []
        repeated: Effects = []
        again: list[Ticket] = []
        for ticket in tickets:
            ticket.answered = 0
            if ticket.number in not_run:
                ticket.attempts -= 1
            elif not ticket.abandoned:
                endpoint = self._endpoints.get(ticket.endpoint)
                text, told = repeat(ticket, endpoint, self._backends.get(ticket.backend))
                repeated += told
                if text:
                    effects += self._fail(ticket, ReplicaUnavailableError, text, now)
                    continue
            again.append(ticket)
        again.sort(key=lambda ticket: ticket.number)
        return effects + self._put_back(again, now) + repeated

    def wake(self, now: float) -> Effects:
        """Try again replicas that had rejected; to be called SATURATED_S after a rejection."""
        effects: Effects = []
        for holder in self._holders.rested(now):
            effects = self._after_release(holder, effects, now)
        return effects

    # --- Inside: replicas -----------------------------------------------------------------------

    def _heard(self, replica: RoutedReplica, numbers: list[int], now: float) -> None:
        """Note that a replica has said something of tickets that it has."""
        is_suspect = replica.seems_suspect(numbers, now)
        if is_suspect != replica.is_suspect:
            self._suspect(replica, is_suspect=is_suspect)

    def _suspect(self, replica: RoutedReplica, *, is_suspect: bool) -> None:
        if replica.retired:
            replica.is_suspect = is_suspect
        else:
            backend = self._backends[replica.backend]
            backend.set_suspect(replica, is_suspect=is_suspect)

    def _add_replica(self, backend: RoutedBackend, table: ReplicaTable, now: float) -> Effects:
        effects: Effects = []
        holder = self._holders.by_tag.get(table.tag)
        if holder is not None and holder.table != table:
            effects = self.replica_lost(table.tag, (), now)  # another process has its tag by now
        self._holders.add(backend, table, now)
        return effects

    def _after_release(
        self, replica: RoutedReplica, effects: Effects, now: float, freed: int = 0
    ) -> Effects:
        """Use a replica's room, if it may be used; return ``effects`` and those of that.

        ``freed`` is how many of its slots have become free because a query has ended.
        """
        if replica.retired:
            self._holders.forget_if_done(replica)
            return effects
        backend = self._backends[replica.backend]
        self._holders.set_level(backend, replica, now)
        if backend.queue.size:
            backend.pace.freed(freed, now)
        elif not backend.copies.size:
            return effects
        return effects + self._fill(backend, now)

    # --- Inside: tickets ------------------------------------------------------------------------

    def _route(self, ticket: Ticket, endpoint: RoutedEndpoint, now: float) -> Effects:
        tag = endpoint.split.choose(ticket.query.shard_key, self._draw)
        backend = self._backends.get(tag) if tag is not None else None
        if backend is None:
            why = endpoint.table.unavailable
            text = f"endpoint {ticket.endpoint!r} " + (
                f"is unavailable: {why}" if why else "has no backend with traffic"
            )
            return self._fail(ticket, DeploymentUnavailableError, text, now)
        table = backend.table
        ticket.backend = table.tag
        ticket.budget = endpoint.budgets[table.tag]
        if ticket.query.timeout_s is not None or table.request_timeout_s is not None:
            self._tickets.limit(ticket, table)
        if not backend.queue.size and (
            replica := backend.choose(ticket, table.max_ongoing_requests)
        ):
            return [backend.assign(ticket, replica, now)]
        if table.unavailable and not backend.replicas:
            return self._fail(ticket, DeploymentUnavailableError, unavailable(ticket, table), now)
        return self._queue(ticket, backend, now)

    def _queue(self, ticket: Ticket, backend: RoutedBackend, now: float) -> Effects:
        starved = not (backend.queue.size or backend.replicas)
        refused = backend.let_wait(ticket, now)
        effects = [e for each, text in refused for e in self._refuse(each, backend, text, now)]
        return effects or ([Starved(ticket.backend)] if starved else [])

    def _refuse(self, ticket: Ticket, backend: RoutedBackend, text: str, now: float) -> Effects:
        """Have a caller come back later."""
        retry_after_s = backend.retry_after_s(ticket, now)
        ended = self._tickets.end(ticket, BackPressureError.http_status, now)
        kind = BackPressureError
        return [refusal(ticket.caller, ticket.query, kind, text, after_s=retry_after_s), ended]

    def _reroute(self, ticket: Ticket, now: float) -> Effects:
        endpoint = self._endpoints.get(ticket.endpoint)
        if endpoint is None or ticket.is_copy:
            text = f"{ticket.endpoint} was deleted"
            return self._fail(ticket, DeploymentUnavailableError, text, now)
        return self._route(ticket, endpoint, now)

    def _route_queue_anew(self, place: tuple[str, bool], endpoint: str, now: float) -> Effects:
        tag, is_shadow = place
        backend = self._backends.get(tag)
        if backend is None:
            return []
        queue = backend.copies if is_shadow else backend.queue
        return [e for ticket in queue.take_all(endpoint) for e in self._reroute(ticket, now)]

    def _fill(self, backend: RoutedBackend, now: float) -> Effects:
        assigned, too_late = backend.assign_waiting(now)
        effects: Effects = [*assigned]
        for ticket in too_late:
            text = no_time_left(ticket, backend.pace.run_s, now)
            effects += self._fail(ticket, QueryTimeoutError, text, now)
        table = backend.table
        if table.unavailable and not backend.replicas:
            for ticket in backend.take_waiting():
                text = unavailable(ticket, table)
                effects += self._fail(ticket, DeploymentUnavailableError, text, now)
        return effects

    def _put_back(self, tickets: list[Ticket], now: float) -> Effects:
        """Queue tickets again, before all others and in their order."""
        effects: Effects = []
        back: list[tuple[Ticket, RoutedBackend]] = []
        for ticket in tickets:
            ticket.replica = None
            endpoint = self._endpoints.get(ticket.endpoint)
            backend = self._backends.get(ticket.backend)
            if ticket.abandoned:
                effects.append(self._tickets.end(ticket, ticket.abandoned, now))
            elif endpoint is None or backend is None or not endpoint.sends(ticket):
                effects += self._reroute(ticket, now)
            else:
                back.append((ticket, backend))
        for ticket, backend in reversed(back):
            backend.put_first(ticket, now)
        for backend in dict.fromkeys(backend for _, backend in back):
            effects += self._fill(backend, now)
        return effects

    def _abandon(self, original: Ticket, status: int, now: float) -> Effects:
        """Drop what nobody wants any more, with its copies: a stream may have no end of its own."""
        if original.answered:
            original.abandoned = original.abandoned or status  # if its replica dies, it ends there
            return []
        unwanted = [original, *self._tickets.copies.of(original)]
        return [e for each in unwanted for e in self._drop(each, status, now)]

    def _drop(self, ticket: Ticket, status: int, now: float) -> Effects:
        if ticket.abandoned or ticket.answered:
            return []
        ticket.abandoned = status
        if ticket.replica is not None:
            holder = self._holders.by_tag.get(ticket.replica)
            if holder is not None and holder.is_unheard_of(ticket, now):
                self._suspect(holder, is_suspect=True)
            return [Cancel(ticket.replica, ticket)]
        self._backends[ticket.backend].queue_of(ticket).remove(ticket)
        return [self._tickets.end(ticket, status, now)]

    def _fail(self, ticket: Ticket, kind: type[GreenroomError], text: str, now: float) -> Effects:
        ended = self._tickets.end(ticket, kind.http_status, now)
        return (
            [ended] if ticket.is_copy else [refusal(ticket.caller, ticket.query, kind, text), ended]
        )
