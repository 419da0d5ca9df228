"""Processes that user code starts must not outlive the system."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from greenroom import serve
from greenroom.serve.admin import operations
from tests.actors.conftest import deploy
from tests.support.systems import alive, running_system, wait_until


class Starter:
    def popen(self) -> int:
        self.child = subprocess.Popen(["sleep", "600"])
        return self.child.pid

    def fork(self) -> int:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid


def test_what_a_replica_started_ends_with_it(tmp_path: Path) -> None:
    with running_system(tmp_path / "state") as running:
        handle = deploy(running, serve.deployment(Starter).bind())
        pids = [handle.popen.remote().result(10), handle.fork.remote().result(10)]
        assert all(map(alive, pids))
        operations.delete(running.connection, "default")
        wait_until(lambda: not any(map(alive, pids)), 5, "what the replica started ends")


def test_what_a_killed_replica_started_ends_with_the_system(tmp_path: Path) -> None:
    with running_system(tmp_path / "state") as running:
        handle = deploy(running, serve.deployment(Starter).bind())
        pids = [handle.popen.remote().result(10), handle.fork.remote().result(10)]
        (replica,) = running.replica_pids()
        os.kill(replica, signal.SIGKILL)
        wait_until(lambda: not alive(replica), 5, "the end of the replica")
    wait_until(lambda: not any(map(alive, pids)), 5, "what the replica started ends")
