"""A controller recovers from a store of which a file is damaged, and from records that are lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from greenroom.core import operations as ops
from greenroom.core.cluster import status
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.lifecycle.state import KINDS
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BACKEND_PREFIX, ENDPOINT_PREFIX, order_of_taking
from greenroom.core.routing.tickets import Refuse
from greenroom.persistence import filesystem
from greenroom.persistence.checkpoints import CODE, Checkpoints
from greenroom.persistence.filesystem import FileLocation
from tests.core import requests as ask
from tests.core.rollouts.test_rollouts import start
from tests.core.routing.queries import Query
from tests.core.worlds import Spec, World, made
from tests.persistence.disks import UnsyncedDisk, copy_with_damage

Key = tuple[str, str]


def populated(saved: Callable[[World], None] = lambda _: None) -> World:
    """Make a cluster with records of every kind that it keeps; ``saved`` is called after each."""
    world = World()
    steps: list[ask.Request] = [
        ask.create("v1", b"one"),
        ask.create("v2", b"two"),
        ask.endpoint("e", "v1", route="/e"),
        ask.deploy("app", Spec("A", b"a", {}), Spec("B", b"b", {}), route="/"),
        ask.deploy("other", Spec("C", b"c", {}), route="/s"),
        ask.update("v2", num_replicas=2),
        ask.endpoint("gone", "v2"),
        ask.unname("gone"),
        ask.shadow("e", "v2", 0.5),
        ask.shadow("e", "v2", 0.0),
        start(),
        ask.deploy("other", Spec("C", b"c2", {}), route="/s"),
    ]
    for step in steps:
        world.change(step)
        for _ in range(5):  # a rollout does not settle
            world.work()
            world.wait(1.0)
        saved(world)
    return world


def flat(world: World) -> dict[Key, Any]:
    return {(kind, name): r for kind in KINDS for name, r in world.records[kind].items()}


@pytest.fixture(scope="module", name="stored")
def store_all(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    """A store into which a cluster has saved all along."""
    path = tmp_path_factory.mktemp("populated") / "store"
    before: dict[Key, Any] = {}
    code: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem, "SPARE", 20_000)
        store = FileLocation(path, disk=UnsyncedDisk()).open()
        checkpoints = Checkpoints(store)

        def saved(world: World) -> None:
            now = flat(world)
            puts = {key: record for key, record in now.items() if before.get(key) != record}
            deletes = [*(before.keys() - now.keys()), *((CODE, d) for d in code - set(world.code))]
            blobs = [blob for digest, blob in world.code.items() if digest not in code]
            checkpoints.save(puts, deletes, code=blobs)
            before.clear()
            before.update(now)
            code.clear()
            code.update(world.code)

        world = populated(saved)
        store.close()
    return path, world


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    "damage", [flip, truncate, zero, Path.unlink], ids=["flipped", "truncated", "zeroed", "removed"]
)
def test_a_controller_has_all_records_whatever_becomes_of_one_file(
    stored: tuple[Path, World], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    template, world = stored
    expected = flat(world)
    assert {kind for kind, _ in expected} >= {"backend", "endpoint", "application", "goal"}
    assert {kind for kind, _ in expected} >= {"history", "rollout", "listener"}
    files = sorted(file.relative_to(template) for file in template.rglob("*") if file.is_file())
    for name in files:
        path = tmp_path / "damaged"
        copy_with_damage(template, path, [name], damage)
        store = FileLocation(path, disk=UnsyncedDisk()).open()
        checkpoints = Checkpoints(store)
        records = {kind: checkpoints.load(kind) for kind in KINDS}
        found = {(kind, n): record for kind in KINDS for n, record in records[kind].items()}
        assert found == expected, name
        assert not checkpoints.lost, name
        assert store.epoch == 2, name
        assert all(checkpoints.load_code(digest) == code for digest, code in world.code.items())
        Cluster(records, store.epoch, 1.0).advance(2.0)
        store.close()
        shutil.rmtree(path)


# --- What is lost ---------------------------------------------------------------------------------


def without(world: World, *lost: Key) -> Cluster:
    """Return the cluster of a controller that begins without these records."""
    records = {
        kind: {name: r for name, r in world.records[kind].items() if (kind, name) not in lost}
        for kind in KINDS
    }
    return Cluster(records, 99, world.now, lost=lost)


def answer(cluster: Cluster, path: str) -> Any:
    """Return what a router does that has a cluster's tables with a query for a path."""
    cluster.state.long_poll.open()
    news = cluster.state.long_poll.listen("proxy", 0)
    assert news is not None
    router = Router(lambda: 0.5)
    for key, (_, table) in sorted(news.snapshots.items(), key=order_of_taking):
        kind, _, name = key.partition("/")
        if kind + "/" == ENDPOINT_PREFIX:
            router.set_endpoint(name, table, 0.0)
        elif kind + "/" == BACKEND_PREFIX:
            router.set_backend(name, table, 0.0)
    return router.submit("caller", Query(1, endpoint=None, path=path, http_method="GET"), 0.0)


