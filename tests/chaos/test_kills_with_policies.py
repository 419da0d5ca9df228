"""SIGKILL under load while traffic is split and copied to shadows: no response is lost or wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom import serve
from greenroom.core.errors import GreenroomError
from tests.support.kills import kill
from tests.support.load import GetLoad
from tests.support.systems import RunningSystem, running_system, wait_until

REPLICAS = {"v1": 2, "v2": 1, "good shadow": 1, "hanging shadow": 1, "no weight": 1}
KEYS = [f"customer-{i}" for i in range(20)]
VICTIMS = ("v1", "v2", "good shadow", "hanging shadow", "proxy", "controller", "thespian admin")


class Tagged:
    def __init__(self, tag: str) -> None:
        self.tag = tag

    async def __call__(self) -> str:
        return self.tag


class Forbidden:
    """Leaves a file behind when it is asked anything."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __call__(self) -> None:
        (self.folder / "was asked").touch()


def hang() -> None:
    time.sleep(1_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policies")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[RunningSystem]:
    with running_system(folder / "state", GREENROOM_HTTP_WORKERS="2") as started:
        client = serve.Client(started.connection, started.settings)
        targets = {tag: (Tagged, tag) for tag in REPLICAS} | {
            "hanging shadow": (hang,),
            "no weight": (Forbidden, str(folder)),
        }
        for tag, count in REPLICAS.items():
            config = {"num_replicas": count, "max_ongoing_requests": 20}
            client.wait_for_goal(client.create_backend(tag, *targets[tag], config=config), 20)
        client.create_endpoint("shop", backend="v1", route="/")
        client.set_traffic("shop", {"v1": 0.7, "v2": 0.3, "no weight": 0.0})
        for shadow in ("good shadow", "hanging shadow"):
            client.shadow_traffic("shop", shadow, 0.5)
        yield started
        # What hangs would be waited for.
        client.delete_endpoint("shop")
        client.wait_for_goal(client.delete_backend("hanging shadow", force=True), 20)


def settled(running: RunningSystem) -> bool:
    try:
        status = running.status()
    except (GreenroomError, TimeoutError):
        return False
    found = {
        tag: sum(replica["state"] == "RUNNING" for replica in backend["replicas"])
        for tag, backend in status["backends"].items()
        if backend["status"] == "HEALTHY"
    }
    return found == REPLICAS and status["endpoints"]["shop"]["shadows"] == {
        "good shadow": 0.5,
        "hanging shadow": 0.5,
    }


def pid_of(running: RunningSystem, victim: str) -> int:
    if victim not in REPLICAS:
        return running.pid_of(victim)
    pid: int = running.status()["backends"][victim]["replicas"][0]["pid"]
    return pid


def by_key(running: RunningSystem) -> dict[str, bytes]:
    found = {key: running.get("/", headers={"X-Serve-Shard-Key": key}) for key in KEYS}
    assert {status for status, _ in found.values()} == {200}
    return {key: body for key, (_, body) in found.items()}


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_death_costs_no_response_and_moves_no_key(
    running: RunningSystem, folder: Path, victim: str
) -> None:
    wait_until(lambda: settled(running), 20, "all as it should be")
    keys = by_key(running)
    assert set(keys.values()) == {b"v1", b"v2"}
    with GetLoad(running.settings.http.port, connections=16) as load:
        wait_until(lambda: load.tally.ok > 200, 15, "load on its way")
        kill(pid_of(running, victim))
        assert by_key(running) == keys, "also while it is being replaced"
        wait_until(lambda: settled(running), 20, f"all as before the death of {victim}")
        enough = load.tally.ok + 200
        wait_until(lambda: load.tally.ok > enough, 15, "load after the kill")
        tally = load.stop()
    print(f"{victim}: {tally.summary()}")
    assert not tally.failures, tally.summary()
    assert by_key(running) == keys
    assert not (folder / "was asked").exists(), "a backend of weight 0 was asked"
