"""How long hosts take to join, to be missed, to be replaced and to be reconciled.

`python -m benchmarks.hosts --rounds 10`, as root: each host is a network namespace with its own
system, around a switch in a process (tests/support/switch.py). 32 connections send GETs to each of
two hosts that survive; the third is killed, or cut off and healed, in turn. Times are as the
controller's status tells them, asked for every 50 ms by a client that stays connected. Those of a
leader that is stopped are from the return of `greenroom stop` on, which first replaces what runs
there. All of it takes some eight minutes; `--parts` leaves some out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.options import positive, run_main
from benchmarks.report import machine, table
from tests.support.cluster import Cluster, ClusterHost, cluster_of, read_status

APP = """
from greenroom import serve

@serve.deployment(num_replicas=3, max_ongoing_requests=64)
class Echo:
    async def __call__(self, request):
        return "hello"

app = Echo.bind()
"""
BACKEND = "default#Echo"
DEADLINE_S = 60.0
LINK_DELAYS_MS = (0, 1, 10)


def wait_for(
    environ: dict[str, str], condition: Callable[[dict[str, Any], Any], bool], argument: Any
) -> float:
    """Wait for a condition on the status; return the time since the epoch. Called on a host."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition(status := read_status(environ), argument):
        if time.monotonic() > deadline:
            raise AssertionError(f"not in time: {condition.__name__}({argument!r}): {status}")
        time.sleep(0.05)
    return time.time()


def has_state(status: dict[str, Any], wanted: tuple[str, str]) -> bool:
    """Tell whether a host is in a state."""
    name, state = wanted
    return any((h["name"], h["state"]) == (name, state) for h in status["hosts"])


def is_whole(status: dict[str, Any], without: str | None) -> bool:
    """Tell whether three replicas run, and nothing else is there, not on this host."""
    replicas = status["backends"][BACKEND]["replicas"]
    counted = [r for r in replicas if r["state"] != "LOST"]
    hosts = [r["host"] for r in counted]
    return [r["state"] for r in counted] == ["RUNNING"] * 3 and without not in hosts


class Rounds:
    """One cluster, and what was measured on it."""

    def __init__(self, cluster: Cluster) -> None:
        self.a, self.b, self.c = cluster.hosts
        self.watcher = self.c.another()
        self.seconds: dict[str, list[float]] = {}
        self.failed: dict[str, int] = {}

    def note(self, what: str, begun: float, ended: float, failed: int) -> None:
        """Keep one measurement."""
        self.seconds.setdefault(what, []).append(ended - begun)
        self.failed[what] = self.failed.get(what, 0) + failed

    def wait(self, condition: Callable[[dict[str, Any], Any], bool], argument: Any) -> float:
        """Wait on the host that watches."""
        return float(self.watcher.call(wait_for, self.c.environ, condition, argument))

    def join(self) -> None:
        """Have the third host join again, which counts when it has beaten for a second."""
        begun = time.time()
        self.b.start()
        joined = time.time()
        self.note("start, until its front answers", begun, joined, 0)
        self.note("start, until it counts again", begun, self.wait(has_state, ("b", "RUNNING")), 0)

    def lose(self, what: str, end: Callable[[], None]) -> None:
        """Lose the third host under load, and see when that is noticed and made good."""
        with self.a.load() as end_at_a, self.c.load() as end_at_c:
            begun = time.time()
            end()
            noticed = self.wait(has_state, ("b", "LOST"))
            replaced = self.wait(is_whole, "b")
            failed = len(end_at_a().failures) + len(end_at_c().failures)
        self.note(f"{what}: noticed", begun, noticed, failed)
        self.note(f"{what}: replaced", begun, replaced, failed)

    def heal(self) -> None:
        """Heal the cut link under load."""
        with self.a.load() as end_at_a, self.c.load() as end_at_c:
            begun = time.time()
            self.b.heal()
            back = self.wait(has_state, ("b", "RUNNING"))
            whole = self.wait(is_whole, None)
            failed = len(end_at_a().failures) + len(end_at_c().failures)
        self.note("healed: back", begun, back, failed)
        self.note("healed: reconciled", begun, whole, failed)

    def run(self, rounds: int) -> None:
        """Do all of it some times."""
        for _ in range(rounds):
            self.lose("link cut", self.b.cut)
            self.heal()
            self.a.check("rebalance")
            self.lose("host killed", self.b.crash)
            self.b.reboot()
            self.join()
            self.a.check("rebalance")

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table."""
        return [
            (what, f"{statistics.median(s):.2f}", f"{max(s):.2f}", str(self.failed[what]))
            for what, s in self.seconds.items()
        ]


def is_led_by(status: dict[str, Any], name: str) -> bool:
    """Tell which host the controller is on."""
    return bool(status["controller"]["host"] == name)


def take_over(cluster: Cluster, rounds: int) -> list[tuple[str, ...]]:
    """Kill and stop the host that leads, of two that may; see when the other does, and at what."""
    times: dict[str, list[float]] = {}
    failed: dict[str, int] = {}
    leader, other, witness = cluster.hosts
    watcher = witness.another()
    ends: dict[str, Callable[[ClusterHost], Any]] = {
        "leader killed": lambda host: host.crash(),
        "leader stopped": lambda host: host.check("stop"),
    }
    for what, end in list(ends.items()) * rounds:
        with other.load() as end_at_other, witness.load() as end_at_witness:
            begun = time.time()
            end(leader)
            begun = time.time() if what == "leader stopped" else begun
            leads = watcher.call(wait_for, witness.environ, is_led_by, other.label)
            whole = watcher.call(wait_for, witness.environ, is_whole, leader.label)
            count = len(end_at_other().failures) + len(end_at_witness().failures)
        for row, ended in ((f"{what}: another leads", leads), (f"{what}: replaced", whole)):
            times.setdefault(row, []).append(max(ended - begun, 0.0))
            failed[row] = failed.get(row, 0) + count
        if what == "leader killed":
            leader.reboot()
        leader.start()
        watcher.call(wait_for, witness.environ, has_state, (leader.label, "RUNNING"))
        leader, other = other, leader
    return [
        (row, f"{statistics.median(each):.2f}", f"{max(each):.2f}", str(failed[row]))
        for row, each in times.items()
    ]


def idle_bytes(cluster: Cluster, seconds: float) -> float:
    """Return how many bytes per second pass between hosts that do nothing."""
    before = sum(cluster.switch("counted"))
    time.sleep(seconds)
    return (sum(cluster.switch("counted")) - before) / 2 / seconds  # each counts at two ports


def starts(cluster: Cluster, rounds: int) -> list[tuple[str, ...]]:
    """Return how long hosts take to start, in turn by themselves and joining others that run."""
    host = cluster.hosts[-1]
    alone = {"GREENROOM_STATE_DIR": str(cluster.folder / "alone")}
    times: dict[str, list[float]] = {"start by itself": [], "start that joins": []}
    for _ in range(rounds):
        host.check("stop")
        begun = time.monotonic()
        host.check("start", "--bind", host.address, **alone)
        times["start by itself"].append(time.monotonic() - begun)
        host.check("destroy", "--yes", **alone)
        begun = time.monotonic()
        host.start()
        times["start that joins"].append(time.monotonic() - begun)
    return [
        (what, f"{statistics.median(each):.2f}", f"{max(each):.2f}") for what, each in times.items()
    ]


def far_latency(near: ClusterHost, far: ClusterHost, rounds: int) -> list[tuple[str, ...]]:
    """Return the time of a GET by link delay, at the host with the replica and at another one.

    Each round has 100 GETs of either, in turn, and counts as its median.
    """
    rows = []
    for delay_ms in LINK_DELAYS_MS:
        far.link(sent={"delay_s": delay_ms / 1000}, received={"delay_s": delay_ms / 1000})
        far.call(time_gets, 20)
        medians = [
            (_median_ms(near.call(time_gets, 100)), _median_ms(far.call(time_gets, 100)))
            for _ in range(rounds)
        ]
        here, there = (statistics.median(each) for each in zip(*medians, strict=True))
        added = [far_ms - near_ms for near_ms, far_ms in medians]
        shown = (here, there, statistics.median(added), max(added))
        rows.append((f"{delay_ms} ms each way", *(f"{each:.2f}" for each in shown)))
    far.heal()
    return rows


def _median_ms(times: list[float]) -> float:
    return statistics.median(times) * 1000


def time_gets(count: int) -> list[float]:
    """Return how long GETs over one connection take. Called on a host."""
    import http.client  # noqa: PLC0415

    connection = http.client.HTTPConnection("127.0.0.1", 8000)
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        connection.request("GET", "/")
        connection.getresponse().read()
        times.append(time.perf_counter() - begun)
    return times


def main() -> int:
    """Measure, and print."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    options.add_argument("--rounds", type=positive, default=10)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    given = options.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder, cluster_of(3, Path(folder)) as cluster:
        cluster.start()
        for part in given.parts:
            PARTS[part](cluster, given.rounds)
    return 0


