"""A caller's dispatch leases: queries straight to replicas, and reports of them to the proxy.

The rules are in :mod:`greenroom.core.routing.leases`. A slot is free when the answer is here, or,
for a query that is no longer wanted, when its replica says that it has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile

from greenroom.actors.caller.open_queries import OpenQuery, weigh
from greenroom.actors.caller.proxy_link import ProxyLink
from greenroom.actors.messages.queries import (
    Address,
    CloseLeases,
    LeasedSlots,
    LeaseGranted,
    LeasesUsed,
    OpenLease,
    Process,
    Query,
    RevokeLeases,
    RunLeased,
)
from greenroom.actors.runtime.loop import Callback, Lane, Loop, Timer
from greenroom.core.rollouts.judging import OVERDUE_S
from greenroom.core.routing.balancing import UNHEARD_S
from greenroom.core.routing.leases import IDLE_S, ORPHAN_S, REPORT_S, HeldLease, HeldShare
from greenroom.core.routing.traffic import Routes, Split, key_of
from greenroom.core.routing.weights import EVEN, Weight

MAX_TARGETS = 64  # before those without a lease are dropped


class Target:
    """A replica, as a caller sends to it."""

    def __init__(
        self, incarnation: str, address: Address, lane: Lane, watch: Callable[[], Callback]
    ) -> None:
        self.incarnation = incarnation
        self.address = address
        self.lane = lane
        self.is_dead = False
        self.unwatch = watch()


class CallerLeases:
    """The leases of one caller, whose queries by id are ``queries``; all on its loop.

    ``on_gone`` gets a query whose replica has died, and that replica if it had it.
    """

    def __init__(
        self,
        loop: Loop,
        process: Process,
        proxy: ProxyLink,
        queries: dict[int, OpenQuery],
        on_gone: Callable[[OpenQuery, str], None],
    ) -> None:
        self._loop = loop
        self._process = process
        self._proxy = proxy
        self._queries = queries
        self._on_gone = on_gone
        self._routes = Routes()
        self.held: dict[tuple[str, str], HeldLease] = {}  # by endpoint and backend
        self._splits: dict[str, Split] = {}  # by endpoint, of those with leases
        self._returned: dict[int, HeldLease] = {}  # by number, those with slots in use
        self._newest = 0  # the latest number of a lease; the proxy gives them out in order
        self._targets: dict[str, Target] = {}  # by the incarnation of the replica
        self._timer: Timer | None = None  # armed while there are leases
        self._reported_at = 0.0
        self._report_due = False

    # --- Queries --------------------------------------------------------------------------------

    def take(self, query: Query, now: float) -> HeldShare | None:
        """Take a slot of a lease for a query; None where the router is to decide."""
        name = query.endpoint
        if name is None:
            name = self._routes.find(query.path)
        split = self._splits.get(name) if name is not None else None
        if name is None or split is None:
            return None
        if query.follows or query.multiplexed_model_id or query.session_id:
            return None
        tag = split.only or split.choose(key_of(query, self._process.incarnation))
        lease = self.held.get((name, tag)) if tag is not None else None
        if lease is None:
            return None
        if query.http_method and lease.methods and query.http_method not in lease.methods:
            return None
        return lease.take(now)

    def free(self, entry: OpenQuery, status: int) -> None:
        """Free the slot of a query that was answered with this status, or was not: 0."""
        share, now = entry.share, time.monotonic()
        assert share is not None, "it has a slot"
        entry.share, lease = None, share.lease
        lease.free(share, now, status, now - entry.submitted_at)
        if not entry.is_wanted:
            self._queries.pop(entry.query.id, None)
        if lease.is_returned:
            self._close_unused(share)
            self._report_soon()

    def cancel(self, entry: OpenQuery, status: int) -> None:
        """Ask a replica to drop a query, which ends with this status; its slot is free then."""
        share = entry.share
        assert share is not None, "it has a slot"
        share.lease.give_up(status, time.monotonic() - entry.submitted_at)
        share.at.lane.put(entry.query.id)

    def refused(self, entry: OpenQuery) -> None:
        """Use the lease of a query no more: its replica refuses the query."""
        if entry.share is not None:
            self._return(entry.share.lease)
            self.free(entry, 0)

    def _pack(self, incarnation: str, items: list[OpenQuery | int]) -> RunLeased:
        queries, cancelled = [], []
        for item in items:
            if isinstance(item, int):
                cancelled.append(item)
            elif item.is_wanted and item.share is not None:
                item.is_sent = True
                queries.append((item.share.lease.name, item.query))
            else:  # no longer wanted, and never sent
                self.free(item, 0)
        return RunLeased(
            incarnation=incarnation,
            caller=self._process.incarnation,
            queries=tuple(queries),
            cancelled=tuple(cancelled),
        )

    # --- Leases ---------------------------------------------------------------------------------

    def renew(self) -> None:
        """Have leases of another proxy; those of the last one are used no more."""
        self._return_all(list(self.held.values()))
        self._returned.clear()
        self._newest = 0

    def leave(self) -> None:
        """Return all leases, and close those in use too: no answer is waited for any more."""
        self._return_all(list(self.held.values()))
        for share in self._shares():  # of queries only, by now
            self._close(share)
        self.report()

    def orphaned(self) -> None:
        """Use the leases of a proxy that has died for a while; see ORPHAN_S."""
        if self.held:
            self._loop.call_later(ORPHAN_S, partial(self._return_all, list(self.held.values())))

    def granted(self, message: LeaseGranted) -> None:
        """Use a lease."""
        if message.proxy != self._proxy.process:
            return
        if message.routes is not None:
            self._routes = Routes()
            for prefix, endpoint in message.routes.items():
                self._routes.set(prefix, endpoint)
        key = message.endpoint, message.backend
        known = self.held.get(key)
        if message.number <= self._newest:
            if known is not None and known.number == message.number:  # else it was returned
                known.extend({each.replica: each.slots for each in message.slots})
            return
        self._newest = message.number
        if known is not None:
            self._return(known)
        self._make_room(len(message.slots))  # before the lease has any, which would seem unused
        shares, now = [], time.monotonic()
        for slots in message.slots:
            target = self._target(slots)
            if not target.is_dead:
                is_even = slots.pace == 1.0 and not slots.warm_in_s
                weight = Weight(slots.pace, now + slots.warm_in_s, slots.warms_s)
                share = HeldShare(slots.replica, slots.slots, target, EVEN if is_even else weight)
                shares.append(share)
                self._show(slots, message)
        lease = HeldLease(
            message.number,
            message.lease,
            message.endpoint,
            message.backend,
            message.methods,
            message.timeout_s,
            shares,
            now,
        )
        self.held[key] = lease
        self._splits[message.endpoint] = Split(message.traffic or {message.backend: 1.0})
        if self._timer is None:
            self._timer = self._loop.call_later(IDLE_S, self._tick)

    def _show(self, slots: LeasedSlots, message: LeaseGranted) -> None:
        """Show a lease to a replica; its queries come after this, on the same link."""
        lease = OpenLease(
            incarnation=slots.process.incarnation,
            lease=message.lease,
            proxy=message.proxy.incarnation,
            caller=self._process,
            endpoint=message.endpoint,
            route=message.route,
        )
        self._loop.send(slots.address, lease)

    def revoked(self, message: RevokeLeases) -> None:
        """Return leases; those that are not here have been returned."""
        if message.proxy == self._proxy.process:
            self._return_all(
                [lease for lease in self.held.values() if lease.number in message.numbers]
            )

    def _return(self, lease: HeldLease) -> None:
        if lease.is_returned:
            return
        lease.is_returned = True
        del self.held[lease.endpoint, lease.backend]
        if not any(endpoint == lease.endpoint for endpoint, _ in self.held):
            del self._splits[lease.endpoint]
        self._returned[lease.number] = lease
        for share in list(lease.shares):
            self._close_unused(share)
        self._report_soon()

    def _close_unused(self, share: HeldShare) -> None:
        if not share.ongoing:
            self._close(share)

    def _close(self, share: HeldShare) -> None:
        """Tell a replica that no more comes of a lease that is returned."""
        if not share.at.is_dead:
            names = (share.lease.name,)
            message = CloseLeases(incarnation=share.at.incarnation, leases=names)
            self._loop.send(share.at.address, message)

    def _return_all(self, leases: Iterable[HeldLease]) -> None:
        for lease in leases:
            self._return(lease)

    def _target(self, slots: LeasedSlots) -> Target:
        incarnation = slots.process.incarnation
        target = self._targets.get(incarnation)
        if target is not None:
            return target
        gone = partial(self._replica_gone, incarnation)
        # There are slots for all that is sent, and the replica's end is watched.
        lane = Lane(self._loop, slots.address, partial(self._pack, incarnation), weigh)
        watch = partial(self._loop.watch_process, slots.process, gone)
        target = Target(incarnation, slots.address, lane, watch)
        self._targets[incarnation] = target
        return target

    def _make_room(self, targets: int) -> None:
        """Drop targets without a lease, if there would be too many with so many more."""
        if len(self._targets) + targets <= MAX_TARGETS:
            return
        in_use = {share.at for share in self._shares()}
        for known in [key for key, each in self._targets.items() if each not in in_use]:
            self._targets.pop(known).unwatch()

    def _shares(self) -> set[HeldShare]:
        """Return all that may be used, or are."""
        of_leases = {share for lease in self.held.values() for share in lease.shares}
        return of_leases | {each.share for each in self._queries.values() if each.share is not None}

    def _replica_gone(self, incarnation: str) -> None:
        target = self._targets.pop(incarnation, None)
        if target is None:
            return
        target.is_dead = True
        target.unwatch()
        target.lane.drop()
        for used in [each for each in self._shares() if each.at is target]:
            used.lease.drop(used)
        for entry in list(self._queries.values()):
            if (share := entry.share) is not None and share.at is target:
                self.free(entry, 0)
                if entry.is_wanted:
                    self._on_gone(entry, share.replica if entry.is_sent else "")

    # --- Reports --------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        for lease in list(self.held.values()):
            if lease.is_to_be_returned(now, UNHEARD_S):
                self._return(lease)
        if now - self._reported_at >= REPORT_S:
            self.report()
        is_needed = self.held or self._returned  # what runs under these may become overdue
        self._timer = self._loop.call_later(IDLE_S, self._tick) if is_needed else None

    def _report_soon(self) -> None:
        if not self._report_due:
            self._report_due = True
            self._loop.at_turn_end(self.report)

    def report(self) -> None:
        """Tell the proxy what became of queries, and what is returned."""
        self._report_due = False
        self._reported_at = time.monotonic()
        if self._proxy.process is None:  # the next one counts from zero anyway
            return
        leases = [*self.held.values(), *self._returned.values()]
        taken = [(lease.number, lease.take_used()) for lease in leases]
        used = tuple([(number, (each.ongoing, each.ended)) for number, each in taken])
        failed = {number: each.failed for number, each in taken if each.failed}
        took = {number: each.took for number, each in taken if each.took}
        before = self._reported_at - OVERDUE_S
        # Oldest first, but for those that are tried again, which have no share.
        old = takewhile(lambda each: each.submitted_at < before, self._queries.values())
        overdue = Counter(each.share.lease.number for each in old if each.share and each.is_wanted)
        returned = [(number, lease.in_use()) for number, lease in self._returned.items()]
        for number, in_use in returned:
            if not in_use:
                del self._returned[number]
        if used or returned:
            message = LeasesUsed(
                incarnation=self._process.incarnation,
                used=used,
                returned=tuple(returned),
                failed=failed,
                took=took,
                overdue=dict(overdue),
            )
            self._proxy.send(message)
