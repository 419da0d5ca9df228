"""The host process: starts that are interrupted, and what is left of dead processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.host import process
from greenroom.actors.runtime.records import HOST_ROLE, RunRecords, is_ready
from greenroom.actors.runtime.settings import read_settings
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
