"""What replicas take of a real host, what waits for room, and where the amounts come from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from tests.support.systems import RunningSystem, running_system, wait_until


@pytest.fixture
def small(tmp_path: Path) -> Iterator[RunningSystem]:
    """A system with room for two CPUs and three disks."""
    environ = {"GREENROOM_NUM_CPUS": "2", "GREENROOM_RESOURCES": '{"disk": 3}'}
    with running_system(tmp_path / "state", **environ) as started:
        yield started


MINE = """
from greenroom import serve
@serve.deployment(actor_options={"num_cpus": 5})
def app(request):
    return "hello"
app = app.bind()
"""


def hello(_request: Any) -> str:
    return "hello"


@pytest.mark.slow
def test_a_deployment_without_room_waits_and_status_and_the_command_say_for_what(
    small: RunningSystem, tmp_path: Path
) -> None:
    client = serve.Client(small.connection, small.settings)
    first = client.deploy("first", hello, actor_options={"num_cpus": 2})
    client.wait_for_goal(first, 20)
    second = client.deploy("second", hello, actor_options={"num_cpus": 1, "resources": {"disk": 3}})
    with pytest.raises(TimeoutError):
        client.wait_for_goal(second, 0.5)
    message = (
        "a replica needs 1 num_cpus, and 0 num_cpus of 2 num_cpus is free: it fits when 1 num_cpus "
        "more is given back by first (2 num_cpus)"
    )
    wait_until(
        lambda: message in client.get_deployment_info("second")["message"], 5, "what it waits for"
    )
    shown = small.greenroom("status", "--json")
    assert shown.returncode == 1
    assert message in shown.stdout
    assert small.status()["resources"]["num_cpus"] == {"total": 2.0, "taken": 2.0}
    shown = small.greenroom("status")
    assert "backend 'second' is UPDATING: 0 of 1 replicas run; a replica" in " ".join(
        shown.stdout.split()
    )
    client.wait_for_goal(client.delete_deployment("first"), 20)
    client.wait_for_goal(second, 20)
    assert small.get("/second") == (200, b"hello")
    assert small.status()["resources"]["disk"] == {"total": 3.0, "taken": 3.0}
    assert small.greenroom("status").returncode == 0
    (tmp_path / "mine.py").write_text(MINE)
    log = tmp_path / "deploy.log"
    with log.open("w") as output:
        command = subprocess.Popen(
            [sys.executable, "-m", "greenroom.serve.cli.main", "deploy", "mine"],
            env={**os.environ, **small.environ},
            cwd=tmp_path,
            stderr=output,
        )
    try:
        message = "needs 5 num_cpus, and the host has 2 num_cpus in all"
        wait_until(lambda: message in log.read_text(), 20, "the command tells what it waits for")
    finally:
        command.terminate()
        command.wait(10)
