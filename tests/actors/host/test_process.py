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
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from greenroom import serve
from greenroom.actors.host import launcher, process
from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.records import ADMIN_ROLE, HOST_ROLE, RunRecords, is_ready
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.errors import StartError
from greenroom.persistence.locations import location_at
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
    stop_wanted, pending = process.Stop(), []
    stop_wanted.forgets = True
    records: Any = SimpleNamespace(kill=lambda **_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(process, "show_title", lambda _title: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def execv(*_: Any) -> None:
        pending.extend(signal.sigpending())
        signal.sigtimedwait(process.STOPS, 0)
        raise OSError("no memory")

    monkeypatch.setattr(os, "execv", execv)
    before = signal.signal(signal.SIGTERM, lambda *_: stop_wanted.set())
    lock_fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="no memory"):
            process.start_over(records, None, lock_fd, stop_wanted)
        assert not blocked() & set(process.STOPS), "this program goes on"
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, process.STOPS)
        signal.signal(signal.SIGTERM, before)
        os.close(lock_fd)
    assert pending == [signal.SIGTERM]
    assert os.environ["GREENROOM_HOST_FORGETS"], "what it is to forget, the next program forgets"


def blocked() -> set[int]:
    """Return the signals that this thread blocks."""
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_no_thread_of_the_host_process_takes_a_stop_from_its_next_program():
    loop = process.loop_of_host()
    try:
        assert loop.run_until_complete(loop.run_in_executor(None, blocked)) >= set(process.STOPS)
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    assert not blocked() & set(process.STOPS)


