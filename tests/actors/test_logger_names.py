"""Thespian's logger is told from replicas of deployments that are called so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from greenroom import serve
from tests.actors.conftest import deploy
from tests.support.systems import alive, running_system, wait_until


def test_a_replica_called_logger_is_not_taken_for_thespians(tmp_path: Path) -> None:
    with running_system(tmp_path / "state") as running:
        deploy(running, serve.deployment(lambda: "here", name="Logger").bind())
        (replica,) = running.replica_pids()
        before = running.pid_of("thespian logger")
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: not alive(before), 5, "the end of the logger")

        def successor() -> int:
            return next((pid for role, pid in running.pids() if role == "thespian logger"), 0)

        wait_until(successor, 5, "another logger")
        assert successor() != replica
        assert running.pid_of("replica") == replica
