"""``start --block`` prints what happens, one line for each, for whoever reads a container's log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from greenroom import serve
from tests.support.systems import RunningSystem, wait_until


@serve.deployment
def fine(_request: Any) -> str:
    return "fine"


@serve.deployment(max_constructor_retry_count=1)
class Broken:
    def __init__(self) -> None:
        raise ValueError("cannot\nbe made")

    def __call__(self, _request: Any) -> str:
        return "never"


@pytest.mark.slow
def test_every_event_is_one_object_on_the_standard_output(tmp_path):
    running = RunningSystem(tmp_path / "state", GREENROOM_LOG_FORMAT="json")
    printed = tmp_path / "printed"
    with printed.open("wb") as output:
        command = subprocess.Popen(
            [sys.executable, "-m", "greenroom.serve.cli.main", "start", "--block"],
            env={**os.environ, **running.environ},
            stdout=output,
            stderr=subprocess.DEVNULL,
        )

    def events() -> list[dict[str, Any]]:
        whole = printed.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for(text: str, level: str = "INFO") -> dict[str, Any]:
        def find() -> dict[str, Any] | None:
            said = (each for each in events() if text in each["message"])
            return next(said, None)

        found: dict[str, Any] = wait_until(find, 10, text)
        assert found["level"] == level, found
        return found

    try:
        wait_for("started: HTTP at")
        running.deploy(fine.bind())
        wait_for("deploy application 'default'")
        wait_for("replica default#fine#")
        pid = running.replica_pids()[0]
        assert wait_for(f"(pid {pid}) runs")["part"] == "controller"
        os.kill(pid, signal.SIGKILL)
        wait_for(f"(pid {pid}) is gone")
        with pytest.raises(ValueError, match="cannot"):
            running.deploy(Broken.bind(), name="broken", route_prefix="/broken")
        wait_for("could not start: ", "ERROR")
    finally:
        running.disconnect()
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == 0
    seen = events()
    assert [each["message"] for each in seen if each["message"] == "stopping"] == ["stopping"]
    assert seen[-1]["message"].startswith("stopped; ")
    assert all(set(each) == {"time", "level", "part", "pid", "message"} for each in seen)
