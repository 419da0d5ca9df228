"""How long a host may take to stop: one limit, from the deployments' settings."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from greenroom import serve
from greenroom.actors.runtime import draining
from greenroom.actors.runtime.draining import (
    DEFAULT_S,
    LEAST_MOVE_S,
    MARGIN_S,
    drain_s,
    move_s,
    record_drain_s,
    stop_s,
)
from greenroom.actors.runtime.settings import read_settings
from tests.actors.conftest import deploy
from tests.support.systems import RunningSystem, wait_until

CALL_S = DEFAULT_S + 7.0  # longer than any stage takes without the deployment's setting


@pytest.fixture
def settings(tmp_path):
    made = read_settings({}, state_dir=str(tmp_path))
    made.run_dir.mkdir()
    return made


def test_what_the_controller_says_is_the_limit_also_below_the_default(settings):
    assert drain_s(settings) == DEFAULT_S
    for found in (90.0, 3.0, 0.0):
        record_drain_s(settings, found)
        assert drain_s(settings) == found
    assert stop_s(0.0) < stop_s(3.0) < stop_s(DEFAULT_S) < stop_s(90.0)


def test_replicas_have_time_to_move_whatever_the_limit_is():
    assert move_s(0.0) == move_s(LEAST_MOVE_S) == LEAST_MOVE_S + MARGIN_S < move_s(90.0)


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "-1"])
def test_a_damaged_file_leaves_the_default(settings, text):
    settings.drain_file.write_text(text)
    assert drain_s(settings) == DEFAULT_S
    record_drain_s(settings, 60.0)
    assert drain_s(settings) == 60.0


def test_the_file_is_written_only_when_the_limit_changes(settings, monkeypatch):
    written: list[str] = []
    write = draining.write_private
    monkeypatch.setattr(
        draining, "write_private", lambda path, text: (written.append(text), write(path, text))
    )
    for found in (20.0, 0.0, 60.0, 60.0, 20.0, 20.0):
        record_drain_s(settings, found)
    assert written == ["0", "60", "20"]


class Slow:
    def __init__(self, begun: str, takes_s: float) -> None:
        self._begun, self._takes_s = Path(begun), takes_s

    def __call__(self, _request: object) -> str:
        self._begun.touch()
        time.sleep(self._takes_s)
        return "done"


def stopped_with_a_call(tmp_path: Path, *, takes_s: float, limit_s: float) -> tuple[float, str]:
    """Stop a system while a call runs; return how long that took, and what the client got."""
    running, begun = RunningSystem(tmp_path / "state"), tmp_path / "begun"
    running.start()
    answers: list[str] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(running.url, timeout=600) as response:
                answers.append(response.read().decode())
        except (OSError, http.client.HTTPException):
            answers.append("cut")

    asked = threading.Thread(target=ask)
    try:
        slow = serve.deployment(Slow, graceful_shutdown_timeout_s=limit_s)
        deploy(running, slow.bind(str(begun), takes_s))
        asked.start()
        wait_until(begun.exists, 10, "the call has begun")
        wait_until(lambda: drain_s(running.settings) == limit_s, 5, "the host has been told")
    finally:
        begun_at = time.monotonic()
        running.stop()
    took_s = time.monotonic() - begun_at
    asked.join()
    return took_s, *answers


@pytest.mark.slow
def test_a_stop_waits_as_long_for_a_call_as_its_deployment_says(tmp_path):
    assert stopped_with_a_call(tmp_path, takes_s=CALL_S, limit_s=600.0)[1] == "done"


@pytest.mark.slow
def test_a_stop_waits_no_longer_for_a_call_than_its_deployment_says(tmp_path):
    took_s, answer = stopped_with_a_call(tmp_path, takes_s=600.0, limit_s=1.0)
    assert answer == "cut"
    assert 1.0 <= took_s < DEFAULT_S
