"""User code that does to its process what no server likes, on real replicas."""

from __future__ import annotations

import asyncio
import ctypes
import io
import logging
import logging.config
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest

from greenroom import serve
from greenroom.core.silence import TICK_S
from greenroom.serve.exceptions import ReplicaUnavailableError
from tests.support.systems import alive, wait_until


class Rude:
    def ping(self) -> str:
        return "pong"

    async def exit_in_a_task(self) -> None:
        async def leave() -> None:
            raise SystemExit(3)

        self.task = asyncio.create_task(leave())

    async def stop_the_loop(self) -> None:
        asyncio.get_running_loop().stop()

    async def close_the_log_and_fail(self) -> None:
        sys.stderr.close()
        raise ValueError("nobody reads this")

    def fault(self) -> None:
        ctypes.string_at(0)

    def abort(self) -> None:
        os.abort()

    def end_a_worker(self) -> int | None:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        worker.terminate()
        worker.join(5)
        try:
            return worker.exitcode
        finally:
            worker.kill()

    def log(self, lines: int) -> None:
        def write() -> None:
            for number in range(lines):
                logging.getLogger("users.own").warning("line %d", number)

        threads = [threading.Thread(target=write) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def pid(self) -> int:
        return os.getpid()

    def configure_logging(self) -> None:
        logging.config.dictConfig({"version": 1})  # which also disables all loggers

    def replace_the_last_resort(self) -> None:
        logging.lastResort = logging.StreamHandler(io.StringIO())

    def fail(self) -> None:
        raise ValueError("said after all that")

    def add_a_handler(self) -> int:
        before = len(logging.getLogger().handlers)
        logging.basicConfig(stream=sys.stderr)
        return len(logging.getLogger().handlers) - before


@pytest.fixture
def rude(deployed):
    options = {"max_ongoing_requests": 1, "outlier_ejection": False}
    return deployed(serve.deployment(Rude, **options).bind())


def call(rude, method, *args):
    return rude.options(method_name=method).remote(*args).result(20)


@pytest.mark.parametrize("method", ["exit_in_a_task", "stop_the_loop"])
def test_a_loop_that_user_code_ends_goes_on(rude, method):
    assert call(rude, method) is None
    for _ in range(3):
        assert call(rude, "ping") == "pong"


def log_of(running, name):
    return "".join(
        log.read_text() for log in running.settings.logs_dir.glob(f"replica-{name}#*.log")
    )


@pytest.mark.parametrize(
    ("method", "message"), [("fault", "Segmentation fault"), ("abort", "Aborted")]
)
def test_a_replica_whose_native_code_faults_is_gone_at_once_and_its_log_says_where(
    rude, running, name, method, message
):
    (pid,) = running.replica_pids(name)
    with pytest.raises(ReplicaUnavailableError, match="died"):
        call(rude, method)
    wait_until(lambda: not alive(pid), 1, "its end: its connections go a moment before")
    text = log_of(running, name)
    assert f"Fatal Python error: {message}" in text
    assert "test_rude_user_code.py" in text
    assert f" in {method}" in text


def test_what_user_code_forks_ends_by_the_signals_that_end_others(rude):
    assert call(rude, "end_a_worker") == -signal.SIGTERM
    assert call(rude, "ping") == "pong"


def test_a_failure_that_cannot_be_logged_is_answered_and_frees_its_slot(rude):
    for _ in range(3):
        with pytest.raises(ValueError, match="nobody reads this"):
            call(rude, "close_the_log_and_fail")
    assert call(rude, "ping") == "pong"


def test_user_code_sets_up_logging_as_anywhere_and_all_is_in_the_replicas_own_log(
    rude, running, name
):
    call(rude, "log", 250)
    assert call(rude, "add_a_handler") == 1
    wait_until(lambda: log_of(running, name).count("line ") == 8 * 250, 5, "every line in the log")


@pytest.mark.parametrize("method", ["configure_logging", "replace_the_last_resort"])
def test_a_replica_outlives_what_user_code_does_to_all_handlers(rude, running, name, method):
    pid = call(rude, "pid")
    assert call(rude, method) is None
    with pytest.raises(ValueError, match="said after all that"):
        call(rude, "fail")
    until = time.monotonic() + 2.5 * TICK_S  # its beats are when it looks at its logs
    while time.monotonic() < until:
        assert call(rude, "pid") == pid
    assert "said after all that" in log_of(running, name)
