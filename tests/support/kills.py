"""Systems to kill processes of, under load, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from greenroom import serve
from greenroom.actors.host.front import STABLE_S
from greenroom.actors.runtime.processes import parent_pid
from greenroom.core.errors import GreenroomError
from tests.support import footprint, policies
from tests.support.load import GetLoad, Tally
from tests.support.systems import RunningSystem, alive, running_system, wait_until
from tests.support.timing import check_within

WORKERS = 2
REPLICAS = len(policies.BACKENDS)
ONCE = ("host", "http master", "thespian admin", "controller", "proxy")
CONVERGED_WITHIN_S = 15
SETTLED_ROLES = sorted([*ONCE, *["http worker"] * WORKERS, *["replica"] * REPLICAS])


@contextlib.contextmanager
def system_to_kill(folder: Path, **environ: str) -> Iterator[RunningSystem]:
    """Start a system with two workers, a split, a compared shadow, and a rollout under way."""
    environ = {"GREENROOM_HTTP_WORKERS": str(WORKERS), **environ}
    with running_system(folder / "state", **environ) as started:
        policies.put_in_force(serve.Client(started.connection, started.settings))
        wait_until(lambda: converged(started), CONVERGED_WITHIN_S, "the rollout's first step")
        yield started


def converged(running: RunningSystem) -> bool:
    """Return whether exactly the processes run that should, and status agrees.

    Workers of a dead HTTP master serve until those of the next one do, so they are not enough.
    """
    pids = running.pids()
    if sorted(role for role, _ in pids) != SETTLED_ROLES:
        return False
    (master,) = [pid for role, pid in pids if role == "http master"]
    if any(parent_pid(pid) != master for role, pid in pids if role == "http worker"):
        return False
    try:
        status = running.status()
    except (GreenroomError, TimeoutError):
        return False
    backends = status["backends"].values()
    replicas = [r["pid"] for b in backends for r in b["replicas"] if r["state"] == "RUNNING"]
    recorded = [pid for role, pid in pids if role == "replica"]
    return sorted(replicas) == sorted(recorded) and policies.are_in_force(status)


def kill(*pids: int) -> None:
    """SIGKILL the processes at once, and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it went with another that was killed
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)), 5, f"the end of {pids}")


def first(running: RunningSystem, role: str) -> int:
    """Return the pid of a process of a role."""
    return min(pid for each, pid in running.pids() if each == role)


def under_load(
    running: RunningSystem,
    what: str,
    harm: Callable[[], float | None],
    within_s: float = math.inf,
    pause_s: float = 0.02,
) -> list[Tally]:
    """Do harm under load, and again where that took too long; return the loads' tallies.

    Once in a few times all is as before, and was never without an answer, within ``within_s``: see
    :func:`check_within`. Where ``harm`` returns how long something took, that counts instead of
    the time until all is as before.
    """
    tallies: list[Tally] = []
    back_at = 0.0

    def attempt() -> float:
        nonlocal back_at
        if tallies:  # what dies soon after its start is started again later
            settled = lambda: time.monotonic() - back_at > STABLE_S  # noqa: E731
            wait_until(settled, 2 * STABLE_S, "it has run for a while")
        wait_until(lambda: converged(running), CONVERGED_WITHIN_S, "all as it should be")
        with GetLoad(running.settings.http.port, pause_s=pause_s) as load:
            wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
            harmed_at = time.monotonic()
            took_s = harm()
            wait_until(lambda: converged(running), CONVERGED_WITHIN_S, f"all as before {what}")
            back_at = time.monotonic()
            back_s = back_at - harmed_at
            enough = load.tally.ok + 300
            wait_until(lambda: load.tally.ok > enough, 15, f"load after {what}")
            tallies.append(load.stop())
        print(f"{what}: {took_s or 0:.2f} s, back in {back_s:.2f} s; {tallies[-1].summary()}")
        return max(took_s or back_s, tallies[-1].longest_gap_s)

    check_within(within_s, attempt)
    return tallies


def footprint_in_use(running: RunningSystem) -> dict[str, int]:
    """Return how many descriptors each role has once every worker and replica is in use."""
    wait_until(lambda: converged(running), CONVERGED_WITHIN_S, "all as it should be")
    with GetLoad(running.settings.http.port, pause_s=0.0) as load:
        wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
    return footprint.descriptors(running)


def leaks(running: RunningSystem, before: dict[str, int]) -> dict[str, Any]:
    """Return what the system has that it should not, by kind; ``before``: footprint_in_use."""
    found: dict[str, Any] = {
        "processes without a record": footprint.unrecorded(running),
        "run records without a process": footprint.stale_records(running),
        "listening sockets in several processes": footprint.shared_listeners(running),
        "more descriptors": footprint.grown(before, footprint.descriptors(running)),
    }
    return {kind: left for kind, left in found.items() if left}


def assert_nothing_leaked(running: RunningSystem, before: dict[str, int]) -> None:
    """Wait until the system has settled and has nothing that it should not have."""
    wait_until(lambda: converged(running), CONVERGED_WITHIN_S, "all as it should be")
    try:
        wait_until(lambda: not leaks(running, before), 5, "nothing leaked")
    except AssertionError as error:
        found = leaks(running, before)
        seen = footprint.listed(running, found.get("more descriptors", ()))
        raise AssertionError(f"{error}: {found}\n{seen}") from None
