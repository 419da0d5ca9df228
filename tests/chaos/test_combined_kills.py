"""SIGKILL of several processes at once: what heals by itself, and what `greenroom start` heals."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator

import pytest

from greenroom.actors.host import launcher as system
from greenroom.actors.runtime.processes import is_alive
from greenroom.actors.runtime.records import records_of
from tests.support import footprint
from tests.support.kept import Kept
from tests.support.kills import (
    CONVERGED_WITHIN_S,
    REPLICAS,
    SETTLED_ROLES,
    assert_nothing_leaked,
    converged,
    footprint_in_use,
    kill,
    system_to_kill,
    under_load,
)
from tests.support.load import GetLoad
from tests.support.systems import RunningSystem, wait_until
from tests.support.timing import check_within

pytestmark = pytest.mark.timeout(400)  # up to five attempts

HEALS_WITHIN_S = 10.0
GAP_S = 1.0  # without an answer, of all connections, where what serves heals itself
HEALS_BY_ITSELF = {
    "proxy and controller": ("proxy", "controller"),  # the next two adopt replicas
    "what the admin starts": ("controller", "proxy", "replica"),
    "http master and admin": ("http master", "thespian admin"),
    "all actors": ("controller", "proxy", "replica", "thespian admin"),
}
NEEDS_A_START = {
    "host process and controller": ("host", "controller"),
    "host process, proxy and all replicas": ("host", "proxy", "replica"),
    "host process, admin and http master": ("host", "thespian admin", "http master"),
}


Lent = tuple[RunningSystem, dict[str, int]]  # with what each role has, before any kill


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """One system for all; its end checks that stopping it leaves nothing."""

    @contextlib.contextmanager
    def make() -> Iterator[Lent]:
        with system_to_kill(tmp_path_factory.mktemp("combined")) as started:
            yield started, footprint_in_use(started)
        wait_until(lambda: not footprint.pids_of(started), 5, "the end of all processes")
        assert not list(started.settings.run_dir.glob("*.json"))

    kept = Kept(make, restore)
    yield kept
    kept.end()


def restore(lent: Lent) -> None:
    running, _ = lent
    if not running.pids():
        running.start()  # a test has stopped it
    wait_until(lambda: converged(running), CONVERGED_WITHIN_S, "all as it was")


@pytest.fixture
def lent(request, kept):
    with kept.lent(request) as lent:
        yield lent


@pytest.fixture
def running(lent):
    return lent[0]


@pytest.fixture
def before(lent):
    return lent[1]


def kill_roles(running: RunningSystem, roles: tuple[str, ...]) -> None:
    kill(*(pid for role, pid in running.pids() if role in roles))


def wait_until_healed(running: RunningSystem) -> None:
    wait_until(lambda: converged(running), HEALS_WITHIN_S, "all as before")


@pytest.mark.parametrize(
    "roles",
    [
        pytest.param(roles, id=name, marks=() if name == "all actors" else pytest.mark.slow)
        for name, roles in HEALS_BY_ITSELF.items()
    ],
)
def test_a_system_heals_by_itself_and_loses_no_response(running, before, roles):
    def harm() -> None:
        kill_roles(running, roles)
        wait_until_healed(running)

    (tally,) = under_load(running, f"{roles} died", harm)
    assert not tally.failures, tally.summary()
    assert_nothing_leaked(running, before)


@pytest.mark.slow
@pytest.mark.parametrize("roles", NEEDS_A_START.values(), ids=NEEDS_A_START.keys())
def test_a_system_without_its_host_process_is_healed_by_a_start(running, before, roles):
    kill_roles(running, roles)
    begun = time.monotonic()
    assert system.start(running.settings)
    print(f"{roles}: started in {time.monotonic() - begun:.2f} s")
    assert running.get() == (200, b"hello")
    assert_nothing_leaked(running, before)


@pytest.mark.slow
@pytest.mark.parametrize("others", [("http master",), ("proxy", "controller")])
def test_requests_are_served_without_the_host_process_too(running, before, others):
    """What HTTP needs, workers and proxies bring back themselves; ``start`` takes over the rest."""

    def attempt() -> float:
        with GetLoad(running.settings.http.port) as load:
            wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
            kill_roles(running, ("host", *others))
            wait_until(lambda: "controller" in roles_of(running), HEALS_WITHIN_S, "a controller")
            enough = load.tally.ok + 300
            wait_until(lambda: load.tally.ok > enough, HEALS_WITHIN_S, "load after the kills")
            output = running.greenroom("status")
            assert output.returncode == 1
            if "controller" in others:  # which has heard of no host process yet
                assert "no host has reported" in output.stdout
            else:
                assert "its host process does not run" in output.stdout
            if "http master" in others:
                assert "its HTTP front does not run" in output.stdout
            assert system.start(running.settings)
            wait_until(lambda: converged(running), CONVERGED_WITHIN_S, "all as before")
            tally = load.stop()
        print(f"host and {others}: {tally.summary()}")
        assert not tally.failures, tally.summary()
        return tally.longest_gap_s

    check_within(GAP_S, attempt)
    assert_nothing_leaked(running, before)


def roles_of(running: RunningSystem) -> set[str]:
    return {role for role, _ in running.pids()}


@pytest.mark.slow
def test_stop_ends_a_system_whose_records_are_gone(running):
    kill_roles(running, ("replica",))
    remove = ["rm", "-rf", str(running.settings.run_dir)]  # where records come and go meanwhile
    wait_until(lambda: subprocess.run(remove, check=False).returncode == 0, 5, "no records")
    running.disconnect()
    found = records_of(running.settings).found()
    assert len(found) >= len(SETTLED_ROLES) - REPLICAS
    output = running.greenroom("stop")
    assert output.returncode == 0, output.stderr
    assert "stopped" in output.stdout
    assert not [process for process in found if is_alive(process)]
    assert not records_of(running.settings).found()


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05])
def test_replicas_that_were_being_made_when_the_admin_died_are_not_left_behind(
    running, before, delay_s
):
    kill_roles(running, ("replica",))
    time.sleep(delay_s)  # the point of the test
    kill_roles(running, ("thespian admin",))
    wait_until(lambda: converged(running), CONVERGED_WITHIN_S, "all as before")
    assert_nothing_leaked(running, before)
    records = records_of(running.settings)
    wait_until(lambda: len(records.found()) == len(SETTLED_ROLES), 5, "none but those on record")


@pytest.mark.slow
def test_a_system_without_its_host_process_is_stopped_by_a_stop(running):
    kill_roles(running, ("host", "thespian admin", "http master"))
    running.stop()
    wait_until(lambda: not footprint.pids_of(running), 5, "the end of all processes")
    assert not list(running.settings.run_dir.glob("*.json"))


@pytest.mark.slow
def test_deaths_while_a_system_starts_over_do_not_end_it(running):
    """The host process starts over for the death of the admin, and again for each next one."""
    host = running.pid_of("host")

    def harm() -> None:
        for role in ("thespian admin", "http master", "thespian admin", "thespian admin"):
            pids = wait_until(
                lambda r=role: [pid for each, pid in running.pids() if each == r],
                HEALS_WITHIN_S,
                f"another {role}",
            )
            kill(*pids)
        wait_until_healed(running)

    (tally,) = under_load(running, "deaths in a row", harm)
    assert not tally.failures, tally.summary()
    assert running.pid_of("host") == host
