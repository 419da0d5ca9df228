"""Where replicas go, what they take of a host, and what status says where there is no room."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from greenroom.core.cluster import status
from greenroom.core.lifecycle.placement import PlacedHost, Placement, Request, needs_of
from tests.core import requests as ask
from tests.core.worlds import Spec, World


def placement_of(**hosts: dict[str, float]) -> Placement:
    placement = Placement()
    for name, total in hosts.items():
        placement.set_host(name, total)
    return placement


def place(placement: Placement, count: int, request: Request, backend: str = "b") -> list[str]:
    """Place so many replicas of one backend; return their hosts, as far as there is room."""
    siblings: Counter[str] = Counter()
    hosts: list[str] = []
    for number in range(count):
        host = placement.choose(request, siblings)
        if host is None:
            break
        placement.take(f"{backend}#{number}", host, request.needs)
        siblings[host] += 1
        hosts.append(host)
    return hosts


def test_replicas_of_a_backend_are_spread_whatever_they_need() -> None:
    placement = placement_of(a={"num_cpus": 8.0}, b={"num_cpus": 8.0}, c={"num_cpus": 8.0})
    assert Counter(place(placement, 6, Request())) == {"a": 2, "b": 2, "c": 2}
    needs = Request(needs={"num_cpus": 1})
    assert Counter(place(placement, 3, needs, "other")) == {"a": 1, "b": 1, "c": 1}


def test_what_does_not_fit_anywhere_waits_and_says_why_for_each_host() -> None:
    placement = placement_of(a={"num_cpus": 2.0}, b={"num_gpus": 1.0})
    request = Request(needs={"num_cpus": 1})
    assert place(placement, 5, request) == ["a", "a"]
    assert placement.why_not(request, {"a": 2}) == (
        "host a: a replica needs 1 num_cpus, and 0 num_cpus of 2 num_cpus is free: it fits when "
        "1 num_cpus more is given back by b (2 num_cpus); "
        "host b: a replica needs 1 num_cpus, and the host has 0 num_cpus in all: ask for less, or "
        "start the system with a larger GREENROOM_NUM_CPUS; or another host joins"
    )


def test_a_cluster_of_many_hosts_names_a_few_of_them() -> None:
    placement = placement_of(**{f"h{number}": {"num_cpus": 0.0} for number in range(9)})
    found = placement.why_not(Request(needs={"num_cpus": 1}), {})
    assert found.count(": a replica needs") == 3
    assert found.endswith("; and 6 other hosts; or another host joins")


def test_no_host_gets_more_of_a_backend_than_is_allowed() -> None:
    placement = placement_of(a={"num_cpus": 9.0}, b={"num_cpus": 9.0})
    request = Request(max_per_host=2)
    assert Counter(place(placement, 9, request)) == {"a": 2, "b": 2}
    found = placement.why_not(request, {"a": 2, "b": 2})
    assert "it has 2 of its replicas already, and max_replicas_per_host is 2" in found


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ({"zone": "b"}, "a replica needs zone=b, and it has zone=a"),
        ({"disk": "ssd"}, "a replica needs disk=ssd, and it has no disk"),
    ],
)
def test_labels_that_a_backend_asks_for_must_be_there(labels: dict[str, str], why: str) -> None:
    placement = Placement()
    placement.set_host("one", {"num_cpus": 1.0}, {"zone": "a"})
    assert placement.choose(Request(labels={"zone": "a"}), {}) == "one"
    assert placement.choose(Request(labels=labels), {}) is None
    assert placement.why_not(Request(labels=labels), {}) == why


def test_a_closed_host_gets_nothing_and_keeps_what_it_has() -> None:
    placement = placement_of(a={"num_cpus": 4.0}, b={"num_cpus": 4.0})
    placement.take("b#1", "a", {"num_cpus": 1})
    placement.close_host("a", "it is lost")
    assert not placement.is_open("a")
    assert place(placement, 2, Request()) == ["b", "b"]
    assert placement.shown("a")["num_cpus"]["taken"] == 1
    assert placement.shown()["num_cpus"]["total"] == 4
    placement.close_host("b", "it is lost")
    assert placement.why_not(Request(), {}).startswith("host a: it is lost; host b: it is lost")
    placement.open_host("a")
    assert placement.choose(Request(), {}) == "a"


# --- Resources of hosts ---------------------------------------------------------------------------


def deploy(name: str, code: bytes = b"one", replicas: int = 1, **options: Any) -> ask.Request:
    spec = Spec("d", code, {"num_replicas": replicas}, actor_options=options)
    return ask.deploy(name, spec, route=f"/{name}")


def world_with(**total: float) -> World:
    return World(capacity={"num_cpus": 0.0, "num_gpus": 0.0, "memory": 0.0, **total})


def message(world: World, name: str) -> str:
    return str(status.applications(world.cluster)[name]["message"])


def taken(world: World, name: str = "num_cpus") -> float:
    return world.cluster.state.placement.shown()[name]["taken"]


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
    world.converge()
    assert len(world.running("b#d")) == 1


def test_what_no_host_has_is_said_to_be_too_much() -> None:
    world = world_with(num_cpus=4, memory=2 * 1024.0**3)
    world.request(deploy("a", num_cpus=8, memory=3 * 1024**3, resources={"disk": 1}))
    world.flush()
    found = message(world, "a")
    assert "a replica needs 8 num_cpus, and the host has 4 num_cpus in all: ask for less" in found
    assert "larger GREENROOM_NUM_CPUS" in found
    assert "needs 3 GiB of memory, and the host has 2 GiB of memory in all" in found
    assert "needs 1 disk, and the host has 0 disk in all" in found
    assert "larger GREENROOM_RESOURCES" in found
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


def test_many_holders_are_reported_the_largest_first() -> None:
    capacity = PlacedHost("", {"gpu": 10})
    for number in range(5):
        capacity.take(f"b{number}#r", {"gpu": 2.0})
    capacity.take("b4#s", {"gpu": 0.0})
    found = capacity.why_no_room({"gpu": 1.0})
    assert found.endswith("given back by b0 (2 gpu), b1 (2 gpu), b2 (2 gpu) and 2 others")


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
