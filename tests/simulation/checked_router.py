"""A proxy's router, with what it must never do looked for after every call.

Only the router's public face is used: what goes in, what comes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from greenroom.core.routing.tables import BackendTable, EndpointTable, ReplicaTable
from greenroom.core.routing.tickets import QUEUED, Assign, Grant

if TYPE_CHECKING:
    from greenroom.core.routing.leases import Leases
    from greenroom.core.routing.router import Router
    from tests.simulation.simulation import Simulation

_WATCHED = {
    "submit",
    "fill",
    "returned",
    "fenced",
    "cancel",
    "caller_gone",
    "expire",
    "answered",
    "delivered",
    "begun",
    "rejected",
    "undelivered",
    "replica_gone",
    "set_endpoint",
    "set_backend",
}


class CheckedRouter:
    """Passes everything on to a router, and checks its effects by the tables that it was given."""

    def __init__(self, router: Router, simulation: Simulation) -> None:
        self.leases = _CheckedLeases(self, router.leases)
        self.endpoints: dict[str, EndpointTable] = {}
        self.backends: dict[str, BackendTable] = {}
        self._router = router
        self._checks = simulation.checks
        self._who = simulation.world.current
        self._holds: dict[str, set[int]] = {}  # replica -> tickets
        self._begun: set[int] = set()  # tickets whose answers have begun to come in parts
        self._replicas: dict[str, ReplicaTable] = {}
        simulation.routers[self._who.pid] = self
        router.observers.add(simulation.checks.rollouts)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._router, name)
        return self.checked(name, method) if name in _WATCHED else method

    def checked(self, name: str, method: Any) -> Any:
        """Return what calls a method and checks what it does."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._take(name, args)
            # What a replica under a lease had no room for was admitted before, and waits first.
            is_new = name == "submit" and not args[0].is_refused
            limits = self._limits() if is_new else {}
            queued = self._queued() if limits else Counter()
            self._who.may_raise()
            if name == "submit" and args[0].query.request_id in self._checks.queries.poisoned:
                self._who.raise_here()
            effects = method(*args, **kwargs)
            self._who.may_raise()
            self._check(effects or [])
            if limits:
                self._check_queues(limits, queued)
            return effects

        return call

    def _take(self, name: str, args: tuple[Any, ...]) -> None:
        if name in {"set_endpoint", "set_backend"}:
            self._checks.takes_table(self._who)
        if name == "set_endpoint":
            _put(self.endpoints, args[0], args[1])
        elif name == "set_backend":
            _put(self.backends, args[0], args[1])
            for replica in args[1].replicas if args[1] is not None else ():
                if self._replicas.get(replica.tag) != replica:  # a new process
                    self._holds.pop(replica.tag, None)
                self._replicas[replica.tag] = replica
        elif name == "begun":
            self._begun.update(args[1])
        elif name == "answered":
            self._holds.get(args[0], set()).difference_update(number for number, _ in args[1])
        elif name in {"rejected", "undelivered"}:
            self._holds.get(args[0], set()).difference_update(args[1])
        elif name == "replica_gone":
            self._holds.pop(args[0], None)

    def _check(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Assign):
                self._check_assignment(effect)
            elif isinstance(effect, Grant):
                self._check_lease(effect)

    def _check_assignment(self, effect: Assign) -> None:
        ticket = effect.ticket
        table = self.backends.get(ticket.backend)
        endpoint = self.endpoints.get(ticket.endpoint)
        held = self._holds.setdefault(effect.replica, set())
        held.add(ticket.number)
        expect = self._checks.expect
        begun = ticket.number in self._begun
        expect(not begun, f"{self._who} sends {ticket} again, whose answer had begun")
        if table is None or endpoint is None:
            expect(False, f"{self._who} sends a query where it has no table: {ticket}")
            return
        shares = endpoint.shadows if ticket.is_mirrored else endpoint.traffic
        expect(
            shares.get(ticket.backend, 0.0) > 0.0,
            f"{self._who} sends a query of {ticket.endpoint} to {ticket.backend} without weight",
        )
        expect(
            effect.replica in {replica.tag for replica in table.replicas},
            f"{self._who} sends a query to {effect.replica}, which is not in the table",
        )
        expect(
            len(held) <= table.max_ongoing_requests,
            f"{self._who} gives {effect.replica} {len(held)} queries, above its limit",
        )
        self._check_slots(ticket.backend, [effect.replica])

    def _check_lease(self, effect: Grant) -> None:
        lease, expect = effect.lease, self._checks.expect
        endpoint, table = self.endpoints[lease.endpoint], self.backends[lease.backend]
        shares = [tag for tag, weight in endpoint.traffic.items() if weight > 0.0]
        message = f"{self._who} leases {lease} by {endpoint}, {table}"
        expect(lease.backend in shares and not endpoint.shadows, message)
        expect(table.max_queued_requests < 0 and not self._queued()[lease.backend], message)
        self._check_slots(lease.backend, lease.slots)
        self._checks.counts["lease granted"] += 1
        self._checks.counts["lease of a split granted"] += len(shares) > 1

    def _check_slots(self, backend: str, replicas: Iterable[str]) -> None:
        """Check that no replica has more tickets and leased slots than it may have queries."""
        limit = self.backends[backend].max_ongoing_requests
        known = self._router.state.replicas
        for tag in known.keys() & set(replicas):
            load = known[tag].load
            message = f"{self._who} has given away {load} slots of {tag}, above {limit}"
            self._checks.expect(load <= limit, message)

    def _queued(self) -> Counter[str]:
        """Return how many queries are queued at each backend, mirrored ones included."""
        tickets = self._router.state.tickets.unanswered()
        return Counter(ticket.backend for ticket in tickets if ticket.state is QUEUED)

    def _limits(self) -> dict[str, int]:
        """Return how many queries may be queued at each backend that has a limit."""
        shadows = {tag for endpoint in self.endpoints.values() for tag in endpoint.shadows}
        limits = {tag: table.max_queued_requests for tag, table in self.backends.items()}
        return {tag: limit for tag, limit in limits.items() if limit >= 0 and tag not in shadows}

    def _check_queues(self, limits: dict[str, int], before: Counter[str]) -> None:
        for tag, queued in self._queued().items():
            limit = limits.get(tag, queued)
            message = f"{tag} has {queued} queued, above {limit}"
            self._checks.expect(queued <= max(limit, before[tag]), message)


class _CheckedLeases:
    """Passes everything on to a router's leases, and has it checked."""

    def __init__(self, router: CheckedRouter, leases: Leases) -> None:
        self._router = router
        self._leases = leases

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._leases, name)
        return self._router.checked(name, method) if name in _WATCHED else method


def _put(tables: dict[str, Any], name: str, table: Any) -> None:
    if table is None:
        tables.pop(name, None)
    else:
        tables[name] = table
