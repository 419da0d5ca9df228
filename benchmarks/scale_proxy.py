"""A real proxy's cost of taking a change, in the world of the simulator."""

from __future__ import annotations

import statistics
import time
from typing import Any

from greenroom.actors.messages import control as cm
from greenroom.actors.proxy.proxy import Proxy
from greenroom.core.routing.tables import BackendTable, EndpointTable, ReplicaTable
from tests.simulation.processes import Manager, replaced
from tests.simulation.simulation import Simulation


def proxy_updates(backends: int, rounds: int) -> dict[str, float]:
    """Return what the first tables and then single changes cost a proxy, in ms of CPU time."""
    simulation = Simulation(0)
    world = simulation.world
    with replaced(simulation):
        process = simulation.spawn("proxy")
        simulation.checks.recorded.add(process.identity.incarnation)  # as a controller would have
        actor = Proxy()
        address = world.listen(process, actor.receiveMessage)
        actor._myRef = Manager(simulation, process, address)
        replicas = []
        for number in range(backends):
            replica = simulation.spawn("replica")
            at = world.listen(replica, lambda _message, _sender: None)
            table = ReplicaTable(tag=f"b{number}#0", address=at, process=replica.identity)
            replicas.append(table)

        def take(snapshots: dict[str, Any], upto: int) -> float:
            changed = cm.Changed(
                controller=process.identity, snapshots=snapshots, upto=upto, complete=upto == 1
            )
            began = time.thread_time()
            world.run_as(process, lambda: actor.receiveMessage(changed, address))
            return (time.thread_time() - began) * 1e3

        everything: dict[str, Any] = {}
        for number in range(backends):
            everything[f"backend/b{number}"] = (1, _backend(number, replicas[number], -1))
            everything[f"endpoint/e{number}"] = (1, _endpoint(number, number))
        first = take(everything, 1)
        endpoint = [take({"endpoint/e0": (i, _endpoint(0, i % 2))}, i) for i in _ids(2, rounds)]
        backend = [
            take({"backend/b0": (i, _backend(0, replicas[0], i))}, i)
            for i in _ids(2 + rounds, rounds)
        ]
    return {
        "a proxy's first tables": first,
        "a proxy's update of an endpoint": statistics.median(endpoint),
        "a proxy's update of a backend": statistics.median(backend),
    }


def _ids(first: int, count: int) -> range:
    return range(first, first + count)


def _backend(number: int, replica: ReplicaTable, max_queued: int) -> BackendTable:
    return BackendTable(tag=f"b{number}", replicas=(replica,), max_queued_requests=max_queued)


def _endpoint(number: int, backend: int) -> EndpointTable:
    return EndpointTable(name=f"e{number}", route=f"/r{number}", traffic={f"b{backend}": 1.0})
