"""The status snapshot for outside readers, and the end of a whole cluster."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.controller import status_file
from greenroom.actors.controller.status_file import StatusFile
from tests.support.lone_loop import LoneLoop
from tests.support.systems import alive, wait_until


def hello(_request: Any) -> str:
    return "hello"


@pytest.fixture(name="loop")
def make_loop():
    return LoneLoop()


def test_many_changes_are_one_write_and_the_next_waits(loop, tmp_path):
    reads: list[int] = []
    path = tmp_path / "status.json"
    file = StatusFile(loop, path, lambda: {"reads": reads.append(1) or len(reads)})
    loop.pass_time(status_file.HEARTBEAT_S)
    assert reads == [], "nothing has happened yet"
    for _ in range(5):
        file.changed()
    loop.pass_time(status_file.DELAY_S)
    report = json.loads(path.read_text())
    assert (report["schema"], report["reads"]) == (1, 1)
    assert report["written_at"] == pytest.approx(time.time(), abs=5)
    file.changed()
    loop.pass_time(status_file.PERIOD_S - 0.01)
    assert len(reads) == 1
    loop.pass_time(0.01)
    assert len(reads) == 2
    loop.pass_time(status_file.HEARTBEAT_S - 0.01)
    assert len(reads) == 2
    loop.pass_time(0.01)
    assert len(reads) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


def test_a_large_cluster_is_reported_less_often(loop, tmp_path):
    reads: list[float] = []

    def read() -> dict[str, Any]:
        reads.append(loop.asyncio.time())
        loop.stand_still(0.1)
        return {}

    file = StatusFile(loop, tmp_path / "status.json", read)
    file.changed()
    loop.pass_time(status_file.DELAY_S)
    file.changed()
    loop.pass_time(20.0)
    assert reads[1] - reads[0] == pytest.approx(0.1 + 5.0)  # fifty times as long as it took


def test_a_file_that_cannot_be_written_is_logged_once_and_tried_again(loop, tmp_path, monkeypatch):
    warnings: list[Any] = []
    monkeypatch.setattr(status_file.logger, "warning", lambda *logged: warnings.append(logged))
    path = tmp_path / "missing" / "status.json"
    file = StatusFile(loop, path, dict)
    for _ in range(3):
        file.changed()
        loop.pass_time(status_file.PERIOD_S)
    assert len(warnings) == 1
    path.parent.mkdir()
    file.changed()
    loop.pass_time(status_file.PERIOD_S)
    assert json.loads(path.read_text())["schema"] == 1
    file.close()
    assert not path.exists()
    loop.pass_time(2 * status_file.HEARTBEAT_S)
    assert not path.exists()


@pytest.mark.slow
def test_the_file_follows_what_runs_and_goes_when_the_system_stops(own_system):
    path = own_system.settings.status_file
    assert path == own_system.settings.state_dir / "status.json"

    def read() -> dict[str, Any]:
        return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]

    client = serve.Client(own_system.connection, own_system.settings)
    client.wait_for_goal(client.deploy("m", hello, version="1"), 20)
    shown = wait_until(
        lambda: (
            read()
            if read().get("backends", {}).get("m", {}).get("status") == "HEALTHY"
            and read()["pending_goals"] == 0
            else None
        ),
        20,
        "the deployment is in the file",
    )
    asked = own_system.status()
    assert set(shown) == {*asked, "schema", "written_at"}
    assert shown["endpoints"] == asked["endpoints"]
    assert shown["controller"]["pid"] == own_system.pid_of("controller")
    killed = shown["controller"]["pid"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not alive(killed), 5, "it is dead")
    wait_until(
        lambda: ("controller", read()["controller"]["pid"]) in own_system.pids(),
        20,
        "the next controller writes it",
    )
    assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0
    own_system.disconnect()
    assert own_system.greenroom("stop").returncode == 0
    assert not path.exists()
    own_system.start()


@pytest.mark.slow
def test_a_shutdown_finishes_queries_ends_everything_and_returns_its_goals(own_system, tmp_path):
    def slow(_request: Any) -> str:
        (tmp_path / "began").touch()
        time.sleep(1.0)
        return "finished"

    client = serve.Client(own_system.connection, own_system.settings)
    client.wait_for_goal(client.deploy("slow", slow), 20)
    client.wait_for_goal(client.create_backend("b", hello), 20)
    client.create_endpoint("e", backend="b", route="/e")
    client.shadow_traffic("e", "slow", 0.5)
    own_system.deploy(serve.deployment(hello).bind(), route_prefix="/app")
    call = client.get_handle("slow").remote(None)
    wait_until((tmp_path / "began").exists, 20, "the query is with its replica")
    pids = own_system.pids()
    goals = client.shutdown()
    assert len(goals) == 3
    assert call.result(5) == "finished"
    assert [pid for _, pid in pids if alive(pid)] == []
    left = [each.name for each in own_system.settings.state_dir.iterdir()]
    assert set(left) <= {"cluster.key"}
    own_system.disconnect()
    own_system.start()
    assert own_system.status()["backends"] == {}
