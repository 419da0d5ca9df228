"""Systems to kill processes of, under load, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from greenroom import serve
from greenroom.core.errors import GreenroomError
from tests.support import footprint, policies
from tests.support.load import GetLoad, Tally
from tests.support.systems import (
    PATIENCE,
    RunningSystem,
    alive,
    running_system,
    wait_until,
)

WORKERS = 2
REPLICAS = len(policies.BACKENDS)
ONCE = ("host", "http master", "thespian admin", "thespian logger", "controller", "proxy")
SETTLED_WITHIN_S = 15
SETTLED_ROLES = sorted([*ONCE, *["http worker"] * WORKERS, *["replica"] * REPLICAS])


@contextlib.contextmanager
def system_to_kill(folder: Path, **environ: str) -> Iterator[RunningSystem]:
    """Have a system with two workers, a split, a shadow that is compared, and a rollout."""
    environ = {"GREENROOM_HTTP_WORKERS": str(WORKERS), **environ}
    with running_system(folder / "state", **environ) as started:
        policies.put_in_force(serve.Client(started.connection, started.settings))
        wait_until(lambda: settled(started), SETTLED_WITHIN_S, "the rollout's first step")
        yield started


def settled(running: RunningSystem) -> bool:
    """Tell whether exactly the processes that there should be run, and status agrees."""
    if sorted(role for role, _ in running.pids()) != SETTLED_ROLES:
        return False
    try:
        status = running.status()
    except (GreenroomError, TimeoutError):
        return False
    backends = status["backends"].values()
    replicas = [r["pid"] for b in backends for r in b["replicas"] if r["state"] == "RUNNING"]
    recorded = [pid for role, pid in running.pids() if role == "replica"]
    return sorted(replicas) == sorted(recorded) and policies.are_in_force(status)


def kill(*pids: int) -> None:
    """SIGKILL the processes at once, and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it went with another that was killed
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)), 5, f"the end of {pids}")


def kill_under_load(
    running: RunningSystem, what: str, choose: Callable[[], int], back_within_s: float
) -> Tally:
    """Kill one process under load; return the tally once everything is as before.

    That, and answers, must be had again ``back_within_s`` after the kill, and on a machine that
    does other things too within PATIENCE times that; benchmarks.survival measures it.
    """
    with GetLoad(running.settings.http.port) as load:
        wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
        pid = choose()
        killed_at = time.monotonic()
        kill(pid)
        wait_until(lambda: settled(running), SETTLED_WITHIN_S, f"all as before the death of {what}")
        back_s = time.monotonic() - killed_at
        enough = load.tally.ok + 300
        wait_until(lambda: load.tally.ok > enough, 15, "load after the kill")
        tally = load.stop()
    print(f"{what}: back in {back_s:.2f} s; {tally.summary()}")
    assert tally.longest_gap_s < PATIENCE * back_within_s
    assert back_s < PATIENCE * back_within_s
    return tally


def footprint_in_use(running: RunningSystem) -> dict[str, int]:
    """Return how many descriptors each role has once every worker and replica is in use."""
    wait_until(lambda: settled(running), SETTLED_WITHIN_S, "all as it should be")
    with GetLoad(running.settings.http.port) as load:
        wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
    return footprint.descriptors(running)


def assert_nothing_leaked(running: RunningSystem, before: dict[str, int]) -> None:
    """Check processes, records, sockets and, against :func:`footprint_in_use`, descriptors."""
    wait_until(lambda: settled(running), SETTLED_WITHIN_S, "all as it should be")
    wait_until(
        lambda: not footprint.unrecorded(running),
        5,
        f"no process without a record: {footprint.unrecorded(running)}",
    )
    for left in (footprint.stale_records, footprint.shared_listeners):
        wait_until(lambda left=left: not left(running), 5, f"{left.__name__}: {left(running)}")
    wait_until(
        lambda: not footprint.grown(before, footprint.descriptors(running)),
        5,
        f"descriptors as before: {footprint.grown(before, footprint.descriptors(running))}",
    )
