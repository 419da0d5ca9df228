"""The router: which backend, which replica, queueing, limits, time limits, what deaths mean.

Theory of operation. What the shell hears is a call here: of tables, of queries, and of what has
become of them at their replicas. The state and the steps of tickets are :class:`.Dispatch`'s;
:attr:`Router.leases` hears what callers do by themselves, and :attr:`Router.hosts` of hosts that do
not answer. Every method takes the time and returns effects, in the order in which to perform them;
:meth:`Router.expire` does what is due.

What follows queries without deciding on them observes the router (``Observer`` in tickets.py):
metrics, load reports, tallies for rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from greenroom.core.errors import (
    CANCELLED_STATUS,
    DeploymentUnavailableError,
    MethodNotAllowedError,
    ReplicaUnavailableError,
    RouteNotFoundError,
)
from greenroom.core.routing.balancing import SATURATED_S, RoutedBackend, RoutedReplica
from greenroom.core.routing.dispatching import Dispatch, backends_of, refusal
from greenroom.core.routing.leases import Leases
from greenroom.core.routing.mirroring import Mirroring
from greenroom.core.routing.outliers import Outliers
from greenroom.core.routing.retries import SPARE, may_retry
from greenroom.core.routing.tables import BackendTable, EndpointTable, ReplicaTable
from greenroom.core.routing.tickets import (
    ANSWERED,
    DROPPED,
    ENDED,
    Cancel,
    Effects,
    Ejected,
    NewQuery,
    Preference,
    QueryLike,
    Refuse,
    Ticket,
)
from greenroom.core.routing.traffic import RoutedEndpoint, key_of
from greenroom.core.routing.weights import first_weight


class Router:
    """All tickets of one proxy. ``draw`` returns a uniform random number in [0, 1): for trials.

    Replicas on ``own_host`` are taken first, while they have room.
    """

    def __init__(self, draw: Callable[[], float], own_host: str = "") -> None:
        self.state = Dispatch()
        self.observers = self.state.observers
        self.leases = Leases(self.state)
        self.mirroring = Mirroring(self.state, draw)
        self.hosts = RoutedHosts(self.state, own_host)
        self._draw = draw

    # --- Tables ---------------------------------------------------------------------------------

    def set_endpoint(self, name: str, table: EndpointTable | None, now: float) -> Effects:
        """Take an endpoint's newest table; None forgets it.

        What replicas have of it runs on. What is queued where it has no traffic any more is routed
        anew, and mirrored queries where it has no shadow any more are dropped: nothing may run
        there again.
        """
        state = self.state
        none = RoutedEndpoint(EndpointTable(name=name))
        old = state.endpoints.pop(name, none)
        new = none if table is None else RoutedEndpoint(table, old)
        self.leases.endpoint_changed(old.table, new.table)
        if old.table.route is not None:
            state.routes.remove(old.table.route, name)
        if table is not None:
            state.endpoints[name] = new
            if table.route is not None:
                state.routes.set(table.route, name)
        for tag, is_shadow in sorted(old.places() - new.places()):
            # Before slots become free that its queue must not get.
            if (backend := state.backends.get(tag)) is not None:
                queue = backend.mirrored if is_shadow else backend.queue
                state.route_anew(queue.take_all(name), now)
        for tag in sorted({*old.split.tags, *new.split.tags}):
            if (backend := state.backends.get(tag)) is not None:
                edit = backend.endpoints.add if tag in new.split.tags else backend.endpoints.discard
                edit(name)
                state.fill(backend, now)
        return state.taken()

    def set_backend(self, tag: str, table: BackendTable | None, now: float) -> Effects:
        """Take a backend's newest table; None forgets it and routes what is queued anew."""
        state = self.state
        backend = state.backends.get(tag)
        if backend is None:
            users = {name for name, each in state.endpoints.items() if tag in each.split.tags}
            first = table or BackendTable(tag=tag)
            backend = RoutedBackend(first, Outliers(self._draw), endpoints=users)
            state.backends[tag] = backend
        if table != backend.table:
            state.revoke(backend.lending.leases.values())
        backend.take_table(table or BackendTable(tag=tag, unavailable="it was deleted"))
        backend.let_in(now)
        backend.weigh(now)
        current = {replica.tag: replica for replica in backend.table.replicas}
        for old in list(backend.replicas.values()):
            if current.get(old.table.tag) != old.table:
                backend.retire(old, now)
                state.release(old, now)
        for replica in backend.table.replicas:
            if replica.tag not in backend.replicas:
                self._add_replica(backend, replica, now)
        if table is not None:
            state.fill(backend, now)
        else:
            del state.backends[tag]
            state.route_anew(backend.take_waiting(), now)
        return state.taken()

    def _add_replica(self, backend: RoutedBackend, table: ReplicaTable, now: float) -> None:
        """Let a replica get tickets; a retired one may be back with those it has.

        That happens because a new controller begins with empty tables.
        """
        known = self.state.replicas
        if table.tag in known and known[table.tag].table != table:
            self.state.forget_replica(table.tag, set(), now)  # another process has its tag by now
        replica = known.get(table.tag)
        if replica is None:
            is_near = self.hosts.is_near(table.host)
            replica = RoutedReplica(table, backend, is_near=is_near, came_at=now)
            there_since = (each.came_at for each in backend.replicas.values())
            replica.weight = first_weight(backend.table.slow_start_s, there_since, now)
            known[table.tag] = replica
        replica.is_silent = self.hosts.is_silent(table.host)
        backend.add(replica, now)

    # --- Queries --------------------------------------------------------------------------------

    def submit(self, new: NewQuery, now: float, preference: Preference | None = None) -> Effects:
        """Route a new query. A query that is still here is ignored when it comes again.

        After those that were refused comes :meth:`fill`. ``preference`` is what came of
        :meth:`to_ask`.
        """
        state, failed = self.state, new.failed
        endpoint = self._admit(new)
        if endpoint is None:
            return state.taken()
        began_at = now if failed is None else now - failed[1]
        ticket = state.tickets.open(new.caller, new.query, endpoint.table, began_at)
        ticket.preference, ticket.attempts = preference, new.attempts
        if failed is not None:
            ticket.attempts, ticket.failed_at = new.attempts + 1, failed[0]
        backend = state.place(ticket, endpoint)
        if ticket.attempts and (why := self._why_not_again(ticket, endpoint, backend, now)):
            state.fail(ticket, ReplicaUnavailableError, why, now, new.died)
        elif new.is_refused and backend is not None:
            backend.enqueue(ticket, now, first=True)
            state.limit_wait(ticket, backend, now)
        else:
            state.dispatch(ticket, endpoint, backend, now)
        if ticket.state is not ENDED:
            state.observers.accepted(ticket)
            if new.caller in self.leases.lessees:
                self.leases.offer(ticket, endpoint, now)
        return state.taken()

    def _admit(self, new: NewQuery) -> RoutedEndpoint | None:
        """Return the endpoint of a new query; refuse one that is let in nowhere."""
        state, caller, query = self.state, new.caller, new.query
        if state.tickets.find(caller, query.id) is not None:
            return None
        endpoint = self._endpoint_of(query)
        if endpoint is None:
            state.effects.append(_not_found(caller, query))
            return None
        table = endpoint.table
        if query.http_method and table.methods and query.http_method not in table.methods:
            text = f"{query.http_method} is not allowed; allowed are {', '.join(table.methods)}"
            kind = MethodNotAllowedError
            state.effects.append(refusal(caller, query, kind, text, allowed=table.methods))
            return None
        if new.resent:
            nearer = (query.retryable, table.retryable)
            given = {each.table.retryable for each in backends_of(state, endpoint)} or {None}
            if not all(may_retry(query.http_method, (*nearer, own)) for own in given):
                text = f"{table.name}: the proxy died with this query under way; it may have run"
                state.effects.append(refusal(caller, query, ReplicaUnavailableError, text))
                return None
        return endpoint

    def _endpoint_of(self, query: QueryLike) -> RoutedEndpoint | None:
        state = self.state
        name = query.endpoint if query.endpoint is not None else state.routes.find(query.path)
        return None if name is None else state.endpoints.get(name)

    def _why_not_again(
        self, ticket: Ticket, endpoint: RoutedEndpoint, backend: RoutedBackend | None, now: float
    ) -> str:
        """Return why a query that was lost under a lease, or failed, is not retried; else ""."""
        if backend is not None and ticket.budget is not None:
            ticket.budget.pay_in(backend.slots)
            ticket.assigned_at = now  # it has paid
        if ticket.failed_at:
            there = {tag for each in backends_of(self.state, endpoint) for tag in each.replicas}
            if not there - {ticket.failed_at}:
                return "there is no other replica"
        why = self.state.charge_retry(ticket, "failed" if ticket.failed_at else "died")
        return why.format(ticket)

    def fill(self, now: float) -> Effects:
        """Assign what waits, as far as there is room; to be called after what was refused."""
        for backend in list(self.state.backends.values()):
            self.state.wait(backend, now)
        return self.state.taken()

    def to_ask(self, caller: Hashable, query: QueryLike) -> RoutedBackend | None:
        """Return the backend whose request router is to be asked about a new query.

        Sessions go before what request routers say, and where there is no replica they have no
        choice.
        """
        endpoint = self._endpoint_of(query)
        if endpoint is None or query.session_id:
            return None
        tag = endpoint.split.choose(key_of(query, caller))
        backend = self.state.backends.get(tag) if tag is not None else None
        if backend is None or backend.table.request_router is None or backend.affinity is not None:
            return None
        return backend if backend.replicas else None

    def cancel(self, caller: Hashable, query_id: int, now: float) -> Effects:
        """Drop a query wherever it is; the caller no longer wants an answer."""
        ticket = self.state.tickets.find(caller, query_id)
        if ticket is not None:
            self._abandon(ticket, now)
        return self.state.taken()

    def caller_gone(self, caller: Hashable, now: float) -> Effects:
        """Drop all queries of a caller that died, and free what it has leased."""
        for ticket in self.state.tickets.of(caller):
            self._abandon(ticket, now)
        self.leases.caller_gone(caller, now)
        return self.state.taken()

    def _abandon(self, original: Ticket, now: float) -> None:
        """Drop a query with its mirrored queries."""
        if original.state is ANSWERED and original.replica is not None:
            self.delivered(original.replica, (original.number,))  # or not: nobody waits for it
            return
        self.state.drop(original, CANCELLED_STATUS, now)
        self._drop_mirrored(original, now)

    def _drop_mirrored(self, original: Ticket, now: float) -> None:
        """Drop its mirrored queries: a stream may have no end of its own."""
        for each in original.mirrored:
            self.state.drop(each, CANCELLED_STATUS, now)

    def expire(self, now: float) -> Effects:
        """Do what is due; to be called at :meth:`next_due_at`."""
        self.state.tickets.happen(now)
        return self.state.taken()

    def next_due_at(self) -> float | None:
        """Return when something is due."""
        return self.state.tickets.next_at()

    # --- What a replica says --------------------------------------------------------------------

    def holds(self, replica: str, models: Iterable[str]) -> None:
        """Learn which multiplexed models a replica has; queries for them go there if they can."""
        if replica in self.state.replicas:
            self.state.replicas[replica].models = frozenset(models)

    def begun(self, tag: str, numbers: Iterable[int], now: float) -> None:
        """Note that parts of answers have left, which cannot be taken back.

        A WebSocket is answered by that, as far as time limits and latencies go: it may stay open.
        """
        replica = self.state.replicas.get(tag)
        if replica is None:
            return
        numbers = list(numbers)
        replica.hear(numbers, now)
        for number in numbers:
            if (ticket := replica.ongoing.get(number)) is not None:
                ticket.begun = True
                if ticket.is_open_socket:
                    ticket.status_at = now
                    self.state.tickets.never(ticket.opened_as)

    def answered(
        self, tag: str, outcomes: Iterable[tuple[int, int]], now: float, *, is_awaited: bool = True
    ) -> Effects:
        """Free the slots of (ticket, status) pairs whose answers are on their way to callers.

        :meth:`delivered` ends them. What no caller awaits ends here: mirrored queries do, and all
        of them unless ``is_awaited``.
        """
        state = self.state
        replica = state.replicas.get(tag)
        if replica is None:
            return []
        outcomes = list(outcomes)
        replica.hear([number for number, _ in outcomes], now)
        before, ticket = len(replica.ongoing), None
        backend = None if replica.retired else replica.backend
        for number, status in outcomes:
            replica.withdrawn.discard(number)
            ticket = replica.ongoing.pop(number, None)
            if ticket is None:
                continue
            if is_awaited and backend and (status >= 500 or backend.outliers.decide):
                self._judge(backend, ticket, status, now)
            if ticket.caller is None or ticket.state is DROPPED or not is_awaited:
                state.end(ticket, ticket.status or status, now)
                if ticket.begun and not is_awaited:  # stopped by its caller, who is yet to say so
                    self._drop_mirrored(ticket, now)
                continue
            ticket.become(ANSWERED)
            ticket.status = status
            if not ticket.is_open_socket:
                ticket.status_at = now
            replica.unconfirmed[number] = ticket
        replica.saturated_until = 0.0
        # One of those that came together will do; how long a WebSocket is open says nothing.
        if is_awaited and ticket and backend and not ticket.is_open_socket:
            backend.took(replica, ticket, now)
            if backend.compare(now):
                state.revoke(backend.lending.leases.values())
        state.release(replica, now, before - len(replica.ongoing))
        return state.taken()

    def _judge(self, backend: RoutedBackend, ticket: Ticket, status: int, now: float) -> None:
        """Learn from an answer whether a replica fails where others would not."""
        changed = backend.judge(ticket, status, now)
        if changed is not None:
            times = backend.outliers.ejections(changed)
            self.observers.ejected(Ejected(ticket.backend, changed, times))
        if backend.outliers.decide:
            self.state.revoke(backend.lending.leases.values())

    def delivered(self, tag: str, numbers: Iterable[int]) -> None:
        """End answered tickets: their callers have the answers, or are dead."""
        replica = self.state.replicas.get(tag)
        if replica is None:
            return
        for number in numbers:
            if (ticket := replica.unconfirmed.pop(number, None)) is not None:
                self.state.end(ticket, ticket.status, ticket.status_at)
        if replica.retired:
            self.state.release(replica, 0.0)

    def rejected(self, tag: str, numbers: Iterable[int], now: float, *, draining: bool) -> Effects:
        """Queue again, at the front, tickets that the replica had no room for.

        It is left alone for SATURATED_S, or until it has done something.
        """
        state = self.state
        replica = state.replicas.get(tag)
        if replica is None:
            return []
        numbers = list(numbers)
        replica.hear(numbers, now)
        replica.draining |= draining
        replica.withdrawn.difference_update(numbers)
        replica.saturated_until = now + SATURATED_S
        state.tickets.once(replica.saturated_until, replica, state.release)
        tickets = [t for n in numbers if (t := replica.ongoing.pop(n, None)) is not None]
        for ticket in tickets:
            ticket.attempts -= 1
        state.release(replica, now)
        state.put_back(tickets, now)
        return state.taken()

    # --- A replica dies -------------------------------------------------------------------------

    def replica_gone(
        self, tag: str, unsent: Iterable[int], now: float, *, is_certain: bool = True
    ) -> Effects:
        """Send what a dead replica had to others where it may be retried; fail the rest.

        ``unsent`` are tickets that never left for the replica; any of them may be sent again. So
        may retryable ones that it answered when it is not known whether the answer arrived: callers
        ignore a second one. Mirrored queries are not retried once they left: one that kills a
        replica must not kill the next. One that may only be out of reach is not ``is_certain``.
        """
        self.state.forget_replica(tag, set(unsent), now, is_certain=is_certain)
        return self.state.taken()

    def undelivered(self, tag: str, numbers: Iterable[int], now: float) -> Effects:
        """Treat answers that a broken link kept from callers as if the replica had died."""
        replica = self.state.replicas.get(tag)
        if replica is None:
            return []
        numbers = list(numbers)
        replica.withdrawn.difference_update(numbers)
        found = [replica.ongoing.pop(n, None) or replica.unconfirmed.pop(n, None) for n in numbers]
        self.state.release(replica, now)
        self.state.retry_or_fail([ticket for ticket in found if ticket is not None], set(), now)
        return self.state.taken()


