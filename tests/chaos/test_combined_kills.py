"""SIGKILL of several processes at once: what heals by itself, and what `greenroom start` heals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from greenroom.actors import system
from tests.support import footprint
from tests.support.kept import Kept
from tests.support.kills import (
    SETTLED_WITHIN_S,
    assert_nothing_leaked,
    footprint_in_use,
    kill,
    settled,
    system_to_kill,
)
from tests.support.load import GetLoad
from tests.support.systems import RunningSystem, wait_until

HEALS_WITHIN_S = 10.0
HEALS_BY_ITSELF = {
    "admin and proxy": ("thespian admin", "proxy"),
    "logger and admin": ("thespian logger", "thespian admin"),
    "controller and all replicas": ("controller", "replica"),
    "proxy and controller": ("proxy", "controller"),
    "all replicas and the proxy": ("replica", "proxy"),
    "http master and admin": ("http master", "thespian admin"),
    "all actors": ("controller", "proxy", "replica", "thespian admin", "thespian logger"),
}
NEEDS_A_START = {
    "host process and admin": ("host", "thespian admin"),
    "host process and logger": ("host", "thespian logger"),
    "host process and http master": ("host", "http master"),
    "host process and controller": ("host", "controller"),
    "host process, proxy and all replicas": ("host", "proxy", "replica"),
    "host process, admin, logger and http master": (
        "host",
        "thespian admin",
        "thespian logger",
        "http master",
    ),
}


Lent = tuple[RunningSystem, dict[str, int]]  # with what each role has, before any kill


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept[Lent]]:
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
    wait_until(lambda: settled(running), SETTLED_WITHIN_S, "all as it was")


@pytest.fixture
def lent(request: pytest.FixtureRequest, kept: Kept[Lent]) -> Iterator[Lent]:
    with kept.lent(request) as lent:
        yield lent


@pytest.fixture
def running(lent: Lent) -> RunningSystem:
    return lent[0]


@pytest.fixture
def before(lent: Lent) -> dict[str, int]:
    return lent[1]


def kill_roles(running: RunningSystem, roles: tuple[str, ...]) -> None:
    kill(*(pid for role, pid in running.pids() if role in roles))


@pytest.mark.parametrize("roles", HEALS_BY_ITSELF.values(), ids=HEALS_BY_ITSELF.keys())
def test_a_system_heals_by_itself_and_loses_no_response(
    running: RunningSystem, before: dict[str, int], roles: tuple[str, ...]
) -> None:
    with GetLoad(running.settings.http.port) as load:
        wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
        killed_at = time.monotonic()
        kill_roles(running, roles)
        wait_until(lambda: settled(running), HEALS_WITHIN_S, "all as before")
        back_s = time.monotonic() - killed_at
        enough = load.tally.ok + 300
        wait_until(lambda: load.tally.ok > enough, 15, "load after the kills")
        tally = load.stop()
    print(f"{roles}: back in {back_s:.2f} s; {tally.summary()}")
    assert not tally.failures, tally.summary()
    assert_nothing_leaked(running, before)


@pytest.mark.parametrize("roles", NEEDS_A_START.values(), ids=NEEDS_A_START.keys())
def test_a_system_without_its_host_process_is_healed_by_a_start(
    running: RunningSystem, before: dict[str, int], roles: tuple[str, ...]
) -> None:
    kill_roles(running, roles)
    begun = time.monotonic()
    assert system.start(running.settings)
    print(f"{roles}: started in {time.monotonic() - begun:.2f} s")
    assert running.get() == (200, b"hello")
    assert_nothing_leaked(running, before)


@pytest.mark.parametrize("roles", NEEDS_A_START.values(), ids=NEEDS_A_START.keys())
def test_a_system_without_its_host_process_is_stopped_by_a_stop(
    running: RunningSystem, roles: tuple[str, ...]
) -> None:
    kill_roles(running, roles)
    running.stop()
    wait_until(lambda: not footprint.pids_of(running), 5, "the end of all processes")
    assert not list(running.settings.run_dir.glob("*.json"))


def test_a_port_that_was_taken_when_the_front_died_is_waited_for(running: RunningSystem) -> None:
    kill(running.pid_of("host"))
    assert system.start(running.settings)  # this one does not have the listening socket
    host = running.pid_of("host")
    os.kill(host, signal.SIGSTOP)
    kill(*(pid for role, pid in running.pids() if role in {"http master", "http worker"}))
    log = running.settings.logs_dir / "host.log"
    said = log.read_text().count("trying again")
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # some connections linger
        taker.bind(("127.0.0.1", running.settings.http.port))
        taker.listen()
        os.kill(host, signal.SIGCONT)
        wait_until(
            lambda: log.read_text().count("trying again") > said, HEALS_WITHIN_S, "a word on it"
        )
    wait_until(lambda: settled(running), HEALS_WITHIN_S, "a front again")
    assert running.pid_of("host") == host
    assert running.get() == (200, b"hello")


def test_deaths_while_a_system_starts_over_do_not_end_it(running: RunningSystem) -> None:
    """The host process starts over for the death of the admin, and again for each next one."""
    host = running.pid_of("host")
    with GetLoad(running.settings.http.port) as load:
        wait_until(lambda: load.tally.ok > 300, 15, "load on its way")
        for role in ("thespian admin", "http master", "thespian admin", "thespian admin"):
            pids = wait_until(
                lambda r=role: [pid for each, pid in running.pids() if each == r],
                HEALS_WITHIN_S,
                f"another {role}",
            )
            kill(*pids)
        wait_until(lambda: settled(running), HEALS_WITHIN_S, "all as before")
        enough = load.tally.ok + 300
        wait_until(lambda: load.tally.ok > enough, 15, "load after the kills")
        tally = load.stop()
    print(f"deaths in a row: {tally.summary()}")
    assert not tally.failures, tally.summary()
    assert running.pid_of("host") == host
