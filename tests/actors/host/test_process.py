"""The host process: starts that are interrupted, and what is left of dead processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from greenroom import serve
from greenroom.actors.host import launcher, process
from greenroom.actors.runtime.records import HOST_ROLE, RunRecords, is_ready
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.errors import StartError
from tests.actors.conftest import deploy
from tests.support.systems import RunningSystem, alive, running_system, wait_until


def test_folders_that_nobody_needs_are_removed_on_a_thread(tmp_path, monkeypatch):
    """On the loop of the host process, a slow disk would have it taken for dead."""
    on: list[threading.Thread] = []
    pruned = lambda _settings: on.append(threading.current_thread())  # noqa: E731
    monkeypatch.setattr(process, "_prune_folders", pruned)
    settings = read_settings({}, state_dir=str(tmp_path))
    nothing: Any = SimpleNamespace(tidy=lambda: None, end=lambda *_: ())
    host: Any = SimpleNamespace(
        _records=RunRecords(tmp_path),
        _settings=settings,
        _ends=nothing,
    )
    asyncio.run(process.Host._tidy(host))
    assert len(on) == 1
    assert on[0] is not threading.current_thread()


def test_what_is_done_again_and_again_goes_on_after_an_error(caplog):
    done = asyncio.Event()

    async def work() -> None:
        if not caplog.messages:
            raise OSError("a read-only disk")
        done.set()

    async def do() -> None:
        working = asyncio.ensure_future(process.every(0.001, work, "it cannot be done"))
        await asyncio.wait_for(done.wait(), 20)
        working.cancel()

    asyncio.run(do())
    assert caplog.messages == ["it cannot be done"]


def test_a_stop_that_is_asked_for_while_a_host_starts_over_waits_for_its_next_program(
    tmp_path, monkeypatch
):
    stop_wanted, pending = asyncio.Event(), []
    records: Any = SimpleNamespace(kill=lambda **_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(process, "show_title", lambda _title: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(os, "execv", lambda *_: pending.extend(signal.sigpending()))
    before = signal.signal(signal.SIGTERM, lambda *_: stop_wanted.set())
    lock_fd = os.open(tmp_path, os.O_RDONLY)
    try:
        process.start_over(records, None, lock_fd, stop_wanted)  # returns, for once
        signal.sigtimedwait(process.STOPS, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, process.STOPS)
        signal.signal(signal.SIGTERM, before)
        os.close(lock_fd)
    assert pending == [signal.SIGTERM]


def starting(monkeypatch: pytest.MonkeyPatch, lacks: list[tuple[str, float]]) -> list[str]:
    """Start a host that lacks one thing after the other for so long; return what it tells."""
    clock = [0.0]
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    left = [name for name, seconds in lacks for _ in range(int(seconds))]

    async def lack() -> str:
        clock[0] += 1.0
        return left.pop(0) if left else ""

    async def answers() -> bool:
        return True

    nothing = lambda *_, **__: None  # noqa: E731
    host: Any = SimpleNamespace(
        _settings=read_settings({}),
        _port=SimpleNamespace(loop=SimpleNamespace(keep_beating=nothing), answers=answers),
        _grpc=SimpleNamespace(is_wanted=False),
        _membership=SimpleNamespace(begin=nothing),
        _lacks=lack,
        _check_progress=nothing,
        _supervise=nothing,
        _report=nothing,
    )
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv("GREENROOM_READY_FD", str(write_fd))
    try:
        asyncio.run(process.Host.start(host, starts_over=False))
    finally:
        os.close(write_fd)
        with open(read_fd) as told:
            lines = told.read().splitlines()
    return lines


def test_a_slow_start_goes_on_while_one_thing_after_the_other_is_there(monkeypatch):
    lacks = [("the workers", 20.0), ("the controller", 20.0), ("nothing", 1.0), ("tables", 20.0)]
    told = starting(monkeypatch, lacks)
    assert told == [f"waiting for {each}" for each in ("the workers", "the controller", "tables")]


def test_a_start_fails_after_too_long_with_what_it_waits_for(monkeypatch):
    lacks = [("the workers", 10.0), ("the controller", 10.0), ("the workers", 20.0)]
    with pytest.raises(StartError, match=r"healthz .*: after 37 s this host still waits for the w"):
        starting(monkeypatch, lacks)


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """Begin a start; yield what waits for it, what it shows, and where its host process speaks."""
    monkeypatch.setattr(launcher, "START_TIMEOUT_S", 3.0)
    says: list[int] = []
    launch = lambda *_, keep, **__: says.append(os.dup(keep[0]))  # noqa: E731
    monkeypatch.setattr(launcher.forking, "launch", launch)
    shown: list[str] = []
    wait = launcher.begin(read_settings({}, state_dir=str(tmp_path)), on_progress=shown.append)
    with open(says[0], "w", buffering=1) as line:
        yield wait, shown, line


def test_a_starter_waits_while_there_is_progress_and_shows_it(begun):
    wait, shown, line = begun
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait)
        for number in range(4):
            time.sleep(0.8)
            print(f"waiting for {number}", file=line)
        print("ready", file=line)
        assert waiting.result(20) is True
    assert shown[1:] == [f"waiting for {number}" for number in range(4)]


def test_a_starter_that_hears_nothing_more_says_what_the_start_waits_for(begun, monkeypatch):
    wait, _, line = begun
    monkeypatch.setattr(launcher, "START_TIMEOUT_S", 0.2)
    print("waiting for the disk", file=line)
    with pytest.raises(StartError, match=r"no progress within 0\.2 s, waiting for the disk; see"):
        wait()


class InterruptedEvent(asyncio.Event):
    """Is set by a signal when a waiter has seen that it is not, and is not known to wait yet."""

    async def wait(self) -> Literal[True]:
        self.set()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


def test_a_stop_that_is_asked_for_as_the_host_process_begins_to_wait_for_it_is_heard(monkeypatch):
    monkeypatch.setattr(process, "reap_children", lambda: None)
    stopped = []

    async def stop() -> None:
        stopped.append(True)

    async def run() -> None:
        host: Any = SimpleNamespace(_stop_wanted=InterruptedEvent(), _stop=stop)
        await asyncio.wait_for(process.Host.run(host), 20)

    asyncio.run(run())
    assert stopped


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_start_whose_starter_ends_comes_up_whole(tmp_path, number):
    running = RunningSystem(tmp_path / "state")
    records = RunRecords(running.settings.run_dir)
    starter = subprocess.Popen(
        [sys.executable, "-m", "greenroom.serve.cli.main", "start"],
        env={**os.environ, **running.environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: records.with_role(HOST_ROLE), 10, "a host process")
        starter.send_signal(number)
        starter.wait()
        (host,) = records.with_role(HOST_ROLE)
        wait_until(lambda: is_ready(host), 10, "the system is up")
        wait_until(lambda: not running.greenroom("status").returncode, 10, "all is healthy")
        assert records.with_role(HOST_ROLE) == [host]
    finally:
        starter.kill()
        starter.wait()
        running.stop()


class Starter:
    def popen(self) -> int:
        self.child = subprocess.Popen(["sleep", "600"])
        return self.child.pid

    def fork(self) -> int:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid


def test_processes_that_a_replica_started_end_with_it(running, deployed, name):
    handle = deployed(serve.deployment(Starter).bind())
    pids = [handle.popen.remote().result(10), handle.fork.remote().result(10)]
    assert all(map(alive, pids))
    with running.as_default():
        serve.delete(name)
    wait_until(lambda: not any(map(alive, pids)), 5, "what the replica started ends")


def test_what_a_killed_replica_started_ends_with_the_system(tmp_path):
    with running_system(tmp_path / "state") as running:
        handle = deploy(running, serve.deployment(Starter).bind())
        pids = [handle.popen.remote().result(10), handle.fork.remote().result(10)]
        (replica,) = running.replica_pids()
        os.kill(replica, signal.SIGKILL)
        wait_until(lambda: not alive(replica), 5, "the end of the replica")
    wait_until(lambda: not any(map(alive, pids)), 5, "what the replica started ends")
