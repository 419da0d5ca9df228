"""The messages of dispatch leases: to replicas, to callers, and when tables may be acknowledged.

The router decides; see :mod:`greenroom.core.routing.leases`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from greenroom.actors.messages.queries import (
    Address,
    CloseLeases,
    LeasedSlots,
    LeaseGranted,
    LeasesUsed,
    Process,
    RevokeLeases,
)
from greenroom.actors.runtime.loop import Callback, Loop, Outbox, nothing
from greenroom.core.routing import tickets
from greenroom.core.routing.leases import FENCE_S, ORPHAN_S, Used
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import ReplicaTable


@dataclass(slots=True, eq=False)
class AttachedCaller:
    """A caller as its proxy knows it."""

    process: Process
    address: Address
    pickled: bytes  # the address
    outbox: Outbox
    unwatch: Callback
    routes_known: int = -1  # their version


class LeaseDesk:
    """Grants and revokes leases as the router says; ``run`` performs its effects.

    ``callers`` are those that are attached.
    """

    def __init__(
        self,
        loop: Loop,
        process: Process,
        router: Router,
        run: Callable[[tickets.Effects], None],
        callers: Mapping[Hashable, AttachedCaller],
    ) -> None:
        self._loop = loop
        self._process = process
        self._router = router
        self._run = run
        self._callers = callers
        # A lease of a proxy before this one may be used until replicas have met this one.
        self._introducing: set[str] | None = set()
        self._awaited: set[int] = set()  # leases that keep tables from being acknowledged
        self._on_confirmed: Callback = nothing
        loop.call_later(ORPHAN_S, self._all_introduced)

    # --- What the router says -------------------------------------------------------------------

    def grant(self, effect: tickets.Grant) -> None:
        """Tell the caller of a lease, and of the routes if it does not know the present ones."""
        lease = effect.lease
        caller, state = self._callers.get(lease.caller), self._router.state
        endpoint, backend = state.endpoints.get(lease.endpoint), state.backends.get(lease.backend)
        if caller is None or endpoint is None or backend is None:
            return  # its death is being handled
        routes, version = None, state.routes.version
        if caller.routes_known != version:
            caller.routes_known = version
            routes = state.routes.all()
        slots = []
        for tag, count in lease.slots.items():
            if (replica := state.replicas.get(tag)) is not None:
                table, weight = replica.table, replica.weight
                process: Any = table.process
                warming = weight.warm_in_s(time.monotonic()), weight.warms_s
                slots.append(LeasedSlots(tag, process, table.address, count, *warming, weight.pace))
        message = LeaseGranted(
            proxy=self._process,
            lease=self._name(lease),
            number=lease.number,
            endpoint=lease.endpoint,
            methods=endpoint.table.methods,
            timeout_s=backend.table.request_timeout_s,
            slots=tuple(slots),
            routes=routes,
            route=endpoint.table.route or "/",
            backend=lease.backend,
            traffic=endpoint.table.traffic,
        )
        self._loop.send(caller.address, message)

    def revoke(self, effect: tickets.Revoke) -> None:
        """Ask the caller to return a lease, or after a while its replicas refuse it."""
        lease = effect.lease
        caller = self._callers.get(lease.caller)
        self._loop.call_later(FENCE_S, partial(self._fence, lease))
        if caller is not None:
            message = RevokeLeases(proxy=self._process, numbers=(lease.number,))
            self._loop.send(caller.address, message)

    def _fence(self, lease: tickets.Lease) -> None:
        if lease.state is not tickets.LeaseState.REVOKED:
            return
        missing = set(lease.slots)

        def closed(replica: str) -> None:
            missing.discard(replica)
            if not missing:
                self._run(self._router.leases.fenced(lease.number, time.monotonic()))
                self.check_confirmed()

        for tag in [*missing, ""]:
            replica, done = self._router.state.replicas.get(tag), partial(closed, tag)
            if replica is None:
                done()
                continue
            process: Any = replica.table.process
            names = (self._name(lease),)
            message = CloseLeases(incarnation=process.incarnation, leases=names, is_fence=True)
            self._loop.send(replica.table.address, message, done, done)

    def _name(self, lease: tickets.Lease) -> str:
        return f"{self._process.incarnation}/{lease.number}"

    # --- What callers say -----------------------------------------------------------------------

    def used(self, message: LeasesUsed) -> None:
        """Take a caller's report."""
        now, caller = time.monotonic(), message.incarnation
        for number, (ongoing, ended) in message.used:
            known = Used(
                ongoing,
                ended,
                failed=message.failed.get(number, {}),
                took=message.took.get(number, {}),
                overdue=message.overdue.get(number, 0),
            )
            self._run(self._router.leases.used(caller, number, known, now))
        for number, in_use in message.returned:
            self._run(self._router.leases.returned(caller, number, in_use, now))
        self.check_confirmed()

    # --- When tables may be acknowledged --------------------------------------------------------

    def introduce(self, replica: ReplicaTable, message: Any) -> None:
        """Let a replica of this host know this proxy, and close leases of those before it."""
        missing = self._introducing
        if missing is None:
            self._loop.send(replica.address, message)
            return
        missing.add(replica.tag)

        def introduced() -> None:
            missing.discard(replica.tag)
            self.check_confirmed()

        self._loop.send(replica.address, message, introduced, introduced)

    def _all_introduced(self) -> None:
        self._introducing = None
        self.check_confirmed()

    def when_confirmed(self, callback: Callback) -> None:
        """Call back when nothing can begin any more by a lease that is revoked by now."""
        self._awaited |= self._router.leases.unconfirmed
        self._on_confirmed = callback
        self.check_confirmed()

    def check_confirmed(self) -> None:
        """Call back if all is confirmed; to be called when a lease may have ended."""
        self._awaited &= self._router.leases.unconfirmed
        if not (self._awaited or self._introducing):
            callback, self._on_confirmed = self._on_confirmed, nothing
            callback()
