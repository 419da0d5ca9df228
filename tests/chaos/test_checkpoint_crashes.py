"""The controller is killed around every checkpoint while clients change things.

After each answer, what was acknowledged must be there; at the end the system must be as if nothing
had happened, with no process left over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom import serve
from tests.support import policies
from tests.support.kept import Kept
from tests.support.load import GetLoad
from tests.support.systems import RunningSystem, running_system, wait_until

ON_BOTH_SIDES = {
    "GREENROOM_TEST_CRASH_AFTER_CHECKPOINT": "0.5",
    "GREENROOM_TEST_CRASH_BEFORE_CHECKPOINT": "0.3",
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept[RunningSystem]]:
    @contextlib.contextmanager
    def make() -> Iterator[RunningSystem]:
        folder = tmp_path_factory.mktemp("crashing")
        with running_system(folder / "state", **ON_BOTH_SIDES) as started:
            client = serve.Client(started.connection, started.settings)
            policies.put_in_force(client, "/policies")
            yield started

    kept = Kept(make)
    yield kept
    kept.end()


@pytest.fixture
def crashing(request: pytest.FixtureRequest, kept: Kept[RunningSystem]) -> Iterator[RunningSystem]:
    """A system whose controller dies around its checkpoints, with a split, a shadow, a rollout."""
    with kept.lent(request) as started:
        wait_until(lambda: policies.are_in_force(started.status()), 60, "the rollout's first step")
        yield started
        wait_until(lambda: policies.are_in_force(started.status()), 30, "all as it was")
        assert started.get("/policies") == (200, policies.ANSWER.encode())


@serve.deployment(num_replicas=2)
class Word:
    """Answers the word that it was made with."""

    def __init__(self, word: str) -> None:
        self.word = word

    async def __call__(self, _request: object) -> str:
        return self.word


class Plain:
    """Answers the word that it was made with."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, _request: object) -> str:
        return self.word


CHANGES = [  # each once, however often it was asked for
    "deploy application 'default'",
    "deploy application 'default'",
    "create backend 'plain'",
    "create endpoint 'plain'",
    "update backend config 'plain'",
    "delete endpoint 'plain'",
    "delete backend 'plain'",
    "deploy 'word'",
    "deploy 'word'",
    "deploy 'word'",
    "undo",
    "delete deployment 'word'",
]


def restarts(running: RunningSystem) -> int:
    """Return how many controllers have recovered so far."""
    log = running.settings.logs_dir / "controller.log"
    return log.read_text(encoding="utf-8").count("recovered")


def test_every_acknowledged_change_survives(crashing: RunningSystem) -> None:
    restarts_before = restarts(crashing)
    with crashing.as_default():
        with serve.Client.connect() as client:
            before = len(client.history())
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
        for version, earlier in (("1", None), ("2", "1"), ("3", "2")):
            goal = client.deploy(
                "word", Plain, init_args=[version], version=version, prev_version=earlier
            )
            assert goal is not None, "a repeat after a crash has the goal of the first"
            _finish(client, goal)
            assert crashing.get("/word") == (200, version.encode())
        _finish(client, client.undo()["goal"])
        assert crashing.get("/word") == (200, b"2")
        _finish(client, client.delete_deployment("word"))
        changes = [entry["what"] for entry in client.history()]
        assert [re.sub(r"undo change \d+", "undo", each) for each in changes[before:]] == CHANGES
        serve.delete("default")
        assert crashing.get()[0] == 404
        wait_until(lambda: policies.are_in_force(crashing.status()), 30, "all as it was")
    wait_until(
        lambda: [role for role, _ in crashing.pids()].count("replica") == len(policies.BACKENDS),
        30,
        "the end of every other replica",
    )
    status = crashing.status()
    assert status["applications"] == {}
    assert status["backends"].keys() == set(policies.BACKENDS)
    assert status["endpoints"].keys() == {policies.ENDPOINT}
    pending = {goal["subject"] for goal in status["goals"] if goal["state"] == "pending"}
    assert pending == {f"rollout {policies.ENDPOINT}"}
    print(f"{restarts(crashing) - restarts_before} controllers")
    assert restarts(crashing) > restarts_before + 3


@serve.deployment(
    max_ongoing_requests=4,
    autoscaling_config={
        "min_replicas": 0,
        "max_replicas": 3,
        "look_back_period_s": 1,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 1,
    },
)
class Scaled:
    """Has a replica for every two requests at a time."""

    async def __call__(self, _request: object) -> str:
        await asyncio.sleep(0.02)
        return "ok"


def test_autoscaling_goes_on_and_no_request_fails(crashing: RunningSystem) -> None:
    restarts_before = restarts(crashing)
    crashing.deploy(Scaled.bind())
    for round_number in itertools.count(1):
        with GetLoad(crashing.settings.http.port, connections=8, pause_s=0.0) as load:
            wait_until(lambda: len(crashing.replica_pids()) == 3, 60, "three replicas")
            tally = load.stop()
        assert tally.ok > 0
        assert tally.failures == []
        wait_until(lambda: crashing.replica_pids() == [], 60, "none when idle")
        died = restarts(crashing) - restarts_before
        if round_number >= 2 and died > 3:  # by chance a round can have no death at all
            break
        assert round_number < 10, f"only {died} controllers died in {round_number} rounds"
    print(f"{died} controllers in {round_number} rounds")


def _finish(client: serve.Client, goal: str | None) -> None:
    if goal is not None:
        client.wait_for_goal(goal, timeout_s=30)


def test_deployers_at_once_lose_no_update_while_the_controller_dies(tmp_path: Path) -> None:
    environ = {
        "GREENROOM_TEST_CRASH_AFTER_CHECKPOINT": "0.1",
        "GREENROOM_TEST_CRASH_BEFORE_CHECKPOINT": "0.1",
    }
    count = 24
    with running_system(tmp_path / "state", **environ) as running, running.as_default():
        clients = [serve.Client.connect() for _ in range(4)]
        policies.put_in_force(clients[0], "/policies")
        _finish(clients[0], clients[0].deploy("m", Plain, init_args=["m"], version="0"))
        won: list[int] = []

        def count_up(client: serve.Client) -> None:
            while True:
                version = client.get_deployment_info("m")["version"]
                mine = int(version) + 1
                try:
                    client.deploy(
                        "m", Plain, init_args=["m"], version=str(mine), prev_version=version
                    )
                except ValueError:
                    continue
                won.append(mine)
                return

        deployers = [
            threading.Thread(target=count_up, args=[clients[number % 4]]) for number in range(count)
        ]
        for deployer in deployers:
            deployer.start()
        for deployer in deployers:
            deployer.join(60)
        assert sorted(won) == list(range(1, count + 1))
        steps = [
            change["fields"]["version"]
            for entry in clients[0].history()
            for change in entry["changes"]
            if (change["kind"], change["name"]) == ("backend", "m")
        ]
        assert steps[1:] == [[str(n), str(n + 1)] for n in range(count)]
        print(f"{restarts(running)} controllers")
        assert restarts(running) > 1
        wait_until(lambda: policies.are_in_force(running.status()), 30, "all as it was")
        for client in clients:
            client.close()
