"""Dispatch leases: a router's leave to a caller to use slots of replicas directly.

Theory of operation. A query that passes the router takes four messages, and one under a lease two:
caller to replica, and back. So a caller that sends many queries to one endpoint gets a lease for
it: some slots at each of some replicas. Leased slots count as taken (:mod:`.balancing`), whether
the caller uses them or not. What does not fit goes to the router, which decides as ever.

A lease is of one backend for one endpoint. It is granted only where the router has no say in where
a query goes and whether it waits: no shadow follows the endpoint, no session is kept, the backend's
queue has no limit, nothing waits there, and caller, router and replicas are on one host. There the
end of a process is certain, so that no lease needs a time limit. Where several backends have
traffic, the caller chooses one as the router would (traffic.py), and what it has no lease of goes
to the router, which chooses the same.

    GRANTED   the caller may use the slots, or return them
    REVOKED   the caller is asked to return them
    RETURNED  no query may begin; slots count until those in them have ended

The caller shows its lease to the replicas, before the first query on the same link. One that does
not return a revoked lease within FENCE_S is *fenced*: the replicas are asked to refuse the lease.

A lease is revoked when a query has waited for its backend for WAIT_S, when the tables of its
endpoint or backend change, when any path may lead elsewhere than before, while a replica is on
trial or probed (outliers.py), when the weights of replicas change (weights.py), and when its caller
has more than its share of slots while another asks for its own. The proxy tells the controller that
it holds a table when no lease that the table has revoked is *unconfirmed*: the caller has returned
it or is dead, or the replicas refuse it. So nothing begins against an acknowledged change.

Each caller that has lately used a backend has an equal *share* of its leasable slots, a quarter of
which stay with the router: the first query of another caller finds room. Callers return what they
have not used for IDLE_S. They report what became of queries every REPORT_S, for metrics,
autoscaling and retry budgets.

:class:`Leases` is the router's side, :class:`HeldLease` the caller's.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from greenroom.core.routing.balancing import BAD, NEAR, RoutedBackend, RoutedReplica
from greenroom.core.routing.dispatching import Dispatch
from greenroom.core.routing.outliers import has_failed
from greenroom.core.routing.tables import EndpointTable
from greenroom.core.routing.tickets import Effects, Ended, Grant, Lease, LeaseState, Ticket
from greenroom.core.routing.traffic import RoutedEndpoint
from greenroom.core.routing.weights import ENOUGH, EVEN, LEVELS, Taken, Weight

ASK_WITHIN_S = 0.05  # two queries that come so soon after each other are worth a lease
RECENT_S = 1.0  # for so long a caller that used a backend has a share of it
IDLE_S = 0.02  # after which a caller returns what it does not use
REPORT_S = 0.1
FENCE_S = 0.5  # within which a caller returns a revoked lease; then its replicas close it
ORPHAN_S = 1.0  # for so long a lease lives on whose router has died
MAX_REPLICAS = 16  # of one lease


class Used(NamedTuple):
    """What became of queries under a lease since the last report, and how many run."""

    ongoing: int
    ended: Mapping[int, Sequence[float]]  # status -> how long each has taken, in seconds
    failed: Mapping[str, int] = MappingProxyType({})  # replica -> how many, by its fault
    took: Mapping[str, tuple[Any, ...]] = MappingProxyType({})  # replica -> fields of Sums
    overdue: int = 0  # how many of those that run are older than OVERDUE_S


# --- The caller's side ----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class HeldShare:
    """The slots of a lease at one replica."""

    replica: str
    slots: int
    at: Any = None  # where its caller sends queries
    weight: Weight = EVEN
    taken: Taken = field(default_factory=Taken)
    ongoing: int = 0
    began_at: float = 0.0  # when the first of what runs was sent, or the replica was heard
    lease: HeldLease = field(init=False)


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease as its caller has it."""

    number: int
    name: str  # to replicas
    endpoint: str
    backend: str
    methods: tuple[str, ...]
    timeout_s: float | None
    shares: list[HeldShare]
    used_at: float  # when a slot was free, the last time
    is_returned: bool = False
    ended: dict[int, list[float]] = field(default_factory=dict)  # by status: how long
    failed: dict[str, int] = field(default_factory=dict)  # by replica

    def __post_init__(self) -> None:
        """Note in each share whose it is."""
        for share in self.shares:
            share.lease = self

    @property
    def ongoing(self) -> int:
        """How many slots are in use."""
        return sum(share.ongoing for share in self.shares)

    def take(self, now: float) -> HeldShare | None:
        """Take a slot at the replica with the fewest queries; None when there is no room.

        Of one that is new or slow they count as more.
        """
        best, least = None, 0
        for share in self.shares:
            ongoing, weight = share.ongoing, share.weight
            if ongoing < share.slots:
                level = LEVELS * ongoing if weight is EVEN else weight.level(ongoing, now)
                if best is None or level < least:
                    best, least = share, level
        if best is None:
            return None
        if len(self.shares) > 1:  # equals take turns
            self.shares.remove(best)
            self.shares.append(best)
        if not best.ongoing:
            best.began_at = now
        best.ongoing += 1
        return best

    def free(self, share: HeldShare, now: float, status: int = 0, seconds: float = 0.0) -> None:
        """Free a slot; count the query that had it, unless that has no status: 0."""
        share.ongoing -= 1
        share.began_at = self.used_at = now
        if not status:
            return
        if status < BAD:
            if share.taken.queries < ENOUGH:
                share.taken.add(seconds, share.ongoing)
        elif has_failed(status):
            self.failed[share.replica] = self.failed.get(share.replica, 0) + 1
        self.ended.setdefault(status, []).append(seconds)

    def give_up(self, status: int, seconds: float) -> None:
        """Count a query that nobody waits for any more, and that has its slot yet."""
        self.ended.setdefault(status, []).append(seconds)

    def drop(self, share: HeldShare) -> None:
        """Use a replica no more: it is dead, with all that it had."""
        self.shares.remove(share)

    def extend(self, slots: Mapping[str, int]) -> None:
        """Use so many slots from now on, by replica."""
        for share in self.shares:
            share.slots = slots.get(share.replica, share.slots)

    def is_to_be_returned(self, now: float, unheard_s: float) -> bool:
        """Return whether it is not used, or a replica says nothing for so long."""
        if not self.ongoing:
            return now - self.used_at >= IDLE_S
        return any(share.ongoing and now - share.began_at > unheard_s for share in self.shares)

    def in_use(self) -> dict[str, int]:
        """Return replica -> slots in use, of those that have any."""
        return {share.replica: share.ongoing for share in self.shares if share.ongoing}

    def take_used(self) -> Used:
        """Return what became of queries since the last time."""
        counted = [share for share in self.shares if share.taken.queries]
        took = {share.replica: tuple(share.taken.take()) for share in counted}
        used = Used(self.ongoing, self.ended, self.failed, took)
        self.ended, self.failed = {}, {}
        return used


