"""What many real hosts and replicas cost the controller, and how long it takes to lose many hosts.

`python -m benchmarks.scale_hosts`, as root: each host is a network namespace with its own system,
around a switch in a process (tests/support/switch.py). All but the first host join at once. Then
replicas are deployed, a third of the hosts is killed at once and started again, and at last the
leader is killed. Four connections send GETs to a host that survives; the status is asked for every
50 ms.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.hosts import is_led_by, wait_for
from benchmarks.options import positive, run_main
from benchmarks.report import machine
from benchmarks.scale_system import controller_pid, cpu_ms
from greenroom.actors.runtime.settings import read_settings
from tests.support.cluster import Cluster, ClusterHost, cluster_of

APP = """
from greenroom import serve

@serve.deployment(num_replicas={replicas})
class Echo:
    async def __call__(self, request):
        return "hello"

app = Echo.bind()
"""
BACKEND = "default#Echo"
LEADERS = 3  # so many hosts may lead
REST_S = 10.0


def controller_cpu_ms(environ: dict[str, str]) -> float:
    """Return what the controller has run for. Called on its host."""
    return cpu_ms(controller_pid(read_settings(environ)))


def have_state(status: dict[str, Any], wanted: tuple[list[str], str]) -> bool:
    """Tell whether all of these hosts are in a state."""
    names, state = wanted
    states = {host["name"]: host["state"] for host in status["hosts"]}
    return all(states.get(name) == state for name in names)


def is_whole(status: dict[str, Any], wanted: tuple[int, list[str]]) -> bool:
    """Tell whether so many replicas run, none of them on these hosts."""
    count, gone = wanted
    shown = status["backends"].get(BACKEND, {"replicas": ()})["replicas"]
    hosts = [each["host"] for each in shown if each["state"] == "RUNNING"]
    return len(hosts) == count and not set(hosts) & set(gone)


def say(what: str, value: float, unit: str = "s") -> None:
    """Print one figure."""
    print(f"{what}: {value:.2f} {unit}", flush=True)


def start_all(hosts: Iterable[ClusterHost]) -> list[float]:
    """Start hosts at once; return how long each took."""

    def start(host: ClusterHost) -> float:
        begun = time.monotonic()
        host.start()
        return time.monotonic() - begun

    hosts = list(hosts)
    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(start, hosts))


class Figures:
    """One cluster, and what is measured on it."""

    def __init__(self, cluster: Cluster, replicas: int) -> None:
        self.cluster, self.replicas = cluster, replicas
        self.first, *self.others = cluster.hosts
        self.witness = cluster.hosts[LEADERS - 1]  # one that survives all of it
        self.watcher = self.witness.another()

    def wait(self, condition: Any, argument: Any) -> float:
        """Wait for a condition on the status; return when it held."""
        return float(self.watcher.call(wait_for, self.witness.environ, condition, argument))

    def join(self) -> None:
        """Start all hosts but the first at once."""
        self.first.start()
        used = self.first.call(controller_cpu_ms, self.first.environ)
        begun = time.time()
        times = start_all(self.others)
        names = [host.label for host in self.cluster.hosts]
        say("join, median host", statistics.median(times))
        say("join, last host", max(times))
        say("join, all RUNNING", self.wait(have_state, (names, "RUNNING")) - begun)
        used = self.first.call(controller_cpu_ms, self.first.environ) - used
        say("join, the controller's CPU for each host", used / len(self.others), "ms")

    def deploy(self) -> None:
        """Deploy, and measure the controller at rest."""
        begun = time.time()
        self.cluster.deploy(APP.format(replicas=self.replicas))
        say(f"{self.replicas} replicas run", self.wait(is_whole, (self.replicas, [])) - begun)
        used = self.first.call(controller_cpu_ms, self.first.environ)
        time.sleep(REST_S)  # what is measured is what is spent meanwhile
        used = self.first.call(controller_cpu_ms, self.first.environ) - used
        say("at rest, the controller's CPU in a second", used / REST_S, "ms")

    def lose(self, what: str, lost: list[ClusterHost]) -> None:
        """Kill hosts at once, under load."""
        names = [host.label for host in lost]
        with self.witness.load(connections=4, pause_s=0.02) as end_load:
            begun = time.time()
            with ThreadPoolExecutor(len(lost)) as pool:
                list(pool.map(ClusterHost.crash, lost))
            if self.first in lost:
                leaders = [host.label for host in self.cluster.hosts[1:LEADERS]]
                say(f"{what}: another leads", self.wait(is_led_by_any, leaders) - begun)
            say(f"{what}: noticed", self.wait(have_state, (names, "LOST")) - begun)
            say(f"{what}: replaced", self.wait(is_whole, (self.replicas, names)) - begun)
            print(f"{what}: GETs: {end_load().summary()}", flush=True)


def is_led_by_any(status: dict[str, Any], names: list[str]) -> bool:
    """Tell whether one of these hosts leads."""
    return any(is_led_by(status, name) for name in names)


def measure(hosts: int, replicas: int) -> None:
    """Measure a cluster of this size, and print."""
    print(f"--- {hosts} hosts, {replicas} replicas; {machine()}", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster_of(hosts, Path(folder), leaders=LEADERS) as cluster,
    ):
        figures = Figures(cluster, replicas)
        figures.join()
        figures.deploy()
        third = cluster.hosts[LEADERS:][: max(hosts // 3, 1)]
        figures.lose(f"{len(third)} hosts killed", third)
        for host in third:
            host.reboot()
        say(f"{len(third)} hosts join again, the last", max(start_all(third)))
        figures.lose("leader killed", [figures.first])


def main() -> int:
    """Measure, and print."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.scale_hosts", description=__doc__)
    options.add_argument("--hosts", type=positive, default=15)
    options.add_argument("--replicas", type=positive, nargs="+", default=[60])
    given = options.parse_args()
    if not LEADERS < given.hosts <= 26:
        options.error(f"argument --hosts: {given.hosts}: must be {LEADERS + 1} to 26")
    for replicas in given.replicas:
        measure(given.hosts, replicas)
    return 0


if __name__ == "__main__":
    run_main(main)
