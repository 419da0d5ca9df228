"""A controller goes on without records that are lost, and refuses what it cannot know."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.core import operations as ops
from greenroom.core.cluster import status
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.errors import ConflictError, UnknownNameError
from greenroom.core.lifecycle.state import KINDS
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BACKEND_PREFIX, ENDPOINT_PREFIX, order_of_taking
from greenroom.core.routing.tickets import NewQuery, Refuse
from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.kv import MemoryStore
from tests.core import requests as ask
from tests.core.rollouts.steering import start
from tests.core.routing.queries import Query
from tests.core.worlds import Spec, World, made

Key = tuple[str, str]


def populated() -> World:
    """Make a cluster with records of every kind that it keeps."""
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
    return world


def flat(world: World) -> dict[Key, Any]:
    return {(kind, name): r for kind in KINDS for name, r in world.records[kind].items()}


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
    cluster.state.long_poll.listen("proxy", (1, 1, "proxy"), 0, "proxy")
    ((_, update),) = cluster.state.long_poll.take_updates()
    router = Router(lambda: 0.5)
    for key, (_, table) in sorted(update.snapshots.items(), key=order_of_taking):
        kind, _, name = key.partition("/")
        if kind + "/" == ENDPOINT_PREFIX:
            router.set_endpoint(name, table, 0.0)
        elif kind + "/" == BACKEND_PREFIX:
            router.set_backend(name, table, 0.0)
    return router.submit(
        NewQuery("caller", Query(1, endpoint=None, path=path, http_method="GET")), 0.0
    )


def refused(cluster: Cluster, path: str) -> str:
    effects = answer(cluster, path)
    (refusal,) = (effect for effect in effects if isinstance(effect, Refuse))
    assert refusal.kind == "DeploymentUnavailableError", refusal
    return str(refusal.text)


def test_records_of_every_kind_are_loaded_as_they_were_saved(world: World) -> None:
    records = flat(world)
    kinds = {"backend", "endpoint", "application", "goal", "history", "rollout", "listener"}
    assert {kind for kind, _ in records} >= kinds
    checkpoints = Checkpoints(MemoryStore())
    checkpoints.save(records)
    assert {(kind, n): r for kind in KINDS for n, r in checkpoints.load(kind).items()} == records


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


@pytest.mark.parametrize("is_all", [True, False], ids=["everything is deleted", "it is forgotten"])
def test_what_no_deploy_brings_again_is_lost_until_then(world: World, is_all: bool) -> None:
    deployed, others = ("backend", "other#C"), {("goal", "g"), ("unknown", "changes")}
    cluster = without(world, deployed, *others)
    made(cluster, ask.do(ops.DeleteEverything if is_all else ops.ForgetLost))
    changes = cluster.take_changes()
    assert changes.deletes >= others
    assert cluster.state.lost == (set() if is_all else {deployed})
    checkpoints = Checkpoints(MemoryStore())
    checkpoints.save(changes.puts, changes.deletes)  # which these names are nothing special to


def test_what_is_saved_again_in_the_same_turn_is_not_forgotten(world: World) -> None:
    cluster = without(world, ("token", "ci"))
    made(cluster, ask.do(ops.CreateToken, name="ci", digest="0" * 64, holder_role="admin"))
    made(cluster, ask.do(ops.ForgetLost))
    changes = cluster.take_changes()
    assert ("token", "ci") in changes.puts
    assert ("token", "ci") not in changes.deletes


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


@pytest.mark.parametrize(("tag", "is_deleted"), [("v1", False), ("again", True)])
def test_lost_code_is_stored_again_by_a_deploy(world: World, tag: str, is_deleted: bool) -> None:
    digest = world.records["backend"]["v1"].newest.code_digest
    cluster = without(world, ("code", digest))
    if is_deleted:
        made(cluster, ask.do(ops.DeleteEverything))
        cluster.take_changes()
        assert not cluster.state.code_use.is_stored(digest), "the history needs it"
    made(cluster, ask.create(tag, b"one"))
    assert cluster.take_changes().puts["code", digest] == b"one"
    assert not cluster.state.lost


def test_a_change_does_not_get_the_id_of_a_lost_one(world: World) -> None:
    last_id = world.cluster.state.history.last_id
    cluster = without(world, ("history", f"{last_id:010d}"))
    with pytest.raises(UnknownNameError, match=rf"{last_id} .* is lost .* to {last_id - 1}"):
        made(cluster, ask.undo(None))
    with pytest.raises(ConflictError, match=rf"the version is {last_id}; look"):
        made(cluster, ask.do(ops.DeployApplications, applications=(), if_version=1))
    made(cluster, ask.create("v3", b"three"))
    assert cluster.state.history.get(None).id == last_id + 1


def test_what_the_store_finds_lost_meanwhile_is_saved_again_or_can_be_forgotten(
    world: World,
) -> None:
    cluster, others = without(world), {("unknown", "changes"), ("goal", "g"), ("code", "c")}
    cluster.advance(world.now)
    cluster.take_changes()
    known = flat(world)
    assert not cluster.found_lost(())
    assert cluster.found_lost([*known, *others])
    assert cluster.take_changes().puts == known
    assert cluster.state.lost == others
    assert not cluster.found_lost(others), "they are known"
    forgotten = made(cluster, ask.do(ops.ForgetLost))
    assert forgotten == [["goal", "g"], ["unknown", "changes"]]
