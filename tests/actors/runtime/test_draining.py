"""How long a host may take to stop: one limit, from the deployments' settings."""

from __future__ import annotations

import threading
import time
import urllib.request
from pathlib import Path

import pytest

from greenroom import serve
from greenroom.actors.runtime import draining
from greenroom.actors.runtime.draining import (
    LEAST_S,
    MARGIN_S,
    drain_s,
    note_drain_s,
    stage_s,
    stop_s,
)
from greenroom.actors.runtime.settings import HostSettings, read_settings
from tests.actors.conftest import deploy
from tests.support.systems import RunningSystem, wait_until

CALL_S = LEAST_S + 7.0  # longer than any stage takes without the deployment's setting


@pytest.fixture
def settings(tmp_path: Path) -> HostSettings:
    made = read_settings({}, state_dir=str(tmp_path))
    made.run_dir.mkdir()
    return made


def test_what_the_controller_tells_is_the_limit_but_for_the_least(settings: HostSettings) -> None:
    assert drain_s(settings) == LEAST_S
    note_drain_s(settings, 90.0)
    assert (drain_s(settings), stage_s(settings)) == (90.0, 90.0 + MARGIN_S)
    note_drain_s(settings, 3.0)
    assert drain_s(settings) == LEAST_S
    assert stop_s(3.0) == stop_s(LEAST_S) < stop_s(90.0)


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "-1"])
def test_a_damaged_file_leaves_the_least(settings: HostSettings, text: str) -> None:
    settings.drain_file.write_text(text)
    assert drain_s(settings) == LEAST_S
    note_drain_s(settings, 60.0)
    assert drain_s(settings) == 60.0


def test_the_file_is_written_only_when_the_limit_changes(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = draining.write_private
    monkeypatch.setattr(
        draining, "write_private", lambda path, text: (written.append(text), write(path, text))
    )
    for told in (20.0, 0.0, 60.0, 60.0, 20.0, 20.0):
        note_drain_s(settings, told)
    assert written == ["60", "20"]


class Slow:
    def __init__(self, begun: str) -> None:
        self._begun = Path(begun)

    def __call__(self, _request: object) -> str:
        self._begun.touch()
        time.sleep(CALL_S)
        return "done"


def test_a_stop_waits_as_long_for_a_call_as_its_deployment_says(tmp_path: Path) -> None:
    running, begun = RunningSystem(tmp_path / "state"), tmp_path / "begun"
    running.start()
    try:
        slow = serve.deployment(Slow, graceful_shutdown_timeout_s=600.0)
        deploy(running, slow.bind(str(begun)))
        answers: list[bytes] = []

        def ask() -> None:
            with urllib.request.urlopen(running.url, timeout=600) as response:
                answers.append(response.read())

        asked = threading.Thread(target=ask)
        asked.start()
        wait_until(begun.exists, 10, "the call has begun")
        wait_until(lambda: drain_s(running.settings) == 600.0, 5, "the host has been told")
    finally:
        running.stop()
    asked.join()
    assert answers == [b"done"]
