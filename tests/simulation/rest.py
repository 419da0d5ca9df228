"""Whether all has come to rest: what runs and what is held is what the saved state says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from greenroom.core.routing.load import busy
from tests.core.routing.queries import ongoing

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.world import SimProcess


def unsettled(simulation: Simulation) -> str:
    """Return what is not as it should be yet, "" when all is."""
    for find in (_clients, _goals, _actors, _replicas, _tables, _queries):
        if found := find(simulation):
            return found
    return ""


def tag_of(process: Any) -> str:
    """Return the tag of a replica's process, "" before its first order."""
    return process.actor.tag if process.pulse is not None else ""


def controllers(simulation: Simulation) -> list[SimProcess]:
    """Return the controllers that have begun.

    One may have been made for a host that was not to lead any more when it was told of that. It
    does nothing, and is there for when its host leads again.
    """
    there = simulation.world.processes.values()
    return [p for p in there if p.role == "controller" and p.pulse is not None]


def _clients(simulation: Simulation) -> str:
    busy = [client.number for client in simulation.clients if not client.done]
    return (
        f"clients {busy} wait for {[simulation.clients[n]._pending for n in busy]}" if busy else ""
    )


def _goals(simulation: Simulation) -> str:
    records = simulation.checks.on_disk.items()
    pending = [r for (kind, _), r in records if kind == "goal" and r.state == "pending"]
    return f"goals are pending: {pending}" if pending else ""


def _actors(simulation: Simulation) -> str:
    roles = [process.role for process in simulation.world.processes.values()]
    if len(controllers(simulation)) != 1 or roles.count("proxy") != len(simulation.hosts):
        return f"there are {sorted(roles)}"
    return ""


def _replicas(simulation: Simulation) -> str:
    wanted = set()
    alive = {tag_of(p): p for p in simulation.replicas()}
    for tag, record in _records(simulation, "backend").items():
        if record.deleting:
            return f"backend {tag} is still there"
        count = 0 if record.failure else record.newest.config["num_replicas"]
        if len(record.replicas) != count or len(record.releases) > 1:
            return f"backend {tag} has {record.replicas}, {record.releases}, and wants {count}"
        wanted |= set(record.replicas)
        for replica in record.replicas:
            if wrong := _wrong_with(alive.get(replica), record):
                return f"{replica} {wrong}"
    if len(simulation.replicas()) != len(wanted) or set(alive) != wanted:
        return f"{sorted(alive)} live, and {sorted(wanted)} should"
    return ""


def _wrong_with(process: Any, record: Any) -> str:
    if process is None:
        return "is not there"
    actor = process.actor
    if actor.state != "running":
        return f"is {actor.state}"
    code, queries, release = actor.user_code, actor.queries, record.newest
    callers = queries.callers.values()
    found = {
        "code": (code.digest, release.code_digest),
        "user_config": (code.user_config, release.config["user_config"]),
        "limit": (queries.limit, release.config["max_ongoing_requests"]),
        "running queries": (queries.running, 0),
        "known queries": (len(queries.runs), 0),
        "open streams": (sum(len(each.streams) for each in callers), 0),
        "uses by callers": (sum(each.uses for each in callers), len(queries.leases)),
        "undelivered answers": (queries.undelivered, 0),
    }
    wrong = [
        f"{what} {has}, not {should}" for what, (has, should) in found.items() if has != should
    ]
    return f"has {', '.join(wrong)}" if wrong else ""


def _tables(simulation: Simulation) -> str:
    endpoints, backends = _records(simulation, "endpoint"), _records(simulation, "backend")
    shares = {n: (dict(r.traffic), dict(r.shadows), r.route) for n, r in endpoints.items()}
    replicas = {tag: sorted(record.replicas) for tag, record in backends.items()}
    for process in simulation.proxies():
        router = simulation.routers.get(process.pid)
        if router is None:
            return f"{process} has not begun"
        held = {n: (dict(t.traffic), dict(t.shadows), t.route) for n, t in router.endpoints.items()}
        if held != shares:
            return f"{process} holds endpoints {held}, and there are {shares}"
        found = {tag: sorted(r.tag for r in t.replicas) for tag, t in router.backends.items()}
        if found != replicas:
            return f"{process} holds backends {found}, and there are {replicas}"
    return ""


def _queries(simulation: Simulation) -> str:
    for caller in simulation.callers:
        if caller is None:
            return "a caller is to be started"
        if not caller.caller.is_idle:
            return f"{caller.process} waits for {simulation.checks.queries.unanswered()}"
    if unread := simulation.checks.queries.unread():
        return f"streams are read: {unread}"
    for process in simulation.proxies():
        router = simulation.routers[process.pid]
        if left := busy(router.state):
            return f"{process} has queries: {left}"
        if left := {tag: count for tag, count in ongoing(router).items() if count}:
            return f"{process} has given away queries: {left}"
    return ""


def _records(simulation: Simulation, kind: str) -> dict[str, Any]:
    return {n: record for (k, n), record in simulation.checks.on_disk.items() if k == kind}
