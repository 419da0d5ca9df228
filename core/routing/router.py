"""The router: which backend, which replica, queueing, limits, time limits, what deaths mean.

Theory of operation. Each query gets a ticket, whose life is a table (tickets.py). Queues are first
in, first out per endpoint and backend, and the endpoints of a backend take turns (queues.py). The
replica with the fewest tickets is taken first, and none ever holds more than max_ongoing_requests
(balancing.py).

Every method takes the time and returns effects, in the order in which to perform them. What follows
queries without deciding on them observes the router (``Observer`` in tickets.py): metrics, load
reports, tallies for rollouts, mirroring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping

from greenroom.core.config import SessionAffinity
from greenroom.core.errors import (
    BackPressureError,
    DeploymentUnavailableError,
    GreenroomError,
    MethodNotAllowedError,
    QueryTimeoutError,
    ReplicaUnavailableError,
    RouteNotFoundError,
)
from greenroom.core.routing.balancing import ReplicaSlots, RoutedBackend, RoutedReplica
from greenroom.core.routing.leases import WAIT_S, Leases, Used
from greenroom.core.routing.outliers import Outliers
from greenroom.core.routing.retries import MAX_ATTEMPTS, may_retry
from greenroom.core.routing.sessions import session_of
from greenroom.core.routing.tables import BackendTable, EndpointTable, ReplicaTable
from greenroom.core.routing.tickets import (
    ANSWERED,
    CANCELLED_STATUS,
    DROPPED,
    ENDED,
    NEW,
    QUEUED,
    RUNNING,
    Cancel,
    Effects,
    Ejected,
    Lease,
    Leased,
    LeaseState,
    LoadByBackend,
    LoadByEndpoint,
    Observers,
    OpenTickets,
    Preference,
    QueryLike,
    Refuse,
    Retried,
    Ticket,
)
from greenroom.core.routing.traffic import RoutedEndpoint, Routes, key_of
from greenroom.core.routing.weights import EVEN, Weight


class Router:
    """All tickets of one proxy. ``draw`` returns a uniform random number in [0, 1): for trials.

    Replicas on ``own_host`` are taken first, while they have room.
    """

    def __init__(self, draw: Callable[[], float], own_host: str = "") -> None:
        self.observers = Observers()
        self._draw = draw
        self._endpoints: dict[str, RoutedEndpoint] = {}
        self._routes = Routes()
        self._backends: dict[str, RoutedBackend] = {}
        self._replicas = ReplicaSlots(own_host)
        self._tickets = OpenTickets()
        self._with_traffic: Counter[str] = Counter()  # endpoints by backend
        self._leases = Leases()
        self.routes_version = 0  # grows when a path may lead elsewhere than before

    # --- What it knows --------------------------------------------------------------------------

    def routes(self) -> dict[str, str]:
        """Return prefix -> endpoint."""
        return self._routes.all()

    def endpoint(self, name: str) -> EndpointTable | None:
        """Return an endpoint's newest table."""
        endpoint = self._endpoints.get(name)
        return None if endpoint is None else endpoint.table

    def time_limit_s(self, backend: str) -> float | None:
        """Return how long a query may take at a backend by its newest table."""
        found = self._backends.get(backend)
        return None if found is None else found.table.request_timeout_s

    def weight(self, replica: str) -> Weight:
        """Return by how much a replica's load counts, at present."""
        found = self._replicas.by_tag.get(replica)
        return EVEN if found is None else found.weight

    def replicas_of(self, backend: str) -> list[str]:
        """Return the replicas of a backend's newest table."""
        found = self._backends.get(backend)
        return [] if found is None else list(found.replicas)

    def unready(self) -> dict[str, tuple[str, ...]]:
        """Return endpoint -> its backends that had replicas and have none; () if it is lost."""
        unready: dict[str, tuple[str, ...]] = {}
        for name, endpoint in sorted(self._endpoints.items()):
            tags = [tag for tag in endpoint.split.tags if tag in self._backends]
            missed = tuple(tag for tag in tags if self._backends[tag].is_missed)
            if missed or endpoint.table.unavailable:
                unready[name] = missed
        return unready

    def lacking(self) -> dict[str, dict[str, str] | None]:
        """Return each endpoint -> its backends that are to have replicas and have none, and why.

        None for an endpoint that is lost. Unlike :meth:`unready`, whatever has not come up counts.
        """
        lacking: dict[str, dict[str, str] | None] = {}
        for name, endpoint in self._endpoints.items():
            found = [self._backends[tag] for tag in endpoint.split.tags if tag in self._backends]
            tables = [b.table for b in found if b.table.is_wanted and not b.replicas]
            reasons = {table.tag: table.trouble for table in tables}
            lacking[name] = None if endpoint.table.unavailable else reasons
        return lacking

    def ongoing(self, among: Iterable[str] | None = None) -> dict[str, int]:
        """Return replica -> slots taken, of all that it knows or of those among these."""
        replicas = self._replicas.by_tag
        tags = replicas if among is None else replicas.keys() & set(among)
        return {tag: replicas[tag].load for tag in tags}

    def busy(self) -> LoadByBackend:
        """Return backend -> (queued, ongoing) of those that have any, mirrored queries included."""
        load: LoadByBackend = {}
        for by_endpoint in self.load_by_endpoint():
            for (_, tag), (queued, ongoing) in by_endpoint.items():
                if queued or ongoing:
                    others = load.get(tag, (0, 0))
                    load[tag] = (others[0] + queued, others[1] + ongoing)
        return load

    def load_by_endpoint(self) -> tuple[LoadByEndpoint, LoadByEndpoint]:
        """Return (endpoint, backend) -> (queued, ongoing), of queries and of mirrored queries.

        All pairs that may have any are there, also those that have none.
        """
        queries: LoadByEndpoint = {}
        mirrored: LoadByEndpoint = {}
        for name, endpoint in self._endpoints.items():
            queries.update({(name, tag): (0, 0) for tag in endpoint.split.tags})
            mirrored.update({(name, tag): (0, 0) for tag in endpoint.table.shadows})
        for ticket in self._tickets.unanswered():
            load = mirrored if ticket.is_mirrored else queries
            pair = (ticket.endpoint, ticket.backend)
            queued, ongoing = load.get(pair, (0, 0))
            waits = ticket.state is QUEUED
            load[pair] = (queued + waits, ongoing + (not waits))
        for lease in self._leases.by_number.values():
            queued, ongoing = queries.get((lease.endpoint, lease.backend), (0, 0))
            queries[lease.endpoint, lease.backend] = (queued, ongoing + lease.ongoing)
        return queries, mirrored

    def overdue(self, before: float) -> Counter[tuple[str, str]]:
        """Return how many queries of each (endpoint, backend) are open since before that time.

        Open WebSockets do not count: they are not slow. Of those under leases the callers say.
        """
        overdue = Counter(
            (ticket.endpoint, ticket.backend)
            for ticket in self._tickets.unanswered()
            if ticket.submitted_at < before and not (ticket.is_mirrored or ticket.is_open_socket)
        )
        for lease in self._leases.by_number.values():
            if lease.overdue:
                overdue[lease.endpoint, lease.backend] += lease.overdue
        return overdue

    # --- Tables ---------------------------------------------------------------------------------

    def set_endpoint(self, name: str, table: EndpointTable | None, now: float) -> Effects:
        """Take an endpoint's newest table; None forgets it.

        What replicas have of it runs on. What is queued where it has no traffic any more is routed
        anew, and mirrored queries where it has no shadow any more are dropped: nothing may run
        there again.
        """
        none = RoutedEndpoint(EndpointTable(name=name))
        old = self._endpoints.pop(name, none)
        effects = self._revoke_for(old.table, table)
        if old.table.route is not None:
            self._routes.remove(old.table.route, name)
        new = none if table is None else RoutedEndpoint(table, old)
        if table is not None:
            self._endpoints[name] = new
            if table.route is not None:
                self._routes.set(table.route, name)
        for tag, is_shadow in sorted(old.places() - new.places()):
            # Before slots become free that its queue must not get.
            if (backend := self._backends.get(tag)) is not None:
                queue = backend.mirrored if is_shadow else backend.queue
                effects += self._route_anew(queue.take_all(name), now)
        return effects + self._note_traffic(old, new, now)

    def _note_traffic(self, old: RoutedEndpoint, new: RoutedEndpoint, now: float) -> Effects:
        """Keep slots free for queries where a shadow has traffic too, and not where it has none."""
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
        backend = self._backends.get(tag)
        if backend is None:
            backend = RoutedBackend(table or BackendTable(tag=tag), Outliers(self._draw))
            self._backends[tag] = backend
        effects: Effects = [] if table == backend.table else self._revoke_of(tag)
        backend.take_table(table or BackendTable(tag=tag, unavailable="it was deleted"))
        backend.has_traffic = tag in self._with_traffic
        backend.let_in(now)
        backend.weigh(now)
        current = {replica.tag: replica for replica in backend.table.replicas}
        for old in list(backend.replicas.values()):
            if current.get(old.table.tag) != old.table:
                backend.retire(old, now)
                self._replicas.forget_if_done(old)
        for replica in backend.table.replicas:
            if replica.tag not in backend.replicas:
                effects += self._add_replica(backend, replica, now)
        if table is not None:
            return effects + self._fill(backend, now)
        del self._backends[tag]
        self._leases.forget_backend(tag)
        return effects + self._route_anew(backend.take_waiting(), now)

    def _add_replica(self, backend: RoutedBackend, table: ReplicaTable, now: float) -> Effects:
        effects: Effects = []
        replica = self._replicas.by_tag.get(table.tag)
        if replica is not None and replica.table != table:
            effects = self.replica_lost(table.tag, (), now)  # another process has its tag by now
        self._replicas.add(backend, table, now)
        return effects

    # --- A query comes --------------------------------------------------------------------------

    def submit(
        self,
        caller: Hashable,
        query: QueryLike,
        now: float,
        *,
        resent: bool = False,
        attempts: int = 0,
        died: str = "",
        is_refused: bool = False,
        failed: tuple[str, float] | None = None,
        preference: Preference | None = None,
    ) -> Effects:
        """Route a new query. A query that is still here is ignored when it comes again.

        One that is ``resent`` was another router's, now dead, and may have run: it is refused
        unless it may be retried wherever it could have been. With one that was sent under a lease
        ``attempts`` replicas have died, the last of them ``died``; if it ``is_refused``, a replica
        had no room for it, and it goes before all others, with :meth:`fill`. One that ``failed`` at
        a replica, after so many seconds, is tried at another. ``preference`` is what came of
        :meth:`to_ask`.
        """
        endpoint, effects = self._admit(caller, query, resent=resent)
        if endpoint is None:
            return effects
        began_at = now if failed is None else now - failed[1]
        ticket = self._tickets.open(caller, query, endpoint.table, began_at)
        ticket.preference = preference
        if failed is not None:
            attempts, ticket.failed_at = attempts + 1, failed[0]
        if attempts:
            effects += self._retry_ended(ticket, endpoint, attempts, died, now)
        is_open = ticket.state is not ENDED
        backend = self._place(ticket, endpoint) if is_refused and is_open else None
        if backend is not None:
            backend.enqueue(ticket, now, first=True)
        elif is_open:
            effects += self._route(ticket, endpoint, now)
        if ticket.state is ENDED:
            return effects
        self.observers.accepted(ticket)
        if caller in self._leases.lessees:
            effects += self._lease(ticket, endpoint, now)  # for the next
        return effects

    def fill(self, now: float) -> Effects:
        """Assign what waits, as far as there is room; to be called after what was refused."""
        return [e for each in list(self._backends.values()) for e in self._wait(each, now)]

    def to_ask(self, caller: Hashable, query: QueryLike) -> RoutedBackend | None:
        """Return the backend whose request router is to be asked about a new query.

        Sessions go before what request routers say, and where there is no replica they have no
        choice.
        """
        name = query.endpoint if query.endpoint is not None else self._routes.find(query.path)
        endpoint = self._endpoints.get(name) if name is not None else None
        if endpoint is None or query.session_id:
            return None
        tag = endpoint.split.choose(key_of(query, caller))
        backend = self._backends.get(tag) if tag is not None else None
        if backend is None or backend.table.request_router is None or backend.affinity is not None:
            return None
        return backend if backend.replicas else None

    def _admit(
        self, caller: Hashable, query: QueryLike, *, resent: bool = False
    ) -> tuple[RoutedEndpoint | None, Effects]:
        """Return the endpoint of a new query; None, with a refusal, where it is let in nowhere."""
        known = self._tickets.by_caller.get(caller)
        if known is not None and query.id in known:
            return None, []
        name = query.endpoint if query.endpoint is not None else self._routes.find(query.path)
        endpoint = self._endpoints.get(name) if name is not None else None
        if endpoint is None:
            return None, [_not_found(caller, query)]
        table = endpoint.table
        if query.http_method and table.methods and query.http_method not in table.methods:
            text = f"{query.http_method} is not allowed; allowed are {', '.join(table.methods)}"
            kind = MethodNotAllowedError
            return None, [_refusal(caller, query, kind, text, allowed=table.methods)]
        if resent and not self._may_be_resent(query, endpoint):
            text = f"{table.name}: the proxy died with this query under way; it may have run"
            return None, [_refusal(caller, query, ReplicaUnavailableError, text)]
        return endpoint, []

    def _retry_ended(
        self, ticket: Ticket, endpoint: RoutedEndpoint, attempts: int, died: str, now: float
    ) -> Effects:
        """Refuse a query that was lost under a lease, or failed, unless it may be retried."""
        ticket.attempts = attempts
        tag = self._choose(ticket, endpoint)
        if tag is not None:
            ticket.backend = tag
            ticket.budget = endpoint.budgets[tag]
            if ticket.backend in self._backends:
                ticket.budget.pay_in(self._backends[ticket.backend].slots)
            ticket.assigned_at = now  # it has paid
        backends = [self._backends[tag] for tag in endpoint.split.tags if tag in self._backends]
        others = {tag for each in backends for tag in each.replicas} - {ticket.failed_at}
        is_alone = bool(ticket.failed_at and not others)
        reason = "failed" if ticket.failed_at else "died"
        text = "there is no other replica" if is_alone else self._charge_retry(ticket, reason)
        return self._fail(ticket, ReplicaUnavailableError, text, now, died) if text else []

    def _may_be_resent(self, query: QueryLike, endpoint: RoutedEndpoint) -> bool:
        backends = [self._backends[tag] for tag in endpoint.split.tags if tag in self._backends]
        words = {backend.table.retryable for backend in backends} or {None}
        nearer = (query.retryable, endpoint.table.retryable)
        return all(may_retry(query.http_method, (*nearer, word)) for word in words)

    def _route(self, ticket: Ticket, endpoint: RoutedEndpoint, now: float) -> Effects:
        """Choose the backend, and dispatch the ticket, queue it there or refuse it."""
        backend = self._place(ticket, endpoint)
        if backend is None:
            why = endpoint.table.unavailable
            text = f"endpoint {ticket.endpoint!r} " + (
                f"is unavailable: {why}" if why else "has no backend with traffic"
            )
            return self._fail(ticket, DeploymentUnavailableError, text, now)
        table = backend.table
        backend.outliers.look(now)
        if not backend.queue.size and (
            replica := backend.choose(ticket, table.max_ongoing_requests)
        ):
            return [backend.assign(ticket, replica, now)]
        if table.unavailable and not backend.replicas:
            return self._fail_unavailable(ticket, table, now)
        if not (table.has_run or backend.replicas) and ticket.query.http_method:
            # Why is for operators: /-/readyz has it.
            text = f"{ticket.endpoint} is unavailable: none of its replicas has run yet"
            return self._fail(ticket, DeploymentUnavailableError, text, now)
        starved = not (backend.queue.size or backend.replicas)
        effects: Effects = []
        for refused, text in backend.let_wait(ticket, now):
            effects += self._fail(refused, BackPressureError, text, now)
        if starved and not effects:
            self.observers.starved(table.tag)
        if table.max_queue_wait_s is not None and ticket.state is QUEUED:
            over_at = ticket.submitted_at + table.max_queue_wait_s
            self._tickets.at(over_at, ticket, self._wait_over)
        return effects + self._wait(backend, now)

    def _wait(self, backend: RoutedBackend, now: float) -> Effects:
        """Assign what is queued; where some of it has to wait, look at the leases soon."""
        if not backend.queue.size:
            return []
        effects = self._fill(backend, now)
        return effects + self._leases.watch(backend.table.tag) if backend.queue.size else effects

    def _place(self, ticket: Ticket, endpoint: RoutedEndpoint) -> RoutedBackend | None:
        """Choose the backend, whose time limit holds; None where there is none."""
        tag, ticket.home = self._choose(ticket, endpoint), ""
        backend = self._backends.get(tag) if tag is not None else None
        if backend is not None:
            table = backend.table
            ticket.backend = table.tag
            backend.settle(ticket)
            ticket.budget = endpoint.budgets[table.tag]
            if ticket.query.timeout_s is not None or table.request_timeout_s is not None:
                self._limit(ticket, table)
        return backend

    def _limit(self, ticket: Ticket, table: BackendTable) -> None:
        """Set a ticket's deadline, where its query or its backend has one; the first set stays.

        The shorter of both holds: a query's is how long its caller waits, a backend's how long an
        answer of it may take, and neither is a reason to go on past the other.
        """
        timeout_s, own_s = ticket.query.timeout_s, table.request_timeout_s
        if timeout_s is None or (own_s is not None and own_s < timeout_s):
            timeout_s = own_s
        if timeout_s is not None and ticket.deadline_at is None:
            ticket.deadline_at = ticket.submitted_at + timeout_s
            self._tickets.at(ticket.deadline_at, ticket, self._time_up)

    def _choose(self, ticket: Ticket, endpoint: RoutedEndpoint) -> str | None:
        """Find a ticket's session; return the backend that it, or the query's key, decides on."""
        query, split = ticket.query, endpoint.split
        affinity = self._affinity(endpoint)
        has_any = affinity is not None or query.session_id
        ticket.session = session_of(query, affinity) if has_any else None
        if len(split.tags) == 1:
            return split.tags[0]
        if ticket.session is not None and query.shard_key is None:
            return split.choose(ticket.session.key)
        return split.choose(key_of(query, ticket.caller))

    def _affinity(self, endpoint: RoutedEndpoint) -> SessionAffinity | None:
        """Return how sessions are found: by the settings of the first backend that has any."""
        for tag in endpoint.split.tags:
            backend = self._backends.get(tag)
            if backend is not None and backend.affinity is not None:
                return backend.affinity
        return None

    def _route_anew(self, tickets: Iterable[Ticket], now: float) -> Effects:
        effects: Effects = []
        for ticket in tickets:
            endpoint = self._endpoints.get(ticket.endpoint)
            if endpoint is None or ticket.is_mirrored:
                text = f"{ticket.endpoint} was deleted"
                effects += self._fail(ticket, DeploymentUnavailableError, text, now)
            else:
                effects += self._route(ticket, endpoint, now)
        return effects

    # --- Leases ---------------------------------------------------------------------------------

    def allow_leases(self, caller: Hashable, *, of_splits: bool) -> None:
        """Grant leases to a caller, one of the router's own host, from now on.

        ``of_splits``: also where it has to choose among backends itself.
        """
        self._leases.lessees[caller] = of_splits

    @property
    def unconfirmed(self) -> set[int]:
        """The numbers of revoked leases that may still be used."""
        return self._leases.unconfirmed()

    def _lease(self, ticket: Ticket, endpoint: RoutedEndpoint, now: float) -> Effects:
        """Grant the caller a lease of its query's backend, where the router has no say."""
        caller, tags, backend = ticket.caller, endpoint.split.tags, self._backends[ticket.backend]
        if not self._leases.passed(caller, ticket.backend, now):
            return []
        has_a_say = (
            (len(tags) > 1 and not self._leases.lessees[caller])
            or endpoint.table.shadows
            or self._affinity(endpoint) is not None
            or backend.table.max_queued_requests >= 0
            or backend.table.request_router is not None
            or backend.queue.size
            or backend.mirrored.size
            or backend.table.unavailable
            or backend.outliers.decide
        )
        if has_a_say:
            return []
        return [*self._leases.grant(caller, ticket.endpoint, backend, now)]

    def returned(
        self, caller: Hashable, number: int, in_use: Mapping[str, int], now: float
    ) -> Effects:
        """Use the slots of a lease that its caller does not; replica -> slots still in use."""
        lease = self._leases.by_number.get(number)
        if lease is None or lease.caller != caller:
            return []
        return self._take_back(lease, in_use, now)

    def fenced(self, number: int, now: float) -> Effects:
        """Note that the replicas refuse what comes of a lease, whatever its caller does."""
        lease = self._leases.by_number.get(number)
        if lease is None or lease.state is not LeaseState.REVOKED:
            return []
        return self._take_back(lease, {}, now)

    def used(self, caller: Hashable, number: int, used: Used, now: float) -> Effects:
        """Learn from a caller what became of queries under a lease."""
        lease = self._leases.by_number.get(number)
        if lease is None or lease.caller != caller:
            return []
        self._leases.used(lease, used, now)
        endpoint, backend = self._endpoints.get(lease.endpoint), self._backends.get(lease.backend)
        took_s = [seconds for some in used.ended.values() for seconds in some]
        if endpoint is not None and backend is not None and took_s:
            if (budget := endpoint.budgets.get(lease.backend)) is not None:
                budget.pay_in(backend.slots, len(took_s))
            backend.rate.ran(sum(took_s) / len(took_s))
        for status, some in used.ended.items():
            self.observers.leased(Leased(lease.endpoint, lease.backend, status, some))
        if backend is None:
            return []
        backend.failed(used.failed, now)
        backend.outliers.look(now)
        is_out_of_date = backend.took_leased(used.took, now) or backend.outliers.decide
        return self._revoke_of(lease.backend) if is_out_of_date else []

    def _take_back(self, lease: Lease, in_use: Mapping[str, int], now: float) -> Effects:
        effects: Effects = []
        for tag, count in self._leases.returned(lease, in_use).items():
            replica = self._replicas.by_tag.get(tag)
            if replica is not None and replica.leased >= count:
                replica.leased -= count
                effects += self._after_release(replica, now, count)
        return effects

    def reclaim(self, tag: str, now: float) -> Effects:
        """Revoke all leases of a backend where queries have waited for WAIT_S."""
        self._leases.watched(tag)
        backend = self._backends.get(tag)
        first = None if backend is None else backend.queue.first()
        if backend is None or first is None:
            return []
        if now < first.submitted_at + WAIT_S:
            return self._leases.watch(tag)
        self._leases.pause(tag, now)
        return self._revoke_of(tag) + self._fill(backend, now)

    def _revoke_of(self, backend: str) -> Effects:
        return self._leases.revoke(self._leases.of_backend(backend))

    def _revoke_for(self, old: EndpointTable, new: EndpointTable | None) -> Effects:
        """Revoke what an endpoint's new table makes wrong."""
        if old == new:
            return []
        was = old.route, old.methods
        if was == ((None, ()) if new is None else (new.route, new.methods)):
            return self._leases.revoke(self._leases.of_endpoint(old.name))
        self.routes_version += 1
        return self._leases.revoke(self._leases.all())

    # --- A query is mirrored --------------------------------------------------------------------

    def mirrored(self, original: Ticket, shadow: str, now: float) -> Ticket | None:
        """Queue a mirrored query at a shadow; return None where it cannot follow."""
        endpoint, backend = self._endpoints.get(original.endpoint), self._backends.get(shadow)
        if endpoint is None or backend is None or not backend.takes_mirrored:
            return None
        if shadow not in endpoint.table.shadows or original.status == CANCELLED_STATUS:
            return None
        ticket = self._tickets.open(None, original.query, endpoint.table, now)
        ticket.route, ticket.backend = original.route, shadow
        ticket.session = original.session
        backend.settle(ticket)
        self._limit(ticket, backend.table)
        original.mirrored += (ticket,)
        backend.enqueue(ticket, now)
        return ticket

    def dispatch_mirrored(self, ticket: Ticket, now: float) -> Effects:
        """Dispatch a mirrored query that was queued, if there is room."""
        backend = self._backends[ticket.backend]
        if not (backend.replicas or backend.queue.size or backend.mirrored.size > 1):
            self.observers.starved(ticket.backend)
        return self._fill(backend, now)

    # --- A query waits --------------------------------------------------------------------------

    def _fill(self, backend: RoutedBackend, now: float) -> Effects:
        """Give what waits at a backend to its replicas, as far as they have room."""
        assigned, too_late = backend.assign_waiting(now)
        effects: Effects = [*assigned]
        for ticket in too_late:
            left_s, text = ticket.left_s(now), _no_answer(ticket)
            if left_s > 0:
                text += (
                    f": when its turn came {left_s:.3g} s were left, and a query takes about "
                    f"{backend.rate.run_s:.3g} s"
                )
            effects += self._fail(ticket, QueryTimeoutError, text, now)
        if backend.table.unavailable and not backend.replicas:
            for ticket in backend.take_waiting():
                effects += self._fail_unavailable(ticket, backend.table, now)
        return effects

    def _after_release(self, replica: RoutedReplica, now: float, freed: int = 0) -> Effects:
        """Use a replica's room, if it may be used.

        ``freed`` is how many of its slots have become free because a query has ended.
        """
        if replica.retired:
            self._replicas.forget_if_done(replica)
            return []
        backend = self._backends[replica.backend]
        backend.place(replica, now)
        if backend.queue.size:
            backend.rate.freed(freed, now)
        elif not backend.mirrored.size:
            return []
        return self._fill(backend, now)

    def _put_back(self, tickets: Iterable[Ticket], now: float) -> Effects:
        """Queue tickets again, before all others and in their order."""
        effects: Effects = []
        back: list[tuple[Ticket, RoutedBackend]] = []
        for ticket in tickets:
            if ticket.state is DROPPED:
                self._end(ticket, ticket.status, now)
                continue
            ticket.become(NEW)
            ticket.replica, ticket.status = None, 0
            endpoint = self._endpoints.get(ticket.endpoint)
            backend = self._backends.get(ticket.backend)
            if endpoint is None or backend is None or not endpoint.sends(ticket):
                effects += self._route_anew([ticket], now)
            else:
                back.append((ticket, backend))
        for ticket, backend in reversed(back):
            backend.enqueue(ticket, now, first=True)
        for backend in dict.fromkeys(backend for _, backend in back):
            effects += self._wait(backend, now)
        return effects

    # --- A replica tells of a query -------------------------------------------------------------

    def _heard(self, tag: str, numbers: Iterable[int], now: float) -> RoutedReplica | None:
        """Return the replica that has said something of these tickets, if it is known."""
        replica = self._replicas.by_tag.get(tag)
        if replica is not None:
            is_suspect = replica.hear(numbers, now)
            if is_suspect != replica.is_suspect:
                self._suspect(replica, is_suspect=is_suspect)
        return replica

    def _suspect(self, replica: RoutedReplica, *, is_suspect: bool) -> None:
        replica.is_suspect = is_suspect
        if replica.level >= 0:
            self._backends[replica.backend].order.put(replica, replica.level)

    def holds(self, replica: str, models: Iterable[str]) -> None:
        """Learn which multiplexed models a replica has; queries for them go there if they can."""
        if replica in self._replicas.by_tag:
            self._replicas.by_tag[replica].models = frozenset(models)

    def begun(self, tag: str, numbers: Iterable[int], now: float) -> None:
        """Note that parts of answers have left, which cannot be taken back.

        A WebSocket is answered by that, as far as time limits and latencies go: it may stay open.
        """
        numbers = list(numbers)
        replica = self._heard(tag, numbers, now)
        if replica is None:
            return
        for number in numbers:
            ticket = replica.ongoing.get(number)
            if ticket is not None:
                ticket.begun = True
                if ticket.is_open_socket:
                    ticket.status_at = now
                    self._tickets.never(ticket)

    def answered(
        self, tag: str, outcomes: Iterable[tuple[int, int]], now: float, *, is_awaited: bool = True
    ) -> Effects:
        """Free the slots of (ticket, status) pairs whose answers are on their way to callers.

        :meth:`delivered` ends them. What no caller awaits ends here, as mirrored queries do.
        """
        outcomes = list(outcomes)
        replica = self._heard(tag, [number for number, _ in outcomes], now)
        if replica is None:
            return []
        before, ticket = len(replica.ongoing), None
        backend = None if replica.retired else self._backends[replica.backend]
        effects: Effects = []
        for number, status in outcomes:
            replica.withdrawn.discard(number)
            ticket = replica.ongoing.pop(number, None)
            if ticket is None:
                continue
            if is_awaited and backend and (status >= 500 or backend.outliers.decide):
                effects += self._judge(backend, ticket, status, now)
            if ticket.caller is None or ticket.state is DROPPED or not is_awaited:
                self._end(ticket, ticket.status or status, now)
                continue
            ticket.become(ANSWERED)
            ticket.status = status
            if not ticket.is_open_socket:
                ticket.status_at = now
            replica.unconfirmed[number] = ticket
        replica.saturated_until = 0.0
        # One of those that came together will do; how long a WebSocket is open says nothing.
        if is_awaited and ticket and backend and not ticket.is_open_socket:
            has_changed = backend.took(replica, ticket, now)
            effects += self._revoke_of(replica.backend) if has_changed else []
        return effects + self._after_release(replica, now, before - len(replica.ongoing))

    def _judge(self, backend: RoutedBackend, ticket: Ticket, status: int, now: float) -> Effects:
        """Learn from an answer whether a replica fails where others would not."""
        changed = backend.judge(ticket, status, now)
        if changed is not None:
            times = backend.outliers.ejections(changed)
            self.observers.ejected(Ejected(ticket.backend, changed, times))
        return self._revoke_of(ticket.backend) if backend.outliers.decide else []

    def delivered(self, tag: str, numbers: Iterable[int]) -> None:
        """End answered tickets: their callers have the answers, or are dead."""
        replica = self._replicas.by_tag.get(tag)
        if replica is None:
            return
        for number in numbers:
            if (ticket := replica.unconfirmed.pop(number, None)) is not None:
                self._end(ticket, ticket.status, ticket.status_at)
        if replica.retired:
            self._replicas.forget_if_done(replica)

    def finished(self, tag: str, outcomes: Iterable[tuple[int, int]], now: float) -> Effects:
        """End (ticket, status) pairs whose callers await no answer, and free their slots."""
        return self.answered(tag, outcomes, now, is_awaited=False)

    def rejected(self, tag: str, numbers: Iterable[int], now: float, *, draining: bool) -> Effects:
        """Queue again, at the front, tickets that the replica had no room for."""
        numbers = list(numbers)
        replica = self._heard(tag, numbers, now)
        if replica is None:
            return []
        replica.draining |= draining
        replica.withdrawn.difference_update(numbers)
        self._replicas.rest(replica, now)
        tickets = [t for n in numbers if (t := replica.ongoing.pop(n, None)) is not None]
        for ticket in tickets:
            ticket.attempts -= 1
        return self._after_release(replica, now) + self._put_back(tickets, now)

    def wake(self, now: float) -> Effects:
        """Try again replicas that had rejected; to be called SATURATED_S after a rejection."""
        rested = self._replicas.take_rested(now)
        return [effect for each in rested for effect in self._after_release(each, now)]

    # --- A replica dies -------------------------------------------------------------------------

    def replica_lost(self, tag: str, unsent: Iterable[int], now: float) -> Effects:
        """Send what a dead replica had to others where it may be retried; fail the rest.

        ``unsent`` are tickets that never left for the replica; any of them may be sent again. So
        may retryable ones that it answered when it is not known whether the answer arrived: callers
        ignore a second one. Mirrored queries are not retried once they left: one that kills a
        replica must not kill the next.
        """
        replica = self._replicas.by_tag.pop(tag, None)
        if replica is None:
            return []
        backend = self._backends.get(replica.backend)
        if backend is not None and backend.replicas.get(tag) is replica:
            backend.retire(replica, now)
        # Those that are surely not answered first, as far as the budget goes.
        had = [*replica.ongoing.values(), *replica.unconfirmed.values()]
        replica.ongoing, replica.unconfirmed = {}, {}
        effects = self._leases.replica_lost(tag)
        return effects + self._retry_or_fail(had, set(unsent), now, tag)

    def undelivered(self, tag: str, numbers: Iterable[int], now: float) -> Effects:
        """Treat answers that a broken link kept from callers as if the replica had died."""
        replica = self._replicas.by_tag.get(tag)
        if replica is None:
            return []
        numbers = list(numbers)
        replica.withdrawn.difference_update(numbers)
        found = [replica.ongoing.pop(n, None) or replica.unconfirmed.pop(n, None) for n in numbers]
        effects = self._after_release(replica, now)
        return effects + self._retry_or_fail([t for t in found if t is not None], set(), now)

    # --- A host does not answer -----------------------------------------------------------------

    def host_silent(self, host: str, now: float) -> Effects:
        """Give the replicas of a host that does not answer no new queries.

        What they have goes to others where it may be retried. The rest waits for them: they may
        answer yet, or be lost. Where there are no others, all of it waits.
        """
        silent = self._replicas.set_silent(host, is_silent=True)
        for replica in silent:
            if not replica.retired:
                self._backends[replica.backend].place(replica, now)
        return [effect for replica in silent for effect in self._move(replica, now)]

    def host_lost(self, host: str, now: float) -> Effects:
        """Treat replicas of a host that has been silent for long as dead, but for those in tables.

        The controller has replaced these, and nothing says more certainly that they are gone: the
        kernel of a host whose processes stand still keeps their connections.
        """
        there = [each for each in self._replicas.by_tag.values() if each.table.host == host]
        gone = [each for each in there if each.is_silent and each.retired]
        return [effect for each in gone for effect in self.replica_lost(each.table.tag, (), now)]

    def host_answers(self, host: str, now: float) -> Effects:
        """Use the replicas of a host again."""
        again = self._replicas.set_silent(host, is_silent=False)
        return [effect for replica in again for effect in self._after_release(replica, now)]

    def _move(self, replica: RoutedReplica, now: float) -> Effects:
        """Send to others what a replica has, where there are others and it may be retried."""
        backend = self._backends.get(replica.backend)
        if backend is None or all(each.is_silent for each in backend.replicas.values()):
            return []
        effects: Effects = []
        moved: list[Ticket] = []
        for ticket in [*replica.ongoing.values(), *replica.unconfirmed.values()]:
            if ticket.is_mirrored or ticket.state is DROPPED:
                continue
            if self._charge_retry(ticket, "silent"):
                continue
            if replica.ongoing.pop(ticket.number, None) is not None:
                replica.withdrawn.add(ticket.number)
                effects.append(Cancel(replica.table.tag, ticket.number))
            else:
                del replica.unconfirmed[ticket.number]
            self._tickets.renumber(ticket)
            moved.append(ticket)
        return effects + self._put_back(moved, now)

    def _retry_or_fail(
        self, tickets: list[Ticket], not_run: set[int], now: float, died: str = ""
    ) -> Effects:
        effects: Effects = []
        again: list[Ticket] = []
        for ticket in tickets:
            if ticket.number in not_run:
                ticket.attempts -= 1
            elif ticket.state is not DROPPED and (text := self._charge_retry(ticket, "died")):
                effects += self._fail(ticket, ReplicaUnavailableError, text, now, died)
                continue
            again.append(ticket)
        again.sort(key=lambda ticket: ticket.number)
        return effects + self._put_back(again, now)

    def _charge_retry(self, ticket: Ticket, reason: str) -> str:
        """Charge a query's retry to its budget; return why that cannot be, "" where it is."""
        endpoint = self._endpoints.get(ticket.endpoint)
        backend = self._backends.get(ticket.backend)
        said = (
            ticket.query.retryable,
            None if endpoint is None else endpoint.table.retryable,
            None if backend is None else backend.table.retryable,
        )
        died = f"{ticket.endpoint}: the replica died with this query under way"
        budget = ticket.budget
        if budget is None or ticket.begun or not may_retry(ticket.query.http_method, said):
            return f"{died}; it may have run"
        if ticket.attempts >= MAX_ATTEMPTS:
            return f"{ticket.endpoint}: {ticket.attempts} replicas died with this query under way"
        if not budget.take_out():
            self.observers.retry_refused(ticket)
            return (
                f"{died}, and it is not sent to another: retries are limited to as many as there "
                "are queries, and used up"
            )
        self.observers.retried(Retried(ticket, reason))
        return ""

    # --- A query ends ---------------------------------------------------------------------------

    def cancel(self, caller: Hashable, query_id: int, now: float) -> Effects:
        """Drop a query wherever it is; the caller no longer wants an answer."""
        ticket = self._tickets.find(caller, query_id)
        return [] if ticket is None else self._abandon(ticket, now)

    def caller_lost(self, caller: Hashable, now: float) -> Effects:
        """Drop all queries of a caller that died, and free what it has leased."""
        effects = [e for ticket in self._tickets.of(caller) for e in self._abandon(ticket, now)]
        for lease in self._leases.caller_lost(caller):
            effects += self._take_back(lease, {}, now)
        return effects

    def expire(self, now: float) -> Effects:
        """Do what is due; to be called at :meth:`next_due_at`."""
        return self._tickets.happen(now)

    def next_due_at(self) -> float | None:
        """Return when something is due of a query."""
        return self._tickets.next_at()

    def _time_up(self, ticket: Ticket, now: float) -> Effects:
        """Answer a ticket that waits or runs, and drop it."""
        if ticket.state not in (QUEUED, RUNNING):
            return []
        effects = self._drop(ticket, QueryTimeoutError.http_status, now)
        if ticket.is_mirrored:
            return effects
        text = _no_answer(ticket)
        return [_refusal(ticket.caller, ticket.query, QueryTimeoutError, text), *effects]

    def _wait_over(self, ticket: Ticket, now: float) -> Effects:
        """Refuse a ticket that still waits for a replica."""
        if ticket.state is not QUEUED:
            return []
        self._backends[ticket.backend].queue_of(ticket).remove(ticket)
        waited_s = now - ticket.submitted_at
        text = f"no replica of {ticket.endpoint} had room within {waited_s:.3g} s, max_queue_wait_s"
        return self._fail(ticket, BackPressureError, text, now)

    def _abandon(self, original: Ticket, now: float) -> Effects:
        """Drop a query with its mirrored queries: a stream may have no end of its own."""
        if original.state is ANSWERED and original.replica is not None:
            self.delivered(original.replica, (original.number,))  # or not: nobody waits for it
            return []
        unwanted = (original, *original.mirrored)
        return [e for each in unwanted for e in self._drop(each, CANCELLED_STATUS, now)]

    def _drop(self, ticket: Ticket, status: int, now: float) -> Effects:
        """End a ticket that waits; tell the replica of one that runs."""
        if ticket.state is QUEUED:
            self._backends[ticket.backend].queue_of(ticket).remove(ticket)
            self._end(ticket, status, now)
        if ticket.state is not RUNNING or ticket.replica is None:
            return []
        ticket.become(DROPPED)
        ticket.status = status
        replica = self._replicas.by_tag.get(ticket.replica)
        if replica is not None and replica.is_silent_on(ticket, now):
            self._suspect(replica, is_suspect=True)
        return [Cancel(ticket.replica, ticket.number)]

    def _fail(
        self, ticket: Ticket, kind: type[GreenroomError], text: str, now: float, died: str = ""
    ) -> Effects:
        """End a ticket with an error, of which its caller is told."""
        effects: Effects = []
        if not ticket.is_mirrored:
            after_s = None
            if kind is BackPressureError:
                backend = self._backends[ticket.backend]
                after_s = backend.rate.retry_after_s(backend.queue.ahead(ticket.line), now)
            refusal = _refusal(ticket.caller, ticket.query, kind, text, after_s=after_s)
            effects.append(refusal._replace(died=died) if died else refusal)
        self._end(ticket, kind.http_status, now)
        return effects

    def _fail_unavailable(self, ticket: Ticket, table: BackendTable, now: float) -> Effects:
        text = f"{ticket.endpoint} is unavailable: {table.unavailable}"
        return self._fail(ticket, DeploymentUnavailableError, text, now)

    def _end(self, ticket: Ticket, status: int, at: float) -> None:
        ticket.status, ticket.status_at = status, at
        self._tickets.end(ticket)
        self.observers.finished(ticket)


# --- Refusals -------------------------------------------------------------------------------------


def _refusal(
    caller: Hashable,
    query: QueryLike,
    kind: type[GreenroomError],
    text: str,
    *,
    allowed: tuple[str, ...] = (),
    after_s: float | None = None,
) -> Refuse:
    """Make the answer with this kind of error; ``after_s`` replaces its usual retry_after_s."""
    after_s = kind.retry_after_s if after_s is None else after_s
    return Refuse(caller, query.id, kind.__name__, text, after_s, allowed)


def _not_found(caller: Hashable, query: QueryLike) -> Refuse:
    if query.endpoint is not None:
        text = f"no endpoint is named {query.endpoint!r}"
        return _refusal(caller, query, DeploymentUnavailableError, text)
    text = f"Path {query.path!r} not found. Ping /-/routes for available routes."
    return _refusal(caller, query, RouteNotFoundError, text)


def _no_answer(ticket: Ticket) -> str:
    return f"no answer within {ticket.time_limit_s:.6g} s"
