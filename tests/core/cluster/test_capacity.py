"""Replicas take resources of the host, wait where there are none, and status says for what."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.core.cluster import status
from greenroom.core.cluster.placement import PlacedHost, needs_of
from tests.core import requests as ask
from tests.core.worlds import Spec, World


def deploy(name: str, code: bytes = b"one", replicas: int = 1, **options: Any) -> ask.Request:
    spec = Spec("d", code, {"num_replicas": replicas}, actor_options=options)
    return ask.deploy(name, spec, route=f"/{name}")


def world_with(**total: float) -> World:
    return World(capacity={"num_cpus": 0.0, "num_gpus": 0.0, "memory": 0.0, **total})


def message(world: World, name: str) -> str:
    return str(status.applications(world.cluster)[name]["message"])


def taken(world: World, name: str = "num_cpus") -> float:
    return world.cluster.placement.shown()[name]["taken"]


def test_replicas_start_as_far_as_there_is_room_and_the_rest_when_there_is_more() -> None:
    world = world_with(num_cpus=4)
    world.complete(deploy("a", replicas=2, num_cpus=1))
    goal = world.request(deploy("b", replicas=2, num_cpus=1.5))
    world.go_on(5)
    assert len(world.running("b#d")) == 1
    assert taken(world) == 3.5
    assert message(world, "b") == (
        "d: 1 of 2 replicas run; a replica needs 1.5 num_cpus, and 0.5 num_cpus of 4 num_cpus is "
        "free: it fits when 1 num_cpus more is given back by a#d (2 num_cpus), b#d (1.5 num_cpus)"
    )
    assert world.goal_state(goal) == "pending"
    world.complete(deploy("a", replicas=1, num_cpus=1))
    assert world.goal_state(goal) == "succeeded"
    assert taken(world) == 4


def test_a_replica_gives_its_part_back_when_its_process_is_gone_not_before() -> None:
    world = world_with(num_cpus=1)
    world.complete(deploy("a", num_cpus=1))
    draining = world.running("a#d")[0]
    draining.stuck = True
    world.request(ask.undeploy("a"))
    world.request(deploy("b", num_cpus=1))
    world.go_on(5)
    assert list(world.processes.values()) == [draining]
    world.thaw()
    world.settle()
    assert len(world.running("b#d")) == 1


def test_what_no_host_has_is_said_to_be_too_much() -> None:
    world = world_with(num_cpus=4, memory=2 * 1024.0**3)
    world.request(deploy("a", num_cpus=8, memory=3 * 1024**3, resources={"disk": 1}))
    world.flush()
    told = message(world, "a")
    assert "a replica needs 8 num_cpus, and the host has 4 num_cpus in all: ask for less" in told
    assert "larger GREENROOM_NUM_CPUS" in told
    assert "needs 3 GiB of memory, and the host has 2 GiB of memory in all" in told
    assert "needs 1 disk, and the host has 0 disk in all" in told
    assert "larger GREENROOM_RESOURCES" in told
    assert world.processes == {}


def test_a_rolling_update_waits_for_the_room_that_it_needs_and_the_old_ones_serve() -> None:
    world = world_with(num_cpus=2)
    world.complete(deploy("a", replicas=2, num_cpus=1))
    goal = world.request(deploy("a", b"two", replicas=2, num_cpus=1))
    world.go_on(5)
    assert [process.code for process in world.running("a#d")] == [b"one"] * 2
    assert message(world, "a").startswith(
        "d: 0 of 2 replicas run the new version, 2 an old one; a replica needs 1 num_cpus"
    )
    assert world.goal_state(goal) == "pending"


def test_a_new_controller_counts_what_recorded_replicas_have() -> None:
    world = world_with(num_cpus=2)
    world.complete(deploy("a", replicas=2, num_cpus=1))
    world.boot()
    assert taken(world) == 2
    world.request(deploy("b", num_cpus=1))
    world.go_on(5)
    assert world.running("b#d") == []
    assert len(world.running("a#d")) == 2


def test_tenths_add_up() -> None:
    capacity = PlacedHost("", {"num_cpus": 1.0})
    for number in range(10):
        assert capacity.has_room({"num_cpus": 0.1})
        capacity.take(f"b#{number}", {"num_cpus": 0.1})
    assert not capacity.has_room({"num_cpus": 0.1})
    for number in range(10):
        capacity.give_back(f"b#{number}")
    capacity.give_back("b#0")
    assert capacity.has_room({"num_cpus": 1})


def test_many_holders_are_told_the_largest_first() -> None:
    capacity = PlacedHost("", {"gpu": 10})
    for number in range(5):
        capacity.take(f"b{number}#r", {"gpu": 2.0})
    capacity.take("b4#s", {"gpu": 0.0})
    told = capacity.why_no_room({"gpu": 1.0})
    assert told.endswith("given back by b0 (2 gpu), b1 (2 gpu), b2 (2 gpu) and 2 others")


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, {}),
        ({"num_cpus": 0, "memory": 5}, {"memory": 5}),
        ({"num_gpus": 0.5, "resources": {"disk": 1, "net": 0}}, {"num_gpus": 0.5, "disk": 1}),
    ],
)
def test_what_is_not_asked_for_is_not_needed(options: Any, needs: Any) -> None:
    assert needs_of(options) == needs
