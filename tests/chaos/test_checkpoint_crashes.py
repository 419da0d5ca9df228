"""The controller is killed around every checkpoint while clients change things.

After each answer, what was acknowledged must be there; at the end the system must be as if nothing
had happened, with no process left over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.systems import RunningSystem, running_system, wait_until
from understudy import serve

CRASHES = {
    "after every checkpoint": {"UNDERSTUDY_TEST_CRASH_AFTER_CHECKPOINT": "1"},
    "before every other checkpoint": {"UNDERSTUDY_TEST_CRASH_BEFORE_CHECKPOINT": "0.5"},
    "on both sides": {
        "UNDERSTUDY_TEST_CRASH_AFTER_CHECKPOINT": "0.5",
        "UNDERSTUDY_TEST_CRASH_BEFORE_CHECKPOINT": "0.3",
    },
}


@pytest.fixture(params=CRASHES.values(), ids=CRASHES.keys())
def crashing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningSystem]:
    """A system whose controller dies around its checkpoints."""
    with running_system(tmp_path / "state", **request.param) as started:
        yield started


@serve.deployment(num_replicas=2)
class Word:
    """Answers the word that it was made with."""

    def __init__(self, word: str) -> None:
        self.word = word

    async def __call__(self, _request: object) -> str:
        return self.word


def restarts(running: RunningSystem) -> int:
    """Return how many controllers have recovered so far."""
    log = running.settings.logs_dir / "controller.log"
    return log.read_text(encoding="utf-8").count("recovered")


def test_every_acknowledged_change_survives(crashing: RunningSystem) -> None:
    with crashing.as_default():
        crashing.deploy(Word.bind("one"))
        assert crashing.get() == (200, b"one")
        crashing.deploy(Word.bind("two"))
        assert crashing.get() == (200, b"two")

        client = serve.Client.connect()
        _finish(client, client.create_backend("plain", lambda _request: "plain"))
        client.create_endpoint("plain", backend="plain", route="/plain")
        assert crashing.get("/plain") == (200, b"plain")
        _finish(client, client.update_backend_config("plain", {"num_replicas": 3}))
        assert client.get_backend_config("plain").num_replicas == 3
        client.delete_endpoint("plain")
        assert crashing.get("/plain")[0] == 200  # the application's route "/" takes it now
        assert crashing.get("/plain")[1] == b"two"
        _finish(client, client.delete_backend("plain"))
        assert "plain" not in client.list_backends()
        serve.delete("default")
        assert crashing.get()[0] == 404
    wait_until(
        lambda: not [role for role, _ in crashing.pids() if role == "replica"],
        30,
        "the end of every replica",
    )
    status = crashing.status()
    assert (status["applications"], status["backends"], status["endpoints"]) == ({}, {}, {})
    assert all(goal["state"] != "pending" for goal in status["goals"])
    print(f"{restarts(crashing)} controllers")
    assert restarts(crashing) > 3


def _finish(client: serve.Client, goal: str | None) -> None:
    if goal is not None:
        client.wait_for_goal(goal, timeout_s=30)
