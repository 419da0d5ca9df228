"""Whoever starts a system may end before it is up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from greenroom.actors.host.records import HOST_ROLE, RunRecords, is_ready
from tests.support.systems import RunningSystem, wait_until


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_start_whose_starter_ends_comes_up_whole(tmp_path: Path, number: int) -> None:
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