class RoutedHosts:
    """Which hosts a router uses the replicas of: its own first, and none that does not answer."""

    def __init__(self, state: Dispatch, own: str) -> None:
        self._state = state
        self._own = own
        self._silent: set[str] = set()

    def is_near(self, host: str) -> bool:
        """Return whether it is the router's own."""
        return host in {"", self._own}

    def is_silent(self, host: str) -> bool:
        """Return whether it does not answer."""
        return host in self._silent

    def silent(self, host: str, now: float, *, for_long: bool = False) -> Effects:
        """Give the replicas of a host no new queries; to be called again while it does not answer.

        What they have goes to others where it may be retried, as soon as there are others. The rest
        waits for them: they may answer yet, or be lost. Where the host is silent ``for_long``, what
        is in no table is treated as dead: the controller has replaced it, and nothing says more
        certainly that it is gone, as the kernel of a host whose processes stand still keeps their
        connections.
        """
        self._silent.add(host)
        silent = self._at(host)
        for replica in silent:
            if not replica.is_silent:
                replica.is_silent = True
                if not replica.retired:
                    replica.backend.place(replica, now)
        for replica in silent:
            if for_long and replica.retired:
                self._state.forget_replica(replica.table.tag, set(), now)
            else:
                self._move(replica, now)
        return self._state.taken()

    def answers(self, host: str, now: float) -> Effects:
        """Use the replicas of a host again."""
        self._silent.discard(host)
        again = self._at(host)
        for replica in again:
            replica.is_silent = False
        for replica in again:
            self._state.release(replica, now)
        return self._state.taken()

    def _at(self, host: str) -> list[RoutedReplica]:
        return [each for each in self._state.replicas.values() if each.table.host == host]

    def _move(self, replica: RoutedReplica, now: float) -> None:
        """Send to others what a replica has, where there are others and it may be retried."""
        state = self._state
        backend = state.backends.get(replica.backend.table.tag)
        if backend is None or all(each.is_silent for each in backend.replicas.values()):
            return
        moved: list[Ticket] = []
        for ticket in [*replica.ongoing.values(), *replica.unconfirmed.values()]:
            if ticket.is_mirrored or ticket.state is DROPPED:
                continue
            if state.charge_retry(ticket, "silent", credit=SPARE):
                continue
            if replica.ongoing.pop(ticket.number, None) is not None:
                replica.withdrawn.add(ticket.number)
                state.effects.append(Cancel(replica.table.tag, ticket.number))
            else:
                del replica.unconfirmed[ticket.number]
            state.tickets.renumber(ticket)
            moved.append(ticket)
        state.put_back(moved, now)


def _not_found(caller: Hashable, query: QueryLike) -> Refuse:
    if query.endpoint is not None:
        text = f"no endpoint is named {query.endpoint!r}"
        return refusal(caller, query, DeploymentUnavailableError, text)
    text = f"Path {query.path!r} not found. Ping /-/routes for available routes."
    return refusal(caller, query, RouteNotFoundError, text)
