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
    REVOKED   the caller is told to return them
    RETURNED  no query may begin; slots count until those in them have ended

The caller shows its lease to the replicas, before the first query on the same link. One that does
not return a revoked lease within FENCE_S is *fenced*: the replicas are told to refuse the lease.

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
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from greenroom.core.routing.balancing import BAD, NEAR, RoutedBackend, RoutedReplica
from greenroom.core.routing.outliers import has_failed
from greenroom.core.routing.tickets import Effects, Grant, Lease, LeaseState, Reclaim, Revoke
from greenroom.core.routing.weights import ENOUGH, EVEN, Taken, Weight

ASK_WITHIN_S = 0.05  # two queries that come so soon after each other are worth a lease
RECENT_S = 1.0  # for so long a caller that used a backend has a share of it
# Shorter waits are common: a slot is heard to be free later than its answer, and the queries that a
# caller has sent before it hears of a lease find the slots taken that they will not use.
WAIT_S = 0.01
PAUSE_S = 0.1  # without grants, after queries had to wait
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
    took: Mapping[str, tuple[int, float, float]] = MappingProxyType({})  # replica -> see Taken
    overdue: int = 0  # how many of those that run are older than OVERDUE_S


# --- The caller's side ----------------------------------------------------------------------------


class HeldShare:
    """The slots of a lease at one replica."""

    __slots__ = ("at", "began_at", "lease", "ongoing", "replica", "slots", "taken", "weight")

    lease: HeldLease

    def __init__(self, replica: str, slots: int, at: Any = None, weight: Weight = EVEN) -> None:
        self.replica = replica
        self.slots = slots
        self.at = at  # where its caller sends queries
        self.weight = weight
        self.taken = Taken()
        self.ongoing = 0
        self.began_at = 0.0  # when the first of what runs was sent, or the replica was heard


