"""Pulses, and what becomes of processes whose message loop stands still."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.liveness import (
    OtherPulse,
    Pulse,
    SilenceWatch,
    silence_of,
    silent_among,
)
from greenroom.actors.runtime.processes import identify, is_alive, send_signal
from greenroom.core.silence import Doing
from greenroom.serve.admin.reports import problems_of, show_silent
from greenroom.serve.cli.starting import notifier
from tests.support.systems import wait_until

LIMIT_S = 0.3  # here, where checks come every CHECK_S
BEATING_LIMIT_S = 1.0  # of those that beat: a machine that is busy may hold them up for long
CHECK_S = 0.05
BEATING = """
import os, sys, time
from greenroom.actors.runtime.liveness import Pulse
pulse = Pulse(runs_user_code={user_code})
ends_at = time.monotonic() + 60
def beat(while_s):
    until = time.monotonic() + while_s
    while time.monotonic() < min(until, ends_at):
        pulse.beat()
        time.sleep(0.02)
beat(0.2)
print("beats", flush=True)
{then}
"""
STANDS = "time.sleep(60)"
COMPUTES = "while time.monotonic() < ends_at: pass"
PATIENT = "with pulse.patience(60): time.sleep(60)"
IS_ANOTHER = "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)'])"
RUDE = """
path = sys.argv[1]
os.closerange(3, 1000)
opened = [os.open(path, os.O_RDWR) for _ in range(8)]
beat(60)
"""


@pytest.fixture
def child():
    """Start processes that beat, and then do what they are told to."""
    with contextlib.ExitStack() as stack:

        def start(then: str, *args: str, user_code: bool = False) -> Process:
            program = BEATING.format(then=then, user_code=user_code)
            command = [sys.executable, "-c", program, *args]
            started = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(started.kill)
            assert started.stdout.readline() == b"beats\n"
            process = identify(started.pid)
            assert process is not None
            return process

        yield start


def check_until(
    watch: SilenceWatch, process: Process, is_over: Callable[[], bool], most_s: float
) -> bool:
    """Look again and again; return whether it was over in time."""
    ends_at = time.monotonic() + most_s
    while not is_over() and time.monotonic() < ends_at:
        watch.check([process])
        time.sleep(CHECK_S)
    watch.close()
    return is_over()


def is_ended(process: Process, most_s: float, limit_s: float = LIMIT_S) -> bool:
    """Return whether a watcher ends a process within so long."""
    return check_until(SilenceWatch(limit_s), process, lambda: not is_alive(process), most_s)


@pytest.mark.slow
def test_a_process_that_beats_is_left_until_it_is_stopped(child):
    process = child("beat(60)")
    assert not is_ended(process, 2 * BEATING_LIMIT_S, BEATING_LIMIT_S)
    os.kill(process.pid, signal.SIGSTOP)
    check_until(SilenceWatch(5.0), process, lambda: False, 0.5)
    os.kill(process.pid, signal.SIGCONT)  # in time
    assert not is_ended(process, 2 * BEATING_LIMIT_S, BEATING_LIMIT_S)
    os.kill(process.pid, signal.SIGSTOP)
    assert is_ended(process, 20)


def test_one_that_computes_gets_more_time(child):
    assert not is_ended(child(COMPUTES), 4 * LIMIT_S)


def test_user_code_may_compute_for_ever_but_not_stand_still(child):
    process = child(COMPUTES, user_code=True)
    watch = SilenceWatch(0.02)  # twelve times that are over in no time
    assert not check_until(watch, process, lambda: not is_alive(process), 1.0)
    os.kill(process.pid, signal.SIGSTOP)
    assert is_ended(process, 20)


@pytest.mark.slow
@pytest.mark.parametrize("then", [PATIENT, IS_ANOTHER])
def test_one_that_asked_for_patience_or_is_another_program_by_now_is_left(child, then):
    assert not is_ended(child(then), 4 * LIMIT_S)


def test_one_without_a_pulse_is_never_judged():
    with subprocess.Popen(["sleep", "60"]) as started:
        process = identify(started.pid)
        assert process is not None
        assert not is_ended(process, 4 * LIMIT_S)
        started.kill()


def test_user_code_that_closes_all_descriptors_has_no_file_written_to(child, tmp_path):
    path = tmp_path / "precious"
    path.write_bytes(b"as it was")
    process = child(RUDE, str(path))
    assert not is_ended(process, 1.5 * BEATING_LIMIT_S, BEATING_LIMIT_S)
    assert path.read_bytes() == b"as it was"


@pytest.mark.slow
def test_a_pulse_says_what_a_process_does(child):
    process = child("beat(60)")
    assert silence_of(process) is None
    os.kill(process.pid, signal.SIGSTOP)
    found = wait_until(lambda: silence_of(process), 5, "it is silent")
    assert found[0] >= 2.0
    assert found[1] is Doing.STILL
    (silent,) = silent_among({process: "proxy"})
    assert (silent["role"], silent["pid"]) == ("proxy", process.pid)
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: silence_of(process) is None, 5, "it beats again")
    assert silent_among({process: "proxy"}) == []


def test_a_watcher_that_cannot_kill_now_does_so_later(child):
    process = child(STANDS)
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2

    def scarce(victim: Process, number: int) -> bool:
        if failures:
            raise failures.pop()
        return send_signal(victim, number)

    watch = SilenceWatch(LIMIT_S, send_signal=scarce)
    assert check_until(watch, process, lambda: not is_alive(process), 20)
    assert not failures


def test_a_watcher_lets_go_of_whom_it_watches_no_more(child):
    process = child("beat(60)")
    watch = SilenceWatch(LIMIT_S)
    before = os.listdir("/proc/self/fd")
    watch.check([process])
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    watch.check([])
    assert os.listdir("/proc/self/fd") == before


def test_a_pulse_is_found_by_others_and_distinguished_from_another_process_of_its_pid():
    pulse = Pulse()
    pulse.beat()
    own = identify(os.getpid())
    assert own is not None
    found = OtherPulse.find(own)
    assert found is not None
    with contextlib.closing(found):
        assert found.read().beats == 1
        with pulse.patience(7.0):
            assert found.read().patience_s == 7.0
        assert found.read().patience_s == 0.0
        assert found.is_current()


def test_status_shows_what_is_silent_and_is_not_healthy():
    replica = {"tag": "b#1", "pid": 7, "state": "RUNNING", "ongoing": 0}
    proxy = {"pid": 8, "state": "RUNNING"}
    host = {"name": "a", "state": "RUNNING", "proxy": proxy, "front": {"pid": 9, "workers": [10]}}
    report = {"hosts": [host], "applications": {}, "backends": {}}
    report["backends"]["b"] = {"status": "HEALTHY", "replicas": [replica]}  # type: ignore[call-overload]
    assert problems_of(report) == []
    silent = [
        {"role": "replica", "pid": 7, "silent_s": 3.2, "doing": "stands still"},
        {"role": "http worker", "pid": 10, "silent_s": 4.0, "doing": Doing.DISK.value},
    ]
    show_silent(report, silent)
    assert replica["state"] == "SILENT 3 s"
    assert proxy["state"] == "RUNNING"
    first, second = problems_of(report)
    assert "replica (pid 7) is SILENT 3 s" in first
    assert "waits for the disk, so even SIGKILL has to wait" in second


@pytest.mark.parametrize("name", ["notify", "@greenroom-test-{pid}"])
def test_systemd_is_notified_by_the_command_alone(name, tmp_path, monkeypatch):
    path = name.format(pid=os.getpid()) if name[0] == "@" else str(tmp_path / name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path.replace("@", "\0", 1))
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        notify = notifier()
        assert "NOTIFY_SOCKET" not in os.environ
        notify("WATCHDOG=1")
        assert systemd.recv(100) == b"WATCHDOG=1"
    notify("WATCHDOG=1")  # to nobody
    notifier()("READY=1")