def test_a_host_process_that_cannot_become_a_new_one_tries_again(monkeypatch, caplog):
    tries = []

    def start_over(*_: Any) -> None:
        tries.append(True)
        if len(tries) < 3:
            raise OSError("no memory")
        raise asyncio.CancelledError

    async def end() -> None:
        """What is supervised has ended."""

    monkeypatch.setattr(process, "start_over", start_over)
    nothing: Any = SimpleNamespace(
        _trouble_with_disk=lambda: "", _records=None, _front=None, _lock_fd=0, _stop_wanted=None
    )
    monkeypatch.setattr(process, "RETRY_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(process.Host._then_start_over(nothing, end()))
    assert caplog.messages == ["the host process cannot become a new one yet: no memory"] * 2


class Starting:
    """Starts a host that lacks one thing after the other for so long; keeps what it tells."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, lacks: list[tuple[str, float]], admin_s: float = 0.0
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.told: list[str] = []
        monkeypatch.setattr(process, "tell_starter", self.told.append)
        self.done: list[str] = []
        self.stop = process.Stop()
        self.stop_at = float("inf")
        self._left = [name for name, seconds in lacks for _ in range(int(seconds))]
        self._admin_s = admin_s
        self._monkeypatch = monkeypatch

    async def _lack(self) -> str:
        self._pass()
        return self._left.pop(0) if self._left else ""

    async def _answers(self) -> bool:
        if self.now < self._admin_s:
            self._pass()
        return self.now >= self._admin_s

    def _pass(self) -> None:
        self.now += 1.0
        if self.now >= self.stop_at:
            self.stop.set()

    def run(self, *, starts_over: bool = False) -> None:
        nothing = lambda *_, **__: None  # noqa: E731
        host: Any = SimpleNamespace(
            _settings=read_settings({}),
            _port=SimpleNamespace(
                loop=SimpleNamespace(keep_beating=nothing), answers=self._answers
            ),
            _grpc=SimpleNamespace(is_wanted=False),
            _membership=SimpleNamespace(begin=lambda: self.done.append(f"begin {self._mask()}")),
            _stop_wanted=self.stop,
            _lacks=self._lack,
            _check_progress=nothing,
            _supervise=lambda: self.done.append("supervise"),
            _report=nothing,
        )
        for name in ("_wait_while", "_lacks_admin"):
            setattr(host, name, partial(getattr(process.Host, name), host))
        asyncio.run(process.Host.start(host, starts_over=starts_over))

    def _mask(self) -> str:
        return "without stops" if blocked() >= set(process.STOPS) else "with stops"


def test_a_slow_start_goes_on_while_one_thing_after_the_other_is_there(monkeypatch):
    lacks = [("the workers", 20.0), ("the controller", 20.0), ("tables", 20.0)]
    start = Starting(monkeypatch, lacks, admin_s=20.0)
    start.run()
    admin = "an answer of the actor system's admin (logs/host.log)"
    assert start.told == [admin, "the workers", "the controller", "tables"]
    assert start.done == ["begin without stops", "supervise"]


def test_a_start_fails_after_too_long_with_what_it_waits_for(monkeypatch):
    lacks = [("the workers", 10.0), ("the controller", 10.0), ("the workers", 20.0)]
    with pytest.raises(StartError, match=r"^after 37 s this host still waits for the workers$"):
        Starting(monkeypatch, lacks).run()


def test_a_start_whose_admin_does_not_answer_fails_with_that(monkeypatch):
    with pytest.raises(StartError, match=r"still waits for an answer of the actor system's admin"):
        Starting(monkeypatch, [], admin_s=60.0).run()


@pytest.mark.parametrize("starts_over", [False, True])
@pytest.mark.parametrize("admin_s", [0.0, 60.0])
def test_a_stop_is_heard_during_a_start_that_makes_no_progress(monkeypatch, starts_over, admin_s):
    start = Starting(monkeypatch, [("the workers", 60.0)], admin_s)
    start.stop_at = 10.0
    start.run(starts_over=starts_over)
    assert start.now <= 13.0
    assert start.done.count("supervise") == starts_over, "no process is started any more"


def test_a_start_that_makes_progress_is_finished_before_a_stop(monkeypatch):
    """So that replicas that run already drain."""
    start = Starting(monkeypatch, [(str(number), 1.0) for number in range(9)])
    start.stop_at = 1.0
    start.run()
    assert start.told == [str(number) for number in range(9)]


def test_the_steps_of_bringing_a_system_up_are_told(monkeypatch, tmp_path):
    """Each may wait for long: a database, the HTTP port that workers of a dead front have."""
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv("GREENROOM_READY_FD", str(write_fd))
    nothing = lambda *_, **__: None  # noqa: E731
    monkeypatch.setattr(process.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(prctl=nothing))
    for name in ("require_open_files", "describe_holder", "_describe_admin", "install"):
        monkeypatch.setattr(process, name, nothing)
    monkeypatch.setattr(process.binding, "prepare", nothing)
    monkeypatch.setattr(process.forking, "share_memory", nothing)
    monkeypatch.setattr(process, "ActorSystem", nothing)
    admin = Process(pid=7, start_ticks=7, incarnation="admin")
    monkeypatch.setattr(process, "_child_of", lambda *_: admin)
    settings = read_settings({}, state_dir=str(tmp_path))
    records: Any = SimpleNamespace(found=dict, kill=lambda **_: [], add=nothing)
    front: Any = SimpleNamespace(process=None, start=nothing)
    assert process.bring_up(settings, records, front, admin) == admin
    process.tell_outcome("ready\nat once")
    with open(read_fd) as told:  # to its end: it is closed
        lines = told.read().splitlines()
    assert lines == [
        f"waiting for the state in {location_at(settings.store_name)}",
        "waiting for the end of what is left of a broken system",
        "waiting for the HTTP port",
        "waiting for the actor system (logs/host.log)",
        "waiting for the actor system's admin (logs/host.log)",
        "ready at once",
    ]


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


@pytest.mark.parametrize(("takes_s", "is_up"), [(100.0, True), (1000.0, False)])
def test_a_start_waits_for_another_one_that_goes_on_but_not_for_ever(
    monkeypatch, tmp_path, takes_s, is_up
):
    settings = read_settings({}, state_dir=str(tmp_path))
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda _s: now.__setitem__(0, now[0] + 1.0)
    )
    monkeypatch.setattr(launcher, "time", clock)
    other = Process(pid=7, start_ticks=7, incarnation="other")
    monkeypatch.setattr(
        launcher, "records_of", lambda _: SimpleNamespace(find=lambda *_roles: [other])
    )
    monkeypatch.setattr(launcher, "silent_among", lambda _processes: [])
    monkeypatch.setattr(launcher, "is_ready", lambda _host: now[0] >= takes_s)
    monkeypatch.setattr(launcher, "is_alive", lambda _host: True)
    if is_up:
        assert launcher.start(settings) is False
    else:
        with pytest.raises(StartError, match="host process 7 neither answers nor ends"):
            launcher.start(settings)
        assert now[0] >= launcher.stop_s(settings), "it may be a stop"


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


@pytest.mark.slow
def test_a_stop_during_a_start_that_waits_ends_all_that_there_is(tmp_path):
    with running_system(tmp_path / "state") as running:
        os.kill(running.pid_of(ADMIN_ROLE), signal.SIGSTOP)
        os.kill(running.pid_of(HOST_ROLE), signal.SIGKILL)
        starter = subprocess.Popen(
            [sys.executable, "-m", "greenroom.serve.cli.main", "start"],
            env={**os.environ, **running.environ},
            stderr=subprocess.PIPE,
            text=True,
        )
        with starter:
            assert starter.stderr is not None
            assert any("an answer of the actor system's admin" in line for line in starter.stderr)
            pids = running.pids()
            os.kill(running.pid_of(HOST_ROLE), signal.SIGTERM)
            assert "the host process was told to stop" in starter.stderr.read()
        wait_until(lambda: not any(alive(pid) for _, pid in pids), 20, "the end of all processes")
        assert running.pids() == []


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