def measure_losses(cluster: Cluster, rounds: int) -> None:
    """Lose a host and have it back, again and again."""
    cluster.deploy(APP)
    measured = Rounds(cluster)
    measured.run(rounds)
    print(table(("", "median s", "worst s", "failed responses"), measured.rows()), flush=True)


def measure_takeovers(_: Cluster, rounds: int) -> None:
    """Lose hosts that lead, again and again."""
    with tempfile.TemporaryDirectory() as folder, cluster_of(3, Path(folder), leaders=2) as led:
        led.start()
        led.deploy(APP)
        rows = take_over(led, rounds)
    print(table(("", "median s", "worst s", "failed responses"), rows), flush=True)


def measure_starts(cluster: Cluster, rounds: int) -> None:
    """Start a host, by itself and joining."""
    print(table(("", "median s", "worst s"), starts(cluster, rounds)), flush=True)


def measure_latency(cluster: Cluster, rounds: int) -> None:
    """Ask a host that has no replica."""
    cluster.deploy(APP.replace("num_replicas=3", "num_replicas=1"))
    (place,) = cluster.hosts[0].replicas(BACKEND).values()
    near = next(host for host in cluster.hosts if host.label == place)
    far = next(host for host in cluster.hosts if host is not near)
    heads = ("GET, ms", "own replica", "another host's", "added", "worst added")
    print(table(heads, far_latency(near, far, rounds)), flush=True)


def measure_idle(_: Cluster, rounds: int) -> None:
    """Count what passes between five hosts that do nothing."""
    with tempfile.TemporaryDirectory() as folder, cluster_of(5, Path(folder)) as five:
        five.start()
        five.deploy(APP)
        counted = [idle_bytes(five, 3) / 1000 for _ in range(rounds)]
    shown = f"{statistics.median(counted):.1f}", f"{max(counted):.1f}"
    print(table(("five idle hosts", "median kB/s", "worst"), [("all together", *shown)]))


PARTS: dict[str, Callable[[Cluster, int], None]] = {
    "losses": measure_losses,
    "takeovers": measure_takeovers,
    "starts": measure_starts,
    "latency": measure_latency,
    "idle": measure_idle,
}


if __name__ == "__main__":
    run_main(main)
