"""The state of one proxy's router, and the steps that its tickets take.

Theory of operation. Each query gets a ticket, whose life is a table (tickets.py). It is placed at a
backend, and given to a replica there (balancing.py), queued (queues.py) or refused. When its
replica is lost or has no room, it is put back, before all others. Whatever frees a slot fills it
with what waits.

Steps change the state at once. What the shell is to do about it goes to ``effects``, in the order
in which to do it; whoever is called from outside hands that over at the end (:meth:`taken`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial

from greenroom.core.config import SessionAffinity
from greenroom.core.errors import (
    BackPressureError,
    DeploymentUnavailableError,
    GreenroomError,
    QueryTimeoutError,
    ReplicaUnavailableError,
)
from greenroom.core.routing.balancing import RoutedBackend, RoutedReplica
from greenroom.core.routing.queues import FairQueue
from greenroom.core.routing.retries import MAX_ATTEMPTS, may_retry
from greenroom.core.routing.sessions import session_of
from greenroom.core.routing.tables import BackendTable
from greenroom.core.routing.tickets import (
    DROPPED,
    NEW,
    QUEUED,
    RUNNING,
    Cancel,
    Effects,
    Ended,
    Lease,
    LeaseState,
    Observers,
    OpenTickets,
    QueryLike,
    Refuse,
    Retried,
    Revoke,
    Ticket,
)
from greenroom.core.routing.traffic import RoutedEndpoint, Routes, key_of

# Shorter waits are common: a slot is heard to be free later than its answer, and the queries that a
# caller has sent before it hears of a lease find the slots taken that they will not use.
WAIT_S = 0.01
PAUSE_S = 0.1  # without grants, after queries had to wait

# Why a ticket is not retried.
_DIED = "{0.endpoint}: the replica died with this query under way"
_MAY_HAVE_RUN = f"{_DIED}; it may have run"
_DIED_TOO_OFTEN = "{0.endpoint}: {0.attempts} replicas died with this query under way"
_NO_RETRIES_LEFT = (
    f"{_DIED}, and it is not sent to another: retries are limited to as many as there are queries, "
    "and used up"
)


class Dispatch:
    """Tables, tickets and leases, and what is done with each ticket."""

    def __init__(self) -> None:
        self.observers = Observers()
        self.effects: Effects = []
        self.endpoints: dict[str, RoutedEndpoint] = {}
        self.routes = Routes()
        self.backends: dict[str, RoutedBackend] = {}
        # Those of the newest tables, and retired ones until they are done.
        self.replicas: dict[str, RoutedReplica] = {}
        self.tickets = OpenTickets()
        self.leases: dict[int, Lease] = {}  # by number, and returned ones until they are done

    def taken(self) -> Effects:
        """Return the effects of what was done since the last time."""
        effects, self.effects = self.effects, []
        return effects

    # --- Where a ticket goes --------------------------------------------------------------------

    def place(self, ticket: Ticket, endpoint: RoutedEndpoint) -> RoutedBackend | None:
        """Choose the backend, whose time limit holds; None where there is none."""
        tag, ticket.home = self._choose(ticket, endpoint), ""
        backend = self.backends.get(tag) if tag is not None else None
        if backend is not None:
            table = backend.table
            ticket.backend = table.tag
            backend.assign_home(ticket)
            ticket.budget = endpoint.budgets[table.tag]
            if ticket.query.timeout_s is not None or table.request_timeout_s is not None:
                self.limit(ticket, table)
        return backend

    def limit(self, ticket: Ticket, table: BackendTable) -> None:
        """Set a ticket's deadline, where its query or its backend has one; the first set stays.

        The shorter of both holds: a query's is how long its caller waits, a backend's how long an
        answer of it may take, and neither is a reason to go on past the other.
        """
        timeout_s, own_s = ticket.query.timeout_s, table.request_timeout_s
        if timeout_s is None or (own_s is not None and own_s < timeout_s):
            timeout_s = own_s
        if timeout_s is not None and ticket.deadline_at is None:
            ticket.deadline_at = ticket.submitted_at + timeout_s
            self.tickets.at(ticket.deadline_at, ticket, self._time_up)

    def _choose(self, ticket: Ticket, endpoint: RoutedEndpoint) -> str | None:
        """Find a ticket's session; return the backend that it, or the query's key, decides on."""
        query, split = ticket.query, endpoint.split
        affinity = self.affinity(endpoint)
        has_any = affinity is not None or query.session_id
        ticket.session = session_of(query, affinity) if has_any else None
        if len(split.tags) == 1:
            return split.tags[0]
        if ticket.session is not None and query.shard_key is None:
            return split.choose(ticket.session.key)
        return split.choose(key_of(query, ticket.caller))

    def affinity(self, endpoint: RoutedEndpoint) -> SessionAffinity | None:
        """Return how sessions are found: by the settings of the first backend that has any."""
        for tag in endpoint.split.tags:
            backend = self.backends.get(tag)
            if backend is not None and backend.affinity is not None:
                return backend.affinity
        return None

    def dispatch(
        self, ticket: Ticket, endpoint: RoutedEndpoint, backend: RoutedBackend | None, now: float
    ) -> None:
        """Give a ticket that was placed to a replica, queue it or refuse it."""
        if backend is None:
            why = endpoint.table.unavailable
            problem = f"is unavailable: {why}" if why else "has no backend with traffic"
            text = f"endpoint {ticket.endpoint!r} {problem}"
            self.fail(ticket, DeploymentUnavailableError, text, now)
            return
        table = backend.table
        backend.outliers.check(now)
        if not backend.queue.size and (
            replica := backend.choose(ticket, table.max_ongoing_requests)
        ):
            self.effects.append(backend.assign(ticket, replica, now))
            return
        if table.unavailable and not backend.replicas:
            self.fail(ticket, DeploymentUnavailableError, _unavailable(ticket, table), now)
            return
        if not (table.has_run or backend.replicas) and ticket.query.http_method:
            # Why is for operators: /-/readyz has it.
            text = f"{ticket.endpoint} is unavailable: none of its replicas has run yet"
            self.fail(ticket, DeploymentUnavailableError, text, now)
            return
        self._let_wait(ticket, backend, now)
        self.wait(backend, now)

    def route_anew(self, tickets: Iterable[Ticket], now: float) -> None:
        """Place tickets again that can be no longer where they were; mirrored ones are dropped."""
        for ticket in tickets:
            endpoint = self.endpoints.get(ticket.endpoint)
            if endpoint is None or ticket.is_mirrored:
                text = f"{ticket.endpoint} was deleted"
                self.fail(ticket, DeploymentUnavailableError, text, now)
            else:
                self.dispatch(ticket, endpoint, self.place(ticket, endpoint), now)

    def put_back(self, tickets: Iterable[Ticket], now: float) -> None:
        """Queue tickets again, before all others and in their order."""
        back: list[tuple[Ticket, RoutedBackend]] = []
        for ticket in tickets:
            if ticket.state is DROPPED:
                self.end(ticket, ticket.status, now)
                continue
            ticket.become(NEW)
            ticket.replica, ticket.status = None, 0
            endpoint = self.endpoints.get(ticket.endpoint)
            backend = self.backends.get(ticket.backend)
            if endpoint is None or backend is None or not endpoint.sends(ticket):
                self.route_anew([ticket], now)
            else:
                back.append((ticket, backend))
        for ticket, backend in reversed(back):
            backend.enqueue(ticket, now, first=True)
            self.limit_wait(ticket, backend, now)
        for backend in dict.fromkeys(backend for _, backend in back):
            self.wait(backend, now)

    def retry_or_fail(
        self, tickets: Iterable[Ticket], unsent: set[int], now: float, died: str = ""
    ) -> None:
        """Put back what a lost replica had where it may run again; fail the rest."""
        again: list[Ticket] = []
        for ticket in tickets:
            if ticket.number in unsent:
                ticket.attempts -= 1
            elif ticket.state is not DROPPED and (why := self.charge_retry(ticket, "died")):
                self.fail(ticket, ReplicaUnavailableError, why.format(ticket), now, died)
                continue
            again.append(ticket)
        self.put_back(sorted(again, key=lambda ticket: ticket.number), now)

    def forget_replica(
        self, tag: str, unsent: set[int], now: float, *, is_certain: bool = True
    ) -> None:
        """Send what a dead replica had to others where it may be retried; see Router."""
        replica = self.replicas.pop(tag, None)
        if replica is None:
            return
        if not replica.retired:
            replica.backend.retire(replica, now)
        # Those that are surely not answered first, as far as the budget goes.
        had = [*replica.ongoing.values(), *replica.unconfirmed.values()]
        replica.ongoing, replica.unconfirmed = {}, {}
        for lease in list(self.leases.values()):
            if lease.slots.pop(tag, None) is not None and not lease.slots:
                if lease.state is LeaseState.RETURNED:
                    del self.leases[lease.number]
                else:
                    self.revoke([lease])
        self.retry_or_fail(had, unsent, now, tag if is_certain else "")

    def charge_retry(self, ticket: Ticket, reason: str, credit: int = 0) -> str:
        """Charge a query's retry to its budget; return why that cannot be, "" where it is.

        With ``credit``, a query that cannot stays where it is, and this is asked again.
        The text is to be formatted with the ticket by who tells it: what thousands of tickets at a
        silent host are asked with each of its beats is only whether they move.
        """
        endpoint = self.endpoints.get(ticket.endpoint)
        backend = self.backends.get(ticket.backend)
        said = [each.table.retryable for each in (endpoint, backend) if each is not None]
        may = may_retry(ticket.query.http_method, (ticket.query.retryable, *said))
        budget = ticket.budget
        if budget is None or ticket.begun or not may:
            return _MAY_HAVE_RUN
        if ticket.attempts >= MAX_ATTEMPTS:
            return _DIED_TOO_OFTEN
        if not budget.take_out(credit):
            if not credit:
                self.observers.retry_refused(ticket)
            return _NO_RETRIES_LEFT
        self.observers.retried(Retried(ticket, reason))
        return ""

    # --- What waits -----------------------------------------------------------------------------

    def limit_wait(self, ticket: Ticket, backend: RoutedBackend, now: float) -> None:
        """Let a ticket wait no longer than its backend allows, and as long again after a death.

        For one that a replica had no room for, the time goes on.
        """
        wait_s, attempts = backend.table.max_queue_wait_s, ticket.attempts
        if wait_s is not None and ticket.state is QUEUED and ticket.waits_as != attempts:
            ticket.waits_as = attempts
            since = now if attempts else ticket.submitted_at
            self.tickets.at(since + wait_s, ticket, partial(self._wait_over, attempts, since))

    def _let_wait(self, ticket: Ticket, backend: RoutedBackend, now: float) -> None:
        """Queue a ticket, unless it would wait for too long, or too many wait already.

        Where the queue is full, the longest line drops one for a line that is clearly shorter:
        otherwise a flood of one endpoint would have others refused.
        """
        table, queue, left_s = backend.table, backend.queue, ticket.left_s(now)
        if wait_s := backend.rate.too_slow_for(queue.ahead(ticket.line), left_s, now):
            text = (
                f"{ticket.endpoint} could begin with this query in about {wait_s:.3g} s only, "
                f"of the {left_s:.3g} s that it has in all"
            )
            self.fail(ticket, BackPressureError, text, now)
            return
        evicted, text, is_starved = None, "", not (queue.size or backend.replicas)
        if 0 <= table.max_queued_requests <= queue.size:
            evicted = queue.longest_other(ticket.line)
            text = _full(queue, evicted or ticket)
            if evicted is None:
                self.fail(ticket, BackPressureError, text, now)
                return
            queue.remove(evicted)
        backend.enqueue(ticket, now)
        if evicted is not None:
            self.fail(evicted, BackPressureError, text, now)
        if is_starved:
            self.observers.starved(table.tag)
        self.limit_wait(ticket, backend, now)

    def wait(self, backend: RoutedBackend, now: float) -> None:
        """Assign what is queued; where some of it has to wait, check the leases soon."""
        if backend.is_waited_for:
            self.fill(backend, now)
            if backend.is_waited_for:
                self._watch(backend, now)

    def fill(self, backend: RoutedBackend, now: float) -> None:
        """Give what waits at a backend to its replicas, as far as they have room.

        A ticket that has less time left than queries take here has its turn too late: running it
        would only keep others waiting.
        """
        table = backend.table
        backend.outliers.check(now)
        if backend.is_waited_for:
            backend.let_in(now)
        backend.reassign_homes(now)
        while backend.is_waited_for:
            waiting = backend.queue if backend.queue.size else backend.mirrored
            slots = backend.slots_for(is_mirrored=waiting is backend.mirrored)
            ticket = waiting.first()
            replica = None if ticket is None else backend.choose(ticket, slots)
            if replica is None and waiting.has_homes:
                for ticket in waiting.heads():
                    if (replica := backend.choose(ticket, slots)) is not None:
                        break
            if ticket is None or replica is None:
                break
            waiting.remove(ticket, had_turn=True)
            if ticket.deadline_at is not None and now + backend.rate.run_s >= ticket.deadline_at:
                self.fail(ticket, QueryTimeoutError, _too_late(ticket, backend, now), now)
            else:
                self.effects.append(backend.assign(ticket, replica, now))
        if table.unavailable and not backend.replicas:
            for ticket in backend.take_waiting():
                self.fail(ticket, DeploymentUnavailableError, _unavailable(ticket, table), now)

    def release(self, replica: RoutedReplica, now: float, freed: int = 0) -> None:
        """Use a replica's room, if it may be used; forget it if it is retired and done.

        ``freed`` is how many of its slots have become free because a query has ended.
        """
        backend = replica.backend
        if replica.retired:
            is_done = not (replica.load or replica.unconfirmed)
            if is_done and self.replicas.get(replica.table.tag) is replica:
                del self.replicas[replica.table.tag]
            return
        backend.place(replica, now)
        if backend.queue.size:
            backend.rate.freed(freed, now)
        elif not backend.mirrored.size:
            return
        self.fill(backend, now)

    def revoke(self, leases: Iterable[Lease]) -> None:
        """Have leases returned, but those whose callers have been asked to, or did."""
        for lease in leases:
            if lease.state is LeaseState.GRANTED:
                lease.state = LeaseState.REVOKED
                self.effects.append(Revoke(lease))

    def _watch(self, backend: RoutedBackend, now: float) -> None:
        """See WAIT_S later whether queries still wait beside leases, unless that is due anyway."""
        lending = backend.lending
        if lending.leases and not lending.is_watched:
            lending.is_watched = True
            self.tickets.once(now + WAIT_S, backend, self._reclaim)

    def _reclaim(self, backend: RoutedBackend, now: float) -> None:
        """Revoke all leases of a backend where queries have waited for WAIT_S.

        Mirrored ones too: of a lease that is used on and on they would never get a slot.
        """
        backend.lending.is_watched = False
        first = backend.queue.first() or backend.mirrored.first()
        if first is None:
            return
        if now < first.submitted_at + WAIT_S:
            self._watch(backend, now)
            return
        backend.lending.paused_until = now + PAUSE_S
        self.revoke(backend.lending.leases.values())
        self.fill(backend, now)

    # --- Ends -----------------------------------------------------------------------------------

    def _time_up(self, ticket: Ticket, now: float) -> None:
        """Answer a ticket that waits or runs, and drop it."""
        if ticket.state in (QUEUED, RUNNING):
            if not ticket.is_mirrored:
                text = _no_answer(ticket)
                self.effects.append(refusal(ticket.caller, ticket.query, QueryTimeoutError, text))
            self.drop(ticket, QueryTimeoutError.http_status, now)

    def _wait_over(self, attempts: int, since: float, ticket: Ticket, now: float) -> None:
        """Refuse a ticket that still waits for a replica, since that time."""
        if ticket.state is QUEUED and ticket.attempts == attempts:
            self.backends[ticket.backend].queue_of(ticket).remove(ticket)
            waited = f"{now - since:.3g} s, max_queue_wait_s"
            text = f"no replica of {ticket.endpoint} had room within {waited}"
            self.fail(ticket, BackPressureError, text, now)

    def drop(self, ticket: Ticket, status: int, now: float) -> None:
        """End a ticket that waits; tell the replica of one that runs."""
        if ticket.state is QUEUED:
            self.backends[ticket.backend].queue_of(ticket).remove(ticket)
            self.end(ticket, status, now)
        elif ticket.state is RUNNING and ticket.replica is not None:
            ticket.become(DROPPED)
            ticket.status = status
            replica = self.replicas.get(ticket.replica)
            if replica is not None and replica.is_silent_on(ticket, now):
                replica.suspect(is_suspect=True)
            self.effects.append(Cancel(ticket.replica, ticket.number))

    def fail(
        self, ticket: Ticket, kind: type[GreenroomError], text: str, now: float, died: str = ""
    ) -> None:
        """End a ticket with an error, which its caller gets."""
        if not ticket.is_mirrored:
            after_s = None
            if kind is BackPressureError:
                backend = self.backends[ticket.backend]
                after_s = backend.rate.retry_after_s(backend.queue.ahead(ticket.line), now)
            refused = refusal(ticket.caller, ticket.query, kind, text, after_s=after_s, died=died)
            self.effects.append(refused)
        self.end(ticket, kind.http_status, now)

    def end(self, ticket: Ticket, status: int, at: float) -> None:
        """End a ticket."""
        ticket.status, ticket.status_at = status, at
        self.tickets.end(ticket)
        if ticket.is_mirrored:
            self.observers.mirrored_ended(ticket)
            return
        waited = ticket.assigned_at - ticket.submitted_at
        waited_s = () if ticket.assigned_at < 0 else (waited,)
        took_s = (at - ticket.submitted_at,)
        self.observers.ended(Ended(ticket.endpoint, ticket.backend, status, took_s, waited_s))


def backends_of(state: Dispatch, endpoint: RoutedEndpoint) -> list[RoutedBackend]:
    """Return the backends that an endpoint's traffic goes to."""
    known = state.backends
    return [known[tag] for tag in endpoint.split.tags if tag in known]


