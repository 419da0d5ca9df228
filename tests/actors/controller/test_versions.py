"""Versions on a real system: rolling updates under load, compare-and-set, history and undo."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import pytest

from tests.support.load import GetLoad
from tests.support.systems import RunningSystem

DEADLINE_S = 30


class Model:
    """Answers its version and process; ``limits`` come by reconfigure."""

    def __init__(self, version: str) -> None:
        if version == "bad":
            raise LookupError("no weights")
        self.version = version
        self.calls: list[Any] = []

    def reconfigure(self, config: Any) -> None:
        self.calls.append(config)
        if config == "bad":
            raise LookupError("no such limits")

    def __call__(self, _request: Any) -> dict[str, Any]:
        return {"version": self.version, "pid": os.getpid(), "calls": self.calls}


@pytest.fixture
def deployed(client, name):
    """Deploy a version of Model under this test's name, and wait; deleted afterwards."""

    def deploy(
        version: str, prev_version: str | None = None, target: Any = Model, **config: Any
    ) -> None:
        goal = client.deploy(
            name,
            target,
            init_args=[version],
            version=version,
            prev_version=prev_version,
            config={"health_check_period_s": 1, "max_constructor_retry_count": 2, **config},
        )
        client.wait_for_goal(goal, DEADLINE_S)

    yield deploy
    client.wait_for_goal(client.delete_deployment(name), DEADLINE_S)


def answer(running: RunningSystem, name: str) -> Any:
    status, body = running.get(f"/{name}")
    assert status == 200, body
    return json.loads(body)


def test_a_rolling_update_under_load_fails_no_request_and_keeps_the_capacity(
    running, client, deployed, name
):
    deployed("1", num_replicas=4)
    counts: list[tuple[int, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            states = [r["state"] for r in client.get_deployment_info(name)["replicas"]]
            counts.append((states.count("RUNNING"), len(states)))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    with GetLoad(running.settings.http.port, f"/{name}", connections=16) as load:
        watcher.start()
        try:
            deployed("2", num_replicas=4)
            assert answer(running, name)["version"] == "2"
            with pytest.raises(LookupError, match="no weights"):
                deployed("bad", num_replicas=4)
            assert answer(running, name)["version"] == "2"
            info = client.get_deployment_info(name)
            assert (info["status"], info["version"]) == ("DEPLOY_FAILED", "2")
            assert "no weights" in info["message"]
            shown = " ".join(running.greenroom("status").stdout.split())
            assert f"{name} 2 4 of 4 DEPLOY_FAILED" in shown
            deployed("3", num_replicas=6)
        finally:
            over.set()
            watcher.join()
    log = (running.settings.logs_dir / "controller.log").read_text()
    assert f"at 127.0.0.1: deploy '{name}'" in log
    assert f"(deploy '{name}') failed: LookupError: no weights" in log
    print(f"fewest running {min(counts)[0]}, most processes {max(c[1] for c in counts)}; ", end="")
    print(load.tally.summary())
    assert load.tally.failures == []
    assert load.tally.ok > 100
    assert min(counts)[0] >= 4
    assert max(c[1] for c in counts) <= 8  # 6 and a fifth of 6, rounded up
    assert len(counts) > 20