class HeldLease:
    """A lease as its caller has it."""

    __slots__ = (
        "backend",
        "ended",
        "endpoint",
        "failed",
        "is_returned",
        "methods",
        "name",
        "number",
        "shares",
        "timeout_s",
        "used_at",
    )

    def __init__(
        self,
        number: int,
        name: str,
        endpoint: str,
        backend: str,
        methods: tuple[str, ...],
        timeout_s: float | None,
        shares: list[HeldShare],
        now: float,
    ) -> None:
        self.number = number
        self.name = name  # to replicas
        self.endpoint = endpoint
        self.backend = backend
        self.methods = methods
        self.timeout_s = timeout_s
        self.shares = shares
        self.used_at = now
        self.is_returned = False
        self.ended: dict[int, list[float]] = {}  # by status: how long
        self.failed: dict[str, int] = {}  # by replica
        for share in shares:
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
            if share.ongoing < share.slots:
                level = share.weight.level(share.ongoing, now)
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
        self.used_at = now
        return best

    def free(self, share: HeldShare, now: float) -> None:
        """Free a slot."""
        share.ongoing -= 1
        share.began_at = self.used_at = now

    def count(self, share: HeldShare, status: int, seconds: float) -> None:
        """Count a query that has ended."""
        if status < BAD:
            if share.taken.count < ENOUGH:
                share.taken.add(seconds)
        elif has_failed(status):
            self.failed[share.replica] = self.failed.get(share.replica, 0) + 1
        ended = self.ended.get(status)
        if ended is None:
            ended = self.ended[status] = []
        ended.append(seconds)

    def lost(self, share: HeldShare) -> None:
        """Use a replica no more: it is dead, with all that it had."""
        self.shares.remove(share)

    def extend(self, slots: Mapping[str, int]) -> None:
        """Use so many slots from now on, by replica."""
        for share in self.shares:
            share.slots = max(share.slots, slots.get(share.replica, 0))

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
        took = {share.replica: share.taken.take() for share in self.shares if share.taken.count}
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
    """The leases that a router has granted, and who asks for some."""

    def __init__(self) -> None:
        # Callers that may have leases, and whether also where traffic is split.
        self.lessees: dict[Hashable, bool] = {}
        self.by_number: dict[int, Lease] = {}
        self._numbers = itertools.count(1)
        # By caller, endpoint and backend, those that are not returned.
        self._of: dict[tuple[Hashable, str, str], Lease] = {}
        self._asked_at: dict[Hashable, dict[str, float]] = {}  # caller -> backend -> when
        self._used_at: defaultdict[str, dict[Hashable, float]] = defaultdict(dict)  # by backend
        self._paused_until: dict[str, float] = {}  # by backend
        self._watched: set[str] = set()  # backends that Reclaim was asked for

    # --- Grants ---------------------------------------------------------------------------------

    def passed(self, caller: Hashable, backend: str, now: float) -> bool:
        """Note that a caller's query passes the router; return whether a lease is worth it."""
        asked = self._asked_at.setdefault(caller, {})
        last_at = asked.get(backend)
        asked[backend] = now
        return last_at is not None and now - last_at <= ASK_WITHIN_S

    def grant(self, caller: Hashable, endpoint: str, backend: RoutedBackend, now: float) -> Effects:
        """Give a caller its share of the replicas on the router's host that may get tickets.

        Or have others return what is above their share.
        """
        tag, limit = backend.table.tag, backend.table.max_ongoing_requests
        share = share_of(limit, self._note_caller(tag, caller, now))
        known = self._of.get((caller, endpoint, tag))
        if not share or self._paused_until.get(tag, 0.0) > now:
            return []
        if known is not None:
            return self._extend(known, share, backend, now)
        near = [each for each in backend.replicas.values() if each.tier == NEAR and each.level >= 0]
        replicas = sorted(near, key=lambda replica: replica.load)[:MAX_REPLICAS]
        room = {replica.table.tag: _room(replica, share, 0, limit) for replica in replicas}
        slots = {replica: count for replica, count in room.items() if count > 0}
        effects: Effects = []
        if sum(slots.values()) < share:
            held = self.of_backend(tag)
            above = [each for each in held if max(each.slots.values(), default=0) > share]
            effects = self.revoke(above)
        if not slots or effects:
            return effects
        lease = Lease(next(self._numbers), caller, endpoint, tag, slots)
        self.by_number[lease.number] = self._of[caller, endpoint, tag] = lease
        for replica in replicas:
            replica.leased += slots.get(replica.table.tag, 0)
            backend.place(replica, now)
        return [Grant(lease)]

    def _extend(self, lease: Lease, share: int, backend: RoutedBackend, now: float) -> Effects:
        """Give a caller that asks for more what its lease lacks of its share."""
        if lease.state is not LeaseState.GRANTED:
            return []
        limit, has_more = backend.table.max_ongoing_requests, False
        for tag, count in lease.slots.items():
            replica = backend.replicas.get(tag)
            more = 0 if replica is None else _room(replica, share, count, limit)
            if replica is not None and more * 4 > count:  # fewer are not worth a message
                lease.slots[tag] += more
                replica.leased += more
                backend.place(replica, now)
                has_more = True
        return [Grant(lease)] if has_more else []

    def _note_caller(self, backend: str, caller: Hashable, now: float) -> int:
        """Note that a caller uses a backend; return how many have lately."""
        used_at = self._used_at[backend]
        used_at[caller] = now
        for each in [each for each, at in used_at.items() if now - at > RECENT_S]:
            del used_at[each]
        return len(used_at)

    # --- Ends -----------------------------------------------------------------------------------

    def of_backend(self, tag: str) -> list[Lease]:
        """Return the leases of a backend that are not returned."""
        return [lease for lease in self._of.values() if lease.backend == tag]

    def of_endpoint(self, name: str) -> list[Lease]:
        """Return the leases of an endpoint that are not returned."""
        return [lease for lease in self._of.values() if lease.endpoint == name]

    def all(self) -> list[Lease]:
        """Return all that are not returned."""
        return list(self._of.values())

    def watch(self, backend: str) -> Effects:
        """Make the router look soon whether queries still wait, unless it will anyway."""
        if backend in self._watched or not self.of_backend(backend):
            return []
        self._watched.add(backend)
        return [Reclaim(backend)]

    def watched(self, backend: str) -> None:
        """Note that the router looks now."""
        self._watched.discard(backend)

    def pause(self, backend: str, now: float) -> None:
        """Grant nothing of a backend for a while: queries wait there."""
        self._paused_until[backend] = now + PAUSE_S

    def revoke(self, leases: Iterable[Lease]) -> Effects:
        """Have leases returned, but those whose callers have been told to, or did."""
        granted = [lease for lease in leases if lease.state is LeaseState.GRANTED]
        for lease in granted:
            lease.state = LeaseState.REVOKED
        return [Revoke(lease) for lease in granted]

    def unconfirmed(self) -> set[int]:
        """Return the revoked leases whose callers may still use them."""
        return {lease.number for lease in self._of.values() if lease.state is LeaseState.REVOKED}

    def returned(self, lease: Lease, in_use: Mapping[str, int]) -> dict[str, int]:
        """Note what a caller still uses of a lease; return replica -> slots that are free now.

        It is forgotten when that is nothing.
        """
        if lease.state is not LeaseState.RETURNED:
            lease.state = LeaseState.RETURNED
            del self._of[lease.caller, lease.endpoint, lease.backend]
        freed = {
            replica: count - in_use.get(replica, 0)
            for replica, count in lease.slots.items()
            if count > in_use.get(replica, 0)
        }
        lease.slots = {
            replica: min(count, in_use[replica])
            for replica, count in lease.slots.items()
            if in_use.get(replica)
        }
        lease.ongoing = sum(lease.slots.values())
        if not lease.slots:
            del self.by_number[lease.number]
        return freed

    def used(self, lease: Lease, used: Used, now: float) -> None:
        """Take a caller's report."""
        lease.ongoing, lease.overdue = used.ongoing, used.overdue
        if lease.backend in self._used_at:  # else it is gone
            self._used_at[lease.backend][lease.caller] = now

    def replica_lost(self, tag: str) -> Effects:
        """Forget what was leased of a dead replica; revoke what is nothing without it."""
        effects: Effects = []
        for lease in list(self.by_number.values()):
            if lease.slots.pop(tag, None) is not None and not lease.slots:
                if lease.state is LeaseState.RETURNED:
                    del self.by_number[lease.number]
                else:
                    effects += self.revoke([lease])
        return effects

    def caller_lost(self, caller: Hashable) -> list[Lease]:
        """Return what a caller had that has died or left."""
        self.lessees.pop(caller, None)
        self._asked_at.pop(caller, None)
        for used_at in self._used_at.values():
            used_at.pop(caller, None)
        return [lease for lease in self.by_number.values() if lease.caller == caller]

    def forget_backend(self, tag: str) -> None:
        """Forget who used a backend that is gone, or asked for it."""
        self._used_at.pop(tag, None)
        self._paused_until.pop(tag, None)
        for asked in self._asked_at.values():
            asked.pop(tag, None)
