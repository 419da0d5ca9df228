"""SIGKILL of every process of a system, in turn, while 32 connections send GETs.

Each test prints what it saw; ``pytest -s`` shows it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.load import GetLoad, Tally
from tests.support.systems import RunningSystem, alive, running_system, wait_until
from understudy import serve
from understudy.actors import system
from understudy.core.errors import UnderstudyError

ROUNDS = 3
WORKERS = 2
REPLICAS = 2
ONCE = ("host", "http master", "thespian admin", "thespian logger", "controller", "proxy")
SETTLED_ROLES = sorted([*ONCE, *["http worker"] * WORKERS, *["replica"] * REPLICAS])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """A system with two workers and two replicas of one deployment."""
    state_dir = tmp_path_factory.mktemp("kills") / "state"
    with running_system(state_dir, UNDERSTUDY_HTTP_WORKERS=str(WORKERS)) as started:

        @serve.deployment(num_replicas=REPLICAS)
        class Hello:
            async def __call__(self, _request: object) -> str:
                return "hello"

        started.deploy(Hello.bind())
        yield started


def settled(running: RunningSystem) -> bool:
    """Tell whether exactly the processes that there should be run, and status agrees."""
    if sorted(role for role, _ in running.pids()) != SETTLED_ROLES:
        return False
    try:
        deployments = running.status()["applications"]["default"]["deployments"]
    except (UnderstudyError, TimeoutError):
        return False
    replicas = [r["pid"] for d in deployments.values() for r in d["replicas"]]
    recorded = [pid for role, pid in running.pids() if role == "replica"]
    return None not in replicas and sorted(replicas) == sorted(recorded)


def kill_under_load(
    running: RunningSystem, what: str, choose: Callable[[], int], back_within_s: float
) -> Tally:
    """Kill one process under load; return the tally once everything is as before."""
    with GetLoad(running.settings.http.port) as load:
        wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
        pid = choose()
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), 5, f"the end of {what}")
        wait_until(lambda: settled(running), 20, f"all as before the death of {what}")
        back_s = time.monotonic() - killed_at
        enough = load.tally.ok + 300
        wait_until(lambda: load.tally.ok > enough, 15, "load after the kill")
        tally = load.stop()
    print(f"{what}: back in {back_s:.2f} s; {tally.summary()}")
    assert tally.longest_gap_s < back_within_s
    return tally


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_killed_replica_costs_no_response(running: RunningSystem, number: int) -> None:
    victims = sorted(running.replica_pids())
    tally = kill_under_load(running, "a replica", lambda: victims[number % REPLICAS], 1.0)
    assert not tally.failures


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_killed_controller_costs_no_response(running: RunningSystem, number: int) -> None:
    tally = kill_under_load(
        running, f"the controller ({number})", lambda: running.pid_of("controller"), 2.0
    )
    assert not tally.failures


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_killed_worker_costs_only_its_own_connections(
    running: RunningSystem, number: int
) -> None:
    def choose() -> int:
        return sorted(pid for role, pid in running.pids() if role == "http worker")[number % 2]

    tally = kill_under_load(running, "a gunicorn worker", choose, 1.0)
    # Its connections are cut, each at most once; no answer of another worker is an error.
    assert not [what for _, _, what in tally.failures if what.isdigit()]
    connections = [number for _, number, _ in tally.failures]
    assert len(connections) == len(set(connections))


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_killed_gunicorn_master_is_replaced(running: RunningSystem, number: int) -> None:
    tally = kill_under_load(
        running, f"the gunicorn master ({number})", lambda: running.pid_of("http master"), 2.0
    )
    assert not [what for _, _, what in tally.failures if what.isdigit()]


@pytest.mark.parametrize("role", ["proxy", "thespian logger", "thespian admin"])
def test_a_host_serves_again_after_the_actor_system_is_hurt(
    running: RunningSystem, role: str
) -> None:
    kill_under_load(running, role, lambda: running.pid_of(role), 10.0)


def test_a_killed_host_process_costs_nothing_and_start_takes_over(running: RunningSystem) -> None:
    before = {pid for role, pid in running.pids() if role != "host"}
    with GetLoad(running.settings.http.port) as load:
        wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
        pid = running.pid_of("host")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), 5, "the end of the host process")
        assert system.start(running.settings)
        tally = load.stop()
    print(f"the host process: {tally.summary()}")
    assert not tally.failures
    wait_until(lambda: settled(running), 10, "all as before")
    assert {pid for role, pid in running.pids() if role != "host"} == before


def test_what_dies_after_a_take_over_is_restarted(running: RunningSystem, tmp_path: Path) -> None:
    """The new host process is not the parent of what it took over."""
    for role in ("http master", "controller", "proxy"):
        kill_under_load(running, f"{role}, after a take-over", lambda r=role: running.pid_of(r), 10)
