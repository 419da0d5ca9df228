"""SIGKILL of every process of a system, in turn, while 32 connections send GETs.

Each test prints what it saw; ``pytest -s`` shows it. The times are those of docs/architecture.md.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from greenroom import serve
from greenroom.actors.host import launcher as system
from tests.support.kills import (
    CONVERGED_WITHIN_S,
    assert_nothing_leaked,
    converged,
    first,
    kill,
    system_to_kill,
    under_load,
)
from tests.support.load import GetLoad
from tests.support.systems import RunningSystem, wait_until

# Up to five attempts, each after the front has run for a while again.
pytestmark = pytest.mark.timeout(400)

BACK_WITHIN_S = {
    "replica": 1.0,
    "controller": 2.0,
    "proxy": 2.0,
    "http master": 0.5,  # "no pause": what clients see counts, and another starts in twice that
    "thespian admin": 5.0,
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    with system_to_kill(tmp_path_factory.mktemp("kills")) as started:
        yield started


@pytest.fixture
def leak_free(running, in_use):
    """Check that this test and those before left nothing over."""
    yield
    assert_nothing_leaked(running, in_use)


def kill_any(running: RunningSystem, role: str) -> float | None:
    """Kill one; return how long that took where what it did goes on without it."""
    begun_at = time.monotonic()
    kill(first(running, role))
    return time.monotonic() - begun_at if role == "http master" else None


@pytest.mark.parametrize("role", BACK_WITHIN_S)
@pytest.mark.usefixtures("leak_free")
def test_a_killed_process_costs_no_response(running, role):
    before = dict(running.pids())
    for tally in under_load(
        running, role, lambda: kill_any(running, role), BACK_WITHIN_S[role], pause_s=0.005
    ):
        assert not tally.failures, tally.summary()
    if role != "thespian admin":  # its actors are started anew
        lost = {each for each, pid in before.items() if (each, pid) not in running.pids()}
        assert lost <= {role, "http worker"}


@pytest.mark.usefixtures("leak_free")
def test_a_killed_proxy_costs_no_pause_where_callers_have_leases(running):
    client = serve.Client(running.connection, running.settings)
    client.create_endpoint("plain", backend="v1", route="/plain")  # which needs no decisions
    with GetLoad(running.settings.http.port, "/plain", connections=4, pause_s=0.0) as load:
        wait_until(lambda: load.tally.ok > 2_000, 15, "load on its way, and leases with it")
        admin = running.pid_of("thespian admin")  # without it nobody makes another proxy
        os.kill(admin, signal.SIGSTOP)
        try:
            os.kill(first(running, "proxy"), signal.SIGKILL)
            enough = load.tally.ok + 20
            wait_until(lambda: load.tally.ok > enough, 1, "answers without a proxy")
        finally:
            os.kill(admin, signal.SIGCONT)
        wait_until(lambda: converged(running), CONVERGED_WITHIN_S, "all as before")
    client.delete_endpoint("plain")
    assert not load.tally.failures, load.tally.summary()


@pytest.mark.usefixtures("leak_free")
def test_a_killed_worker_costs_only_its_own_connections(running):
    for tally in under_load(
        running, "http worker", lambda: kill_any(running, "http worker"), 1.0, pause_s=0.0
    ):
        # Its connections are cut, each at most once; no answer of another worker is an error.
        assert not [what for _, _, what in tally.failures if what.isdigit()]
        connections = [number for _, number, _ in tally.failures]
        assert len(connections) == len(set(connections))


def test_a_killed_host_process_costs_nothing_and_start_takes_over(running):
    before = {pid for role, pid in running.pids() if role != "host"}
    with GetLoad(running.settings.http.port) as load:
        wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
        kill(running.pid_of("host"))
        assert system.start(running.settings)
        tally = load.stop()
    print(f"host: {tally.summary()}")
    assert not tally.failures, tally.summary()
    wait_until(lambda: converged(running), CONVERGED_WITHIN_S, "all as before")
    assert {pid for role, pid in running.pids() if role != "host"} == before


@pytest.mark.slow
def test_what_dies_after_a_take_over_is_restarted(running):
    """The new host process is not the parent of what it took over."""
    kill(running.pid_of("host"))
    assert system.start(running.settings)
    for role in BACK_WITHIN_S:  # the last one's end is that of all others, too
        (tally,) = under_load(running, f"{role}, after", lambda r=role: kill_any(running, r))
        assert not tally.failures, tally.summary()