def refusal(
    caller: Hashable,
    query: QueryLike,
    kind: type[GreenroomError],
    text: str,
    *,
    allowed: tuple[str, ...] = (),
    after_s: float | None = None,
    died: str = "",
) -> Refuse:
    """Make the answer with this kind of error; ``after_s`` replaces its usual retry_after_s."""
    after_s = kind.retry_after_s if after_s is None else after_s
    return Refuse(caller, query.id, kind.__name__, text, after_s, allowed, died)


def _no_answer(ticket: Ticket) -> str:
    return f"no answer within {ticket.time_limit_s:.6g} s"


def _too_late(ticket: Ticket, backend: RoutedBackend, now: float) -> str:
    text, left_s, takes_s = _no_answer(ticket), ticket.left_s(now), backend.rate.run_s
    if left_s <= 0:
        return text
    left = f"when its turn came {left_s:.3g} s were left, and a query takes about {takes_s:.3g} s"
    return f"{text}: {left}"


def _unavailable(ticket: Ticket, table: BackendTable) -> str:
    return f"{ticket.endpoint} is unavailable: {table.unavailable}"


def _full(queue: FairQueue, ticket: Ticket) -> str:
    own, every = queue.length(ticket.line), queue.size
    text = f"{ticket.endpoint} has {own} queries queued, "
    return text + ("its limit" if own == every else f"of {every} in all, the limit")