def refused(cluster: Cluster, path: str) -> str:
    effects = answer(cluster, path)
    (refusal,) = (effect for effect in effects if isinstance(effect, Refuse))
    assert refusal.kind == "DeploymentUnavailableError", refusal
    return str(refusal.text)


def test_no_lost_record_stops_a_controller(world: World) -> None:
    for key in flat(world):
        cluster = without(world, key)
        for seconds in (0.0, 1.0, 5.0, 40.0, 400.0):
            cluster.advance(world.now + seconds)
            cluster.take_changes()
        for shown in (status.applications, status.backends, status.endpoints, status.goals):
            shown(cluster)
        cluster.rollouts.status(world.now)
        made(cluster, ask.do(ops.DeleteEverything))
        cluster.advance(world.now + 500.0)


@pytest.fixture(scope="module", name="world")
def make_world() -> World:
    return populated()


@pytest.mark.parametrize("also", [[], [("application", "other")]], ids=["alone", "with its route"])
def test_the_route_of_a_lost_endpoint_is_refused_and_not_anothers(
    world: World, also: list[Key]
) -> None:
    cluster = without(world, ("endpoint", "other#C"), *also)
    assert "its record in the store is damaged" in refused(cluster, "/s/deeper")
    assert "damaged" not in str(answer(cluster, "/elsewhere"))


def test_what_has_traffic_of_a_lost_backend_is_refused_at_once(world: World) -> None:
    cluster = without(world, ("backend", "other#C"))
    assert "its record in the store is damaged" in refused(cluster, "/s")
    (deployment,) = status.applications(cluster)["other"]["deployments"].values()
    assert deployment["status"] == "UNHEALTHY"
    assert "deploy it again" in deployment["message"]


@pytest.mark.parametrize("kind", ["endpoint", "backend"])
def test_a_deploy_brings_back_what_is_lost(world: World, kind: str) -> None:
    cluster = without(world, (kind, "other#C"))
    made(cluster, ask.deploy("other", Spec("C", b"c3", {}), route="/s"))
    cluster.advance(world.now)
    changes = cluster.take_changes()
    assert (kind, "other#C") in changes.puts
    assert not cluster.state.lost
    assert "damaged" not in str(answer(cluster, "/s"))


def test_an_application_that_is_lost_in_part_can_be_deleted(world: World) -> None:
    lost = ("application", "other"), ("endpoint", "other#C")
    cluster = without(world, *lost)
    made(cluster, ask.undeploy("other"))
    cluster.advance(world.now)
    assert cluster.take_changes().deletes >= set(lost)
    assert cluster.state.backends["other#C"].record.deleting
    assert not cluster.state.lost


@pytest.mark.parametrize("lost", [(("application", "app"),), ()], ids=["damaged", "forgotten"])
@pytest.mark.parametrize("is_all", [True, False], ids=["everything", "one"])
def test_no_replica_outlives_an_application_without_a_record(
    world: World, lost: tuple[Key, ...], is_all: bool
) -> None:
    cluster = without(world, *lost)
    cluster.state.applications.pop("app", None)
    assert made(cluster, ask.do(ops.DeleteEverything) if is_all else ask.undeploy("app"))
    assert all(cluster.state.backends[tag].record.deleting for tag in ("app#A", "app#B"))
    assert not {"app#A", "app#B"} & cluster.state.endpoints.keys()
    cluster.take_changes()
    assert not cluster.state.lost


def test_lost_code_is_stored_again_by_a_deploy(world: World) -> None:
    digest = world.records["backend"]["v1"].newest.code_digest
    cluster = without(world, (CODE, digest))
    made(cluster, ask.create("v1", b"one"))
    assert cluster.take_changes().code == {digest: b"one"}
    assert not cluster.state.lost
