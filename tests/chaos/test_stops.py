"""SIGSTOP of every process of a system, while 32 connections send GETs: what hangs is replaced.

A stopped process is killed after LIMIT_S. If it is continued before, everything is as it was.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time

import pytest

from greenroom.actors.host import launcher as system
from greenroom.actors.runtime.liveness import silent_among
from greenroom.actors.runtime.processes import identify
from tests.support.kills import (
    CONVERGED_WITHIN_S,
    assert_nothing_leaked,
    converged,
    first,
    system_to_kill,
    under_load,
)
from tests.support.load import GetLoad
from tests.support.systems import RunningSystem, alive, wait_until

# Up to five attempts, each after the front has run for a while again.
pytestmark = pytest.mark.timeout(400)

LIMIT_S = 3.0
KILLED_WITHIN_S = LIMIT_S + 2.0  # beats and looks come once a second
BY_ITSELF = {
    "what proxies watch": ("replica", "http worker"),
    "proxy": ("proxy",),
    "controller and master": ("controller", "http master"),
    "admin": ("thespian admin",),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    with system_to_kill(folder, GREENROOM_SILENCE_TIMEOUT_S=str(LIMIT_S)) as started:
        yield started


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # as it should be, for a SIGCONT
            os.kill(pid, number)


def stop(running: RunningSystem, roles: tuple[str, ...]) -> float:
    """Stop processes; continue them once they have been replaced; return when they were killed."""
    pids = [first(running, role) for role in roles]
    stopped_at = time.monotonic()
    send(pids, signal.SIGSTOP)
    wait_until(lambda: not any(map(alive, pids)), KILLED_WITHIN_S, f"the end of {pids}")
    killed_s = time.monotonic() - stopped_at
    wait_until(lambda: converged(running), CONVERGED_WITHIN_S, "all as before")
    send(pids, signal.SIGCONT)
    return killed_s


@pytest.mark.parametrize(
    "roles",
    [
        pytest.param(roles, id=name, marks=() if roles == ("proxy",) else pytest.mark.slow)
        for name, roles in BY_ITSELF.items()
    ],
)
def test_what_stands_still_is_replaced_and_costs_no_response(running, in_use, roles):
    # Only of one: the others have the mark slow, and run beside what computes.
    within_s = KILLED_WITHIN_S if roles == BY_ITSELF["proxy"] else math.inf
    for tally in under_load(running, f"{roles} stopped", lambda: stop(running, roles), within_s):
        failures = tally.failures
        if "http worker" in roles:  # its own connections are cut, each at most once
            assert not [what for _, _, what in failures if what.isdigit()], tally.summary()
            connections = [number for _, number, _ in failures]
            assert len(connections) == len(set(connections))
        else:
            assert not failures, tally.summary()
    assert_nothing_leaked(running, in_use)


@pytest.mark.slow
def test_a_host_process_that_stands_still_is_ended_and_start_takes_over(running):
    host = running.pid_of("host")
    process = identify(host)
    assert process is not None
    before = {pid for role, pid in running.pids() if role != "host"}
    with GetLoad(running.settings.http.port) as load:
        wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
        os.kill(host, signal.SIGSTOP)
        wait_until(lambda: silent_among({process: "host"}) or not alive(host), 5, "it is silent")
        assert system.start(running.settings)  # it waits for the end of the other
        tally = load.stop()
    assert not alive(host)
    assert not tally.failures, tally.summary()
    wait_until(lambda: converged(running), CONVERGED_WITHIN_S, "all as before")
    assert {pid for role, pid in running.pids() if role != "host"} == before


@pytest.mark.slow
def test_nothing_is_killed_where_everything_stood_still(running):
    before = sorted(running.pids())
    pids = [pid for _, pid in before]
    with GetLoad(running.settings.http.port) as load:
        wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
        send(pids, signal.SIGSTOP)
        time.sleep(KILLED_WITHIN_S)  # the point of the test: longer than any may be silent
        send(pids, signal.SIGCONT)
        enough = load.tally.ok + 300
        wait_until(lambda: load.tally.ok > enough, 15, "load after the stop")
        time.sleep(LIMIT_S)  # nor is any killed later
        tally = load.stop()
    assert sorted(running.pids()) == before
    assert not tally.failures, tally.summary()


@pytest.mark.slow
def test_a_stop_that_ends_in_time_changes_nothing(running):
    """A controller that stood still for less than the limit goes on where it was."""
    before = sorted(running.pids())
    controller = running.pid_of("controller")
    os.kill(controller, signal.SIGSTOP)
    time.sleep(LIMIT_S / 3)  # the point of the test: less than it may be silent
    os.kill(controller, signal.SIGCONT)
    assert sorted(running.pids()) == before
    wait_until(lambda: converged(running), CONVERGED_WITHIN_S, "all as before")
    time.sleep(LIMIT_S)  # nor is it killed later
    assert sorted(running.pids()) == before
