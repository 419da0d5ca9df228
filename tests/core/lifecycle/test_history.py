"""The history of changes: entries, repeated requests, plans and undo."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from greenroom.core.errors import ConflictError, UnknownNameError
from greenroom.core.lifecycle.history import described
from greenroom.core.records import RECORDER, REPLAY, HistoryRecord
from tests.core import requests as ask
from tests.core.worlds import BROKEN, Spec, World


def undo(world: World, entry_id: int | None = None) -> Any:
    return world.change(ask.undo(entry_id), "undo")


def entries(world: World) -> list[HistoryRecord]:
    return list(world.cluster.state.history)


def picture(world: World) -> Any:
    """Return all definitions, as they are saved."""
    cluster = world.cluster
    names = {
        "backend": cluster.state.backends,
        "endpoint": cluster.state.endpoints,
        "application": cluster.state.applications,
    }
    keys = [(kind, name) for kind, known in names.items() for name in sorted(known)]
    definitions = {key: cluster.state.definition(key) for key in keys}
    return {key: definition for key, definition in definitions.items() if definition is not None}


@pytest.fixture(name="world")
def make_world() -> World:
    world = World()
    world.change(ask.version(num_replicas=2), "deploy application 'app'")
    world.converge()
    return world


def test_an_entry_has_the_author_the_change_and_the_time(world: World) -> None:
    found = described(entries(world)[0])
    assert (found["id"], found["at"], found["user"], found["address"]) == (
        1,
        7.0,
        "ada",
        "10.0.0.1",
    )
    assert found["what"] == "deploy application 'app'"
    assert [(c["kind"], c["name"], c["change"]) for c in found["changes"]] == [
        ("application", "app", "added"),
        ("backend", "app#d", "added"),
        ("endpoint", "app#d", "added"),
    ]
    assert found["changes"][1]["fields"]["num_replicas"] == [None, 2]


def test_an_entry_is_saved_with_its_change_or_not_at_all(world: World) -> None:
    for point in ("before save", "after save", "amid effects"):
        world.crash_at = point
        world.change(ask.version(num_replicas=3, user_config=point), request=f"crash {point}")
        saved = world.records["history"]
        record = world.records["backend"]["app#d"]
        last = saved[max(saved)]
        assert last.after["backend", "app#d"].config == record.newest.config
        assert record.newest.config["user_config"] == point
        world.converge()
    assert len(entries(world)) == 4


def test_a_change_that_changes_nothing_or_is_refused_has_no_entry(world: World) -> None:
    world.change(ask.version(num_replicas=2))
    with pytest.raises(ConflictError):
        world.change(ask.deploy("other", Spec("d", b"two", {}), route="/"))
    assert len(entries(world)) == 1


def test_a_repeated_request_is_answered_and_changes_nothing_even_after_a_crash() -> None:
    world = World()
    first = world.change(ask.create("b"), request="r")
    world.change(ask.update("b", num_replicas=3))
    assert world.change(ask.create("b"), request="r") == first
    world.boot()
    assert world.change(ask.create("b"), request="r") == first
    assert world.cluster.state.backends["b"].config.num_replicas == 3
    assert len(entries(world)) == 2


def test_entries_survive_and_the_oldest_go(world: World) -> None:
    for number in range(205):
        world.change(ask.version(num_replicas=2, user_config=number))
    world.boot()
    kept = entries(world)
    assert len(kept) == len(world.records["history"]) == 200
    assert kept[-1].id == 206
    assert [entry.id for entry in kept] == sorted(entry.id for entry in kept)
    with pytest.raises(UnknownNameError, match=r"no change has the id 1 .*; kept are 7"):
        undo(world, 1)


def test_the_cost_of_an_entry_does_not_follow_the_size_of_the_cluster() -> None:
    world = World()
    for number in range(300):
        world.request(ask.create(f"b{number}"))
    world.change(ask.update("b7", user_config="x"))
    assert set(entries(world)[-1].after) == {("backend", "b7")}


UNDOABLE: list[tuple[str, ask.Request]] = [
    ("create a backend", ask.create("b")),
    ("new code", ask.version(b"two", num_replicas=2)),
    ("settings", ask.version(user_config="x", num_replicas=3)),
    ("another deployment", ask.deploy("app", Spec("e", b"two", {}))),
    ("another route", ask.deploy("app", Spec("d", b"one", {"num_replicas": 2}), route="/x")),
    ("delete the application", ask.undeploy("app")),
    ("another application", ask.deploy("other", Spec("d", b"two", {}), route="/o")),
]


@pytest.mark.parametrize("make", [c for _, c in UNDOABLE], ids=[name for name, _ in UNDOABLE])
def test_undo_restores_the_state_before_and_can_be_undone(world: World, make: ask.Request) -> None:
    before = picture(world)
    world.change(make)
    world.converge()
    after = picture(world)
    goal = undo(world)["goal"]
    world.converge()
    assert picture(world) == before
    assert world.goal_state(goal) == "succeeded"
    assert [process.code for process in world.running("app#d")] == [b"one"] * 2
    undo(world)
    assert picture(world) == after
    assert len(entries(world)) == 4


def refused(world: World, entry_id: int, *parts: str) -> None:
    before = picture(world)
    with pytest.raises(ConflictError) as caught:
        undo(world, entry_id)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert picture(world) == before


def test_undo_is_refused_where_a_later_change_touched_the_same(world: World) -> None:
    world.change(ask.version(b"two"), "deploy two")
    world.change(ask.version(b"three"), "deploy three")
    refused(world, 2, "deploy two", "change 3 (deploy three) changed backend 'app#d' later")


@pytest.mark.parametrize("kind", [RECORDER, REPLAY])
def test_a_recording_is_no_entry_and_stands_in_the_way_of_no_undo(world: World, kind: str) -> None:
    name = f"{kind}1a2b"
    world.change(ask.create("user's"))
    world.change(ask.shadow("app#d", "user's", 0.5))
    before = len(entries(world))
    world.change(ask.create(name))
    world.change(ask.endpoint(name, name))
    world.change(ask.shadow("app#d", name, 1.0))
    world.converge()
    assert world.cluster.state.endpoints["app#d"].shadows == {"user's": 0.5, name: 1.0}
    world.change(ask.version(num_replicas=3), "deploy amid it")
    world.change(ask.shadow("app#d", name, 0.0))
    world.change(ask.unname(name))
    world.change(ask.delete(name, force=True))
    world.converge()
    assert [entry.what for entry in entries(world)[before:]] == ["deploy amid it"]
    undo(world)
    world.converge()
    undo(world, 3)  # the user's shadow
    world.converge()
    assert world.cluster.state.endpoints["app#d"].shadows == {}
    assert world.cluster.state.backends["app#d"].config.num_replicas == 2
    assert not any(
        name in each for each in (world.cluster.state.backends, world.cluster.state.endpoints)
    )


def test_undo_is_refused_where_there_is_nothing_left_of_the_change(world: World) -> None:
    world.change(ask.version(BROKEN, num_replicas=2))
    world.converge()
    refused(world, 2, "rolled back")
    world.change(ask.version(b"two"))
    undo(world)
    refused(world, 3, "undone already")


def test_undo_is_refused_where_the_code_is_no_longer_stored(world: World) -> None:
    world.change(ask.undeploy("app"), "delete it")
    world.converge()
    for number in range(19):
        world.change(ask.create(f"b{number}", f"code {number}".encode()))
    assert b"one" in world.code.values(), "the last 20 changes can be undone"
    world.change(ask.create("b19", b"code 19"))
    assert b"one" not in world.code.values()
    refused(world, 2, "backend 'app#d'", "no longer stored", "deploy it from its source")


def deploy_alone(code: bytes) -> ask.Request:
    spec = Spec("alone", code, {})
    return ask.deploy_alone(spec, "/alone")


def test_code_that_a_change_replaces_is_kept_for_its_undo_however_old_it_is(world: World) -> None:
    """The history had forgotten it, and takes it up in the step in which the backend lets it go."""
    world.change(deploy_alone(BROKEN))
    world.converge()
    for number in range(20):
        world.change(ask.create(f"b{number}", f"code {number}".encode()))
    assert BROKEN in world.code.values()
    world.change(deploy_alone(b"two"))
    assert BROKEN in world.code.values()
    undo(world)


def works_in(folder: bytes, *given: bytes) -> ask.Request:
    options = {"runtime_env": {"working_dir": hashlib.sha256(folder).hexdigest()}}
    return ask.deploy("app", Spec("d", b"one", {}, None, options), folders=given)


def test_a_folder_is_stored_while_a_backend_or_the_latest_history_needs_it(world: World) -> None:
    with pytest.raises(ConflictError, match=r"runtime_env of 'app#d' .* not stored any more"):
        world.change(works_in(b"zip one"))
    world.change(works_in(b"zip one", b"zip one"))
    world.converge()
    world.change(works_in(b"zip two", b"zip two"))
    world.converge()
    assert {b"zip one", b"zip two"} <= set(world.code.values())
    undo(world)
    world.converge()
    world.change(works_in(b"zip two"))  # without sending it again
    world.converge()
    for number in range(20):
        world.change(ask.create(f"b{number}", f"code {number}".encode()))
    assert b"zip one" not in world.code.values()
    assert b"zip two" in world.code.values()


def test_undo_is_refused_where_the_route_is_taken_meanwhile(world: World) -> None:
    world.change(ask.undeploy("app"))
    world.change(ask.deploy("other", Spec("d", b"two", {}), route="/"))
    refused(world, 2, "route '/' is taken by endpoint 'other#d'")


def test_undo_is_refused_where_a_backend_came_into_use(world: World) -> None:
    world.change(ask.create("b"), "create b")
    world.change(ask.endpoint("e", "b"))
    refused(world, 2, "backend 'b' has traffic of endpoint 'e'")
    world.change(ask.unname("e"))
    world.change(ask.delete("b"))
    refused(world, 4, "endpoint 'e' used backend 'b', which is gone")


def test_undo_of_nothing_says_so() -> None:
    with pytest.raises(UnknownNameError, match="nothing has been changed yet"):
        undo(World())


def test_a_plan_lists_what_a_deploy_would_change_and_changes_nothing(world: World) -> None:
    before, saved = picture(world), dict(world.records["backend"])
    specs = (Spec("d", b"two", {"num_replicas": 2}), Spec("e", b"one", {}))

    plan = ask.plan("app", *specs, ingress="e")
    found = world.request(plan)
    assert (picture(world), world.records["backend"]) == (before, saved)
    assert [(c["kind"], c["name"], c["change"]) for c in found] == [
        ("application", "app", "changed"),
        ("endpoint", "app#d", "changed"),
        ("backend", "app#d", "changed"),
        ("backend", "app#e", "added"),
        ("endpoint", "app#e", "added"),
    ]
    assert [sorted(c["fields"]) for c in found[:3]] == [
        ["deployments", "ingress"],
        ["route"],
        ["code_hash"],
    ]
    world.request(ask.deploy("app", *specs, ingress="e"))
    assert world.request(plan) == []


def test_equal_code_as_other_bytes_is_no_change(world: World) -> None:
    # Code that was just compiled may be pickled as other bytes than the same code from a .pyc.
    spec = Spec("d", b"one", {})
    world.request(ask.deploy("app", spec))
    before, count = picture(world), len(entries(world))
    other = spec._replace(code=b"one as other bytes")
    assert world.request(ask.plan("app", other)) == []
    world.request(ask.deploy("app", other))
    assert (picture(world), len(entries(world))) == (before, count)
    code = dict(world.code)
    world.change(ask.deploy("app", other._replace(config={"num_replicas": 2})))
    world.converge()
    assert world.code == code
    assert [process.code for process in world.running("app#d")] == [b"one"] * 2


# --- Deployments that stand alone -----------------------------------------------------------------


def alone(
    code: bytes = b"one", version: str | None = None, prev: str | None = None, **config: object
) -> ask.Request:
    spec = Spec("m", code, dict(config), version=version)
    return ask.deploy_alone(spec, "/m", prev)


def test_a_deployment_is_a_backend_and_an_endpoint_of_its_name() -> None:
    world = World()
    goal = world.change(alone(version="1"))
    world.converge()
    assert world.goal_state(goal) == "succeeded"
    assert world.table("endpoint/m").traffic == {"m": 1.0}
    assert world.table("endpoint/m").route == "/m"
    assert world.change(alone(version="1")) is None
    with pytest.raises(ConflictError, match="backend 'm' belongs to deployment 'm'"):
        world.change(ask.delete("m"))
    with pytest.raises(ConflictError, match="endpoint 'm' belongs to deployment 'm'"):
        world.change(ask.unname("m"))
    goal = world.change(ask.undeploy_alone("m"))
    world.converge()
    assert world.goal_state(goal) == "succeeded"
    assert (world.cluster.state.backends, world.cluster.state.endpoints) == ({}, {})
    assert world.change(ask.undeploy_alone("m")) is None


def test_a_prev_version_that_is_not_deployed_is_refused_naming_both() -> None:
    world = World()
    with pytest.raises(ConflictError, match="prev_version is '1', but it is not deployed"):
        world.change(alone(prev="1", version="2"))
    world.change(alone(version="1"))
    with pytest.raises(ConflictError, match="prev_version is '0', but version '1' is deployed"):
        world.change(alone(b"two", version="2", prev="0"))
    world.change(alone(b"two", version="2", prev="1"))
    with pytest.raises(ConflictError, match="prev_version is '1', but version '2' is deployed"):
        world.change(alone(b"two", version="2", prev="1"))
    world.converge()
    assert [process.code for process in world.running("m")] == [b"two"]


def test_a_deployment_takes_no_name_that_something_else_has() -> None:
    world = World()
    world.change(ask.create("m"))
    with pytest.raises(ConflictError, match="backend 'm' exists, and is not a deployment's"):
        world.change(alone())
    world.change(ask.create("b"))
    world.change(ask.delete("m"))
    world.converge()
    world.change(ask.endpoint("m", "b"))
    with pytest.raises(ConflictError, match="endpoint 'm' exists, and is not a deployment's"):
        world.change(alone())


def test_a_deployment_with_traffic_of_another_endpoint_is_not_deleted() -> None:
    world = World()
    world.change(alone())
    world.change(ask.endpoint("e", "m"))
    with pytest.raises(ConflictError, match="deployment 'm' has traffic of endpoint 'e'"):
        world.change(ask.undeploy_alone("m"))


def test_an_undo_makes_a_backend_anew_while_the_deployment_of_its_name_is_deleted() -> None:
    world = World()
    world.change(ask.create("b", b"one"))
    world.complete(ask.delete("b"))
    world.change(ask.delete("b"))
    world.complete(ask.deploy_alone(Spec("b", b"two", {})))
    undo(world)
    undo(world, 2)
    assert picture(world) == entries(world)[0].after
    world.converge()
    undo(world, 1)
    world.converge()
    assert world.cluster.state.is_empty