# --- The router's side ----------------------------------------------------------------------------


def share_of(limit: int, callers: int) -> int:
    """Return how many slots of a replica each caller may lease.

    A quarter stays with the router, of a few slots at least one.
    """
    return max((limit - _kept(limit)) // max(callers, 1), 0)


def _kept(limit: int) -> int:
    return max(limit // 4, 1)


def _room(replica: RoutedReplica, share: int, has: int, limit: int) -> int:
    """Return how many more slots of a replica may be leased to a caller that ``has`` some.

    They are its ``share`` in all, and less of a replica that is slower than others.
    Where the router has more queries there than it keeps slots, it keeps as many free ones besides:
    the next query would wait, and have the lease revoked.
    """
    kept = _kept(limit)
    most = max(int(share / replica.weight.pace), 1) - has
    free = limit - replica.load
    if replica.load - replica.leased > kept:
        free -= kept
    return min(most, limit - kept - replica.leased, free)


class Leases:
    """What a router does about leases; what it has lent is in its state, by backend and number."""

    def __init__(self, state: Dispatch) -> None:
        self._state = state
        # Callers that may have leases, and whether also where they have to choose among backends.
        self.lessees: dict[Hashable, bool] = {}
        self._numbers = itertools.count(1)

    # --- Grants ---------------------------------------------------------------------------------

    def offer(self, ticket: Ticket, endpoint: RoutedEndpoint, now: float) -> None:
        """Grant the caller a lease for queries like this one, where the router has no say."""
        state, caller = self._state, ticket.caller
        backend = state.backends[ticket.backend]
        asked_at = backend.lending.asked_at
        last_at, asked_at[caller] = asked_at.get(caller), now
        if last_at is None or now - last_at > ASK_WITHIN_S:
            return
        has_a_say = (
            (len(endpoint.split.tags) > 1 and not self.lessees[caller])
            or endpoint.table.shadows
            or state.affinity(endpoint) is not None
            or backend.table.max_queued_requests >= 0
            or backend.table.request_router is not None
            or backend.is_waited_for
            or backend.table.unavailable
            or backend.outliers.decide
        )
        if not has_a_say:
            self._grant(caller, ticket.endpoint, backend, now)

    def _grant(self, caller: Hashable, endpoint: str, backend: RoutedBackend, now: float) -> None:
        """Give a caller its share of the replicas on the router's host that may get tickets.

        Or have others return what is above their share.
        """
        lending, limit = backend.lending, backend.table.max_ongoing_requests
        lending.used_at[caller] = now
        lately = {each: at for each, at in lending.used_at.items() if now - at <= RECENT_S}
        lending.used_at = lately
        share = share_of(limit, len(lately))
        if not share or lending.paused_until > now:
            return
        known = lending.leases.get((caller, endpoint))
        if known is not None:
            self._extend(known, share, backend, now)
            return
        near = [each for each in backend.replicas.values() if each.tier == NEAR and each.level >= 0]
        replicas = sorted(near, key=lambda replica: replica.load)[:MAX_REPLICAS]
        room = {replica.table.tag: _room(replica, share, 0, limit) for replica in replicas}
        slots = {replica: count for replica, count in room.items() if count > 0}
        if sum(slots.values()) < share:
            held = [each for each in lending.leases.values() if each.state is LeaseState.GRANTED]
            above = [each for each in held if max(each.slots.values(), default=0) > share]
            self._state.revoke(above)
            if above:
                return
        if slots:
            lease = Lease(next(self._numbers), caller, endpoint, backend.table.tag, slots)
            self._state.leases[lease.number] = lending.leases[caller, endpoint] = lease
            for replica in replicas:
                replica.leased += slots.get(replica.table.tag, 0)
                backend.place(replica, now)
            self._state.effects.append(Grant(lease))

    def _extend(self, lease: Lease, share: int, backend: RoutedBackend, now: float) -> None:
        """Give a caller that asks for more what its lease lacks of its share."""
        if lease.state is not LeaseState.GRANTED:
            return
        limit, has_more = backend.table.max_ongoing_requests, False
        for tag, count in lease.slots.items():
            replica = backend.replicas.get(tag)
            more = 0 if replica is None else _room(replica, share, count, limit)
            if replica is not None and more * 4 > count:  # fewer are not worth a message
                lease.slots[tag] += more
                replica.leased += more
                backend.place(replica, now)
                has_more = True
        if has_more:
            self._state.effects.append(Grant(lease))

    # --- What callers say -----------------------------------------------------------------------

    def used(self, caller: Hashable, number: int, used: Used, now: float) -> Effects:
        """Learn from a caller what became of queries under a lease."""
        state = self._state
        lease = state.leases.get(number)
        if lease is None or lease.caller != caller:
            return []
        lease.ongoing, lease.overdue = used.ongoing, used.overdue
        endpoint, backend = state.endpoints.get(lease.endpoint), state.backends.get(lease.backend)
        took_s = [seconds for some in used.ended.values() for seconds in some]
        if endpoint is not None and backend is not None and took_s:
            if (budget := endpoint.budgets.get(lease.backend)) is not None:
                budget.pay_in(backend.slots, len(took_s))
            backend.rate.ran(sum(took_s) / len(took_s))
        for status, some in used.ended.items():
            waited_s = [0.0] * len(some)  # they wait nowhere
            state.observers.ended(Ended(lease.endpoint, lease.backend, status, some, waited_s))
        if backend is not None:
            backend.lending.used_at[caller] = now
            backend.learn(used.failed, used.took, now)
            if backend.compare(now) or backend.outliers.decide:
                state.revoke(backend.lending.leases.values())
        return state.taken()

    def returned(
        self, caller: Hashable, number: int, in_use: Mapping[str, int], now: float
    ) -> Effects:
        """Use the slots of a lease that its caller does not; replica -> slots still in use."""
        lease = self._state.leases.get(number)
        if lease is not None and lease.caller == caller:
            self._take_back(lease, in_use, now)
        return self._state.taken()

    def fenced(self, number: int, now: float) -> Effects:
        """Note that the replicas refuse what comes of a lease, whatever its caller does."""
        lease = self._state.leases.get(number)
        if lease is not None and lease.state is LeaseState.REVOKED:
            self._take_back(lease, {}, now)
        return self._state.taken()

    @property
    def unconfirmed(self) -> set[int]:
        """The numbers of revoked leases that may still be used."""
        leases = self._state.leases.items()
        return {number for number, lease in leases if lease.state is LeaseState.REVOKED}

    def _take_back(self, lease: Lease, in_use: Mapping[str, int], now: float) -> None:
        """Use the slots of a lease that are not in use; forget it when none is."""
        state = self._state
        if lease.state is not LeaseState.RETURNED:
            lease.state = LeaseState.RETURNED
            backend, key = state.backends.get(lease.backend), (lease.caller, lease.endpoint)
            if backend is not None and backend.lending.leases.get(key) is lease:
                del backend.lending.leases[key]
        slots, lease.slots = lease.slots, {}
        for tag, count in slots.items():
            if kept := min(count, in_use.get(tag, 0)):
                lease.slots[tag] = kept
            replica = state.replicas.get(tag)
            if count > kept and replica is not None:
                replica.leased -= count - kept
                state.release(replica, now, count - kept)
        lease.ongoing = sum(lease.slots.values())
        if not lease.slots:
            del state.leases[lease.number]

    # --- What the router hears ------------------------------------------------------------------

    def endpoint_changed(self, old: EndpointTable, new: EndpointTable) -> None:
        """Revoke what an endpoint's new table makes wrong: where paths lead elsewhere, all."""
        if old != new:
            moved = (old.route, old.methods) != (new.route, new.methods)
            self._state.routes.version += moved
            leases = self._state.leases.values()
            self._state.revoke(each for each in leases if moved or each.endpoint == old.name)

    def caller_gone(self, caller: Hashable, now: float) -> None:
        """Free what a caller had that has died or left, and forget it."""
        self.lessees.pop(caller, None)
        for backend in self._state.backends.values():
            backend.lending.asked_at.pop(caller, None)
            backend.lending.used_at.pop(caller, None)
        for lease in [each for each in self._state.leases.values() if each.caller == caller]:
            self._take_back(lease, {}, now)
