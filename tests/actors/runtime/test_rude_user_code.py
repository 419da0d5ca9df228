"""User code that does to its process what no server likes, on real replicas."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests.actors.by_hand import ReplicaByHand
from tests.support.systems import wait_until

MakeReplica = Callable[..., ReplicaByHand]


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

    def add_a_handler(self) -> int:
        before = len(logging.getLogger().handlers)
        logging.basicConfig(stream=sys.stderr)
        return len(logging.getLogger().handlers) - before


@pytest.mark.parametrize("method", ["exit_in_a_task", "stop_the_loop"])
def test_a_loop_that_user_code_ends_goes_on(replica_of, method):
    replica = replica_of(Rude)
    calls = replica.calls(1, method=method)
    replica.run(calls)
    assert set(replica.outcomes(calls).values()) == {200}
    for _ in range(3):
        assert replica.value(method="ping") == "pong"


@pytest.mark.parametrize(
    ("method", "message"), [("fault", "Segmentation fault"), ("abort", "Aborted")]
)
def test_a_replica_whose_native_code_faults_is_gone_at_once_and_its_log_says_where(
    replica_of, running, method, message
):
    replica = replica_of(Rude)
    replica.run(replica.calls(1, method=method))
    wait_until(lambda: not replica.alive, 5, "the process's end")
    (log,) = running.settings.logs_dir.glob(f"replica-{replica.tag}*.log")
    text = log.read_text()
    assert f"Fatal Python error: {message}" in text
    assert "test_rude_user_code.py" in text
    assert f" in {method}" in text


def test_what_user_code_forks_ends_by_the_signals_that_end_others(replica_of):
    replica = replica_of(Rude)
    assert replica.value(method="end_a_worker") == -signal.SIGTERM
    assert replica.value(method="ping") == "pong"


def test_a_failure_that_cannot_be_logged_is_answered_and_frees_its_slot(replica_of):
    replica = replica_of(Rude, max_ongoing_requests=1)
    for _ in range(3):
        calls = replica.calls(1, method="close_the_log_and_fail")
        replica.run(calls)
        assert set(replica.outcomes(calls).values()) == {500}
    assert replica.value(method="ping") == "pong"


def test_user_code_sets_up_logging_as_anywhere_and_all_is_in_the_replicas_own_log(
    replica_of, running
):
    replica = replica_of(Rude)
    replica.value(250, method="log")
    assert replica.value(method="add_a_handler") == 1

    def logged() -> int:
        logs = running.settings.logs_dir.glob(f"replica-{replica.tag}*.log")
        return sum(log.read_text().count("line ") for log in logs)

    wait_until(lambda: logged() == 8 * 250, 5, "every line in the log")
