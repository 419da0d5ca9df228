"""What many hosts do when they all start, when the leader goes, and when a third of them does.

The real controller, proxies and host processes in the simulator of tests/simulation, where nothing
goes wrong but this: ``python -m benchmarks.scale_simulated --hosts 10 100 300 1000``. Two or three
hosts may lead. Seconds are the world's: nine of ten messages take 0.1 to 2 ms, and a turn takes
none, whatever it costs. So the CPU time of the busiest controller's turns is reported too, with
what the simulator does in them, and without the transport: above the seconds, a real cluster is
later.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from greenroom.core import operations as ops
from greenroom.core.config import BackendConfig
from tests.simulation.clients import Client, Script
from tests.simulation.faults import CALM
from tests.simulation.hosts import LEADERS
from tests.simulation.rest import tag_of
from tests.simulation.scripted_code import PLAIN
from tests.simulation.shared_disk import SharedDisk
from tests.simulation.simulation import Simulation
from tests.simulation.world import SimProcess

SIZES = (10, 100, 300)
REPLICAS = 30
STEP_S = 0.25
PATIENCE_S = 120.0
DEPLOYMENT = "c0d"  # as the checks expect of the first client


class Operator(Client):
    """Deploys the replicas."""

    def _work(self) -> Script:
        config = BackendConfig(num_replicas=REPLICAS, health_check_period_s=10.0)
        spec = ops.DeploymentSpec(name=DEPLOYMENT, code=PLAIN, code_hash="1", config=config)
        reply = yield ops.Deploy(spec=spec, route_prefix="/wide")
        yield ops.WaitForGoal(goal_id=reply.value)


class ManyHosts(Simulation):
    """One run; ``there`` are the hosts that are to take part."""

    def __init__(self, hosts: int) -> None:
        super().__init__(1, hosts, LEADERS)
        self.faults.rate = CALM
        self.quiet = True
        self.there = set(range(hosts))
        self.messages = 0
        self.cpu_s: Counter[int] = Counter()  # by the controller's pid
        self._nested: list[float] = []  # CPU seconds of turns within the present one
        self._send, self._turn = self.world.send, self.world.turn
        self.world.send = self._count
        self.world.turn = self._time

    def _count(self, *message: Any) -> None:
        self.messages += 1
        self._send(*message)

    def _time(self, process: SimProcess) -> None:
        began = time.thread_time()
        self._nested.append(0.0)
        self._turn(process)
        seconds = time.thread_time() - began
        own = seconds - self._nested.pop()
        if self._nested:
            self._nested[-1] += seconds
        if process.role == "controller":
            self.cpu_s[process.pid] += own

    def _run(self) -> None:
        self.measure("all hosts start", self._start, self._joined)
        self.measure("a deployment of 30 replicas", self._deploy, self._serves)
        self.measure("a second of rest", lambda: None, self._rests())
        self.measure("the leader's host is lost", self._lose_leader, self._serves)
        self.measure("it is back", self._come_back, self._is_back)
        self.measure("a third is lost", self._lose_third, self._serves)
        self.measure("it is back", self._come_back, self._is_back)

    def measure(self, what: str, event: Callable[[], object], is_over: Callable[[], bool]) -> None:
        """Print what comes of an event."""
        began, messages, wall = self.world.now, self.messages, time.perf_counter()
        self.cpu_s.clear()
        event()
        while not is_over():
            self.world.run(self.world.now + STEP_S)
            self.checks.expect(self.world.now < began + PATIENCE_S, f"{what}: does not end")
        cpu_s = max(self.cpu_s.values(), default=0.0)
        print(
            f"| {self.size} | {what} | {self.world.now - began:.2f} | {self.messages - messages} "
            f"| {cpu_s:.2f} | {time.perf_counter() - wall:.0f} |",
            flush=True,
        )

    # --- Events -----------------------------------------------------------------------------------

    def _start(self) -> None:
        self.admins += [None] * self.size
        self.hosts += [None] * self.size
        for number in range(self.size):
            self.start_host(number)

    def _deploy(self) -> None:
        self.clients.append(Operator(self, 0))

    def _rests(self) -> Callable[[], bool]:
        until = self.world.now + 1.0
        return lambda: self.world.now >= until

    def _lose_leader(self) -> None:
        self._lose({self._leading()[0].host})

    def _lose_third(self) -> None:
        others = (self._leading()[0].host + 1) % 3
        self._lose(set(range(others, self.size, 3)))

    def _lose(self, lost: set[int]) -> None:
        """Cut hosts off and end all of their processes; those that start anew reach nothing."""
        self.there = set(range(self.size)) - lost
        ways = {(one, other) for one in lost for other in self.there}
        self.world.links.cut(ways | {way[::-1] for way in ways})
        self._reach().update(lost)
        for host in lost:
            self.faults.of_hosts.trouble(host, PATIENCE_S)
            self.faults.crash(host)

    def _come_back(self) -> None:
        self.there = set(range(self.size))
        self._reach().clear()
        self.world.links.heal_all()

    def _reach(self) -> set[int]:
        assert isinstance(self.disk, SharedDisk)
        return self.disk.out_of_reach

    # --- What has come about ----------------------------------------------------------------------

    def _leading(self) -> list[SimProcess]:
        there = self.world.processes.values()
        return [p for p in there if p.role == "controller" and p.actor and p.actor.active]

    def _joined(self) -> bool:
        """Return whether the controller has all hosts, and all proxies listen to it."""
        hosts = sum(kind == "host" for kind, _ in self.checks.on_disk)
        return hosts == self.size and self._all_know(set())

    def _serves(self) -> bool:
        """Return whether as many replicas as wanted run, and the proxies have just these."""
        replicas = {tag_of(p) for p in self.replicas() if p.host in self.there}
        is_done = len(replicas) == REPLICAS and self.clients[0].done
        return is_done and self._all_know(replicas)

    def _is_back(self) -> bool:
        """Return whether, besides, nothing is left of the replicas that were lost."""
        recorded = self.checks.on_disk["backend", DEPLOYMENT].replicas
        return len(recorded) == len(self.replicas()) == REPLICAS and self._serves()

    def _all_know(self, replicas: set[str]) -> bool:
        """Return whether one controller leads, and all proxies that are there know these."""
        proxies = [p for p in self.proxies() if p.host in self.there]
        if len(self._leading()) != 1 or len(proxies) < len(self.there):
            return False
        for process in proxies:
            router = self.routers.get(process.pid)
            if router is None or not process.actor.dispatcher.ready:
                return False
            table = router.backends.get(DEPLOYMENT)
            if replicas != (set() if table is None else {each.tag for each in table.replicas}):
                return False
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=SIZES)
    gc.disable()
    print("| hosts | what | seconds | messages | controller's CPU s | seconds of this program |")
    print("|--:|---|--:|--:|--:|--:|")
    for hosts in parser.parse_args().hosts:
        ManyHosts(hosts).run()


if __name__ == "__main__":
    main()
