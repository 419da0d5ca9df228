"""Endpoints, their traffic and shadows: what is refused, repeated, remembered and found."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from greenroom.core.cluster.cluster import Cluster
from greenroom.core.errors import ConflictError, InvalidRequestError, UnknownNameError
from greenroom.core.lifecycle.endpoints import Endpoints, Overlay
from greenroom.core.records import BackendRecord, Changes, EndpointRecord, Release
from tests.core import requests as ask
from tests.core.worlds import World, made


@pytest.fixture
def world() -> World:
    """Backends "v1", "v2", "v3"; endpoint "e" on "v1"; application "app" on "/"."""
    world = World()
    for tag in ("v1", "v2", "v3"):
        world.request(ask.create(tag))
    world.request(ask.endpoint("e", "v1", route="/e"))
    world.complete(ask.version())
    return world


def refusal(world: World, change: ask.Request) -> str:
    """Return the text of a refusal that changed nothing."""
    before = dict(world.cluster.state.endpoints)
    with pytest.raises((ConflictError, InvalidRequestError, UnknownNameError)) as caught:
        made(world.cluster, change)
    world.cluster.advance(world.now)
    assert not world.cluster.take_changes()
    assert world.cluster.state.endpoints == before
    return str(caught.value)


# --- Traffic --------------------------------------------------------------------------------------


def test_weights_of_unknown_backends_are_refused_naming_those_there_are(world: World) -> None:
    text = "weights: no backend is named 'nope', 'v9'; it could be: v1, v2, v3"
    assert text in refusal(world, ask.traffic("e", {"v1": 0.5, "nope": 0.25, "v9": 0.25}))


def test_traffic_goes_to_no_backend_of_an_application(world: World) -> None:
    (tag,) = [tag for tag in world.cluster.state.backends if tag.startswith("app#")]
    text = refusal(world, ask.traffic("e", {tag: 1.0}))
    assert text.endswith(f"no backend is named '{tag}'; it could be: v1, v2, v3")


def test_traffic_of_an_unknown_endpoint_is_refused_saying_what_there_is(world: World) -> None:
    text = "no endpoint is named 'nope'; there are: app#d, e"
    assert refusal(world, ask.traffic("nope", {"v1": 1.0})) == text
    assert refusal(world, ask.shadow("nope", "v1", 1.0)) == text


@pytest.mark.parametrize("total", [1 - 1e-6, 1 + 1e-6, 0.1 * 3 + 0.7])
def test_weights_need_to_sum_to_one_only_nearly(world: World, total: float) -> None:
    world.complete(ask.traffic("e", {"v1": 0.5, "v2": total - 0.5}))
    assert world.table("endpoint/e").traffic == {"v1": 0.5, "v2": total - 0.5}


# --- Shadows --------------------------------------------------------------------------------------


def test_a_shadow_must_be_a_backend_that_no_deploy_takes_away(world: World) -> None:
    (tag,) = [tag for tag in world.cluster.state.backends if tag.startswith("app#")]
    for bad in ("nope", tag):
        assert refusal(world, ask.shadow("e", bad, 0.5)) == (
            f"shadow of endpoint 'e': backend: no backend is named '{bad}'; it could be: v1, v2, v3"
        )


def test_shadows_are_added_changed_and_ended_one_by_one(world: World) -> None:
    def shadows() -> Any:
        world.converge()
        return world.table("endpoint/e").shadows

    world.request(ask.shadow("e", "v3", 1))
    world.request(ask.shadow("e", "v2", 0.5))
    assert list(shadows().items()) == [("v2", 0.5), ("v3", 1.0)]
    made(world.cluster, ask.shadow("e", "v2", 0.5))
    assert not world.cluster.take_changes()
    world.request(ask.traffic("e", {"v2": 1.0}))
    world.boot()
    assert shadows() == {"v2": 0.5, "v3": 1.0}, "they outlive a change of traffic and a crash"
    world.request(ask.shadow("e", "v2", 0.1))
    world.request(ask.shadow("e", "v3", 0))
    world.request(ask.shadow("e", "never there", 0))
    assert shadows() == {"v2": 0.1}


def test_an_applications_endpoint_keeps_its_shadows_when_it_is_redeployed(world: World) -> None:
    world.request(ask.shadow("app#d", "v2", 0.5))
    world.complete(ask.version(b"two"))
    table = world.table("endpoint/app#d")
    assert table.shadows == {"v2": 0.5}
    assert table.traffic == {"app#d": 1.0}
    world.complete(ask.undeploy("app"))
    world.request(ask.delete("v2"))


def test_a_shadow_is_compared_until_it_is_set_anew_without(world: World) -> None:
    def compared(compare: Any, proportion: float = 0.5) -> Any:
        world.complete(ask.shadow("e", "v2", proportion, compare))
        return world.table("endpoint/e").compares.get("v2")

    first = compared({"how": "json", "ignore": ("/at",)})
    assert first[1]["ignore"] == ("/at",)
    assert compared({"how": "json", "ignore": ["/at"]}, 0.1) == first, "what was found stays"
    other = compared("status")
    assert other[0] != first[0]
    world.boot()
    assert compared("status") == other
    assert compared(None) is None
    assert compared("status") != other, "a new beginning"
    assert compared("json", 0) is None
    before = dict(world.cluster.state.endpoints)
    with pytest.raises(InvalidRequestError, match="how='x'"):
        compared("x")
    assert world.cluster.state.endpoints == before


# --- What a policy names may not be deleted -------------------------------------------------------


def test_a_backend_that_a_policy_names_is_not_deleted(world: World) -> None:
    world.request(ask.endpoint("f", "v1"))
    world.request(ask.traffic("e", {"v1": 1.0, "v2": 0.0}))
    world.request(ask.shadow("f", "v2", 0.5))
    world.request(ask.shadow("f", "v3", 0.5))
    advice = "delete the endpoint, set its traffic elsewhere, or end the shadow first"
    for force in (False, True):
        assert refusal(world, ask.delete("v2", force=force)) == (
            f"backend 'v2' has traffic of endpoint 'e', a shadow of endpoint 'f'; {advice}"
        )
        assert refusal(world, ask.delete("v3", force=force)) == (
            f"backend 'v3' has a shadow of endpoint 'f'; {advice}"
        )
    world.request(ask.shadow("f", "v3", 0))
    world.complete(ask.delete("v3"))
    assert "v3" not in world.cluster.state.backends


# --- Endpoints ------------------------------------------------------------------------------------


def test_the_same_endpoint_again_is_a_no_op_also_when_its_traffic_has_moved(world: World) -> None:
    world.request(ask.traffic("e", {"v2": 1.0}))
    world.request(ask.shadow("e", "v3", 1.0))
    world.complete(ask.delete("v1"))
    before = world.cluster.state.endpoints["e"]
    made(world.cluster, ask.endpoint("e", "v1", route="/e"))
    assert not world.cluster.take_changes()
    assert world.cluster.state.endpoints["e"] == before


def test_what_endpoint_and_backend_say_of_retries_reaches_proxies(world: World) -> None:
    world.complete(ask.create("never", retryable=False))
    world.complete(ask.endpoint("again", "never", retryable=True))
    assert world.table("endpoint/again").retryable is True
    assert world.table("backend/never").retryable is False


def test_the_order_of_methods_makes_no_other_endpoint(world: World) -> None:
    world.complete(ask.endpoint("both", "v1", methods=("GET", "POST")))
    made(world.cluster, ask.endpoint("both", "v1", methods=("POST", "get")))
    assert not world.cluster.take_changes()


@pytest.mark.parametrize(
    "other",
    [
        ask.endpoint("e", "v2", route="/e"),
        ask.endpoint("e", "v1", route="/f"),
        ask.endpoint("e", "v1"),
        ask.endpoint("e", "v1", route="/e", methods=("GET", "POST")),
    ],
)
def test_the_same_name_with_other_settings_is_a_conflict(world: World, other: ask.Request) -> None:
    assert refusal(world, other) == (
        "endpoint 'e' exists with other settings: route '/e', methods ('GET',), traffic "
        "{'v1': 1.0}; delete it first"
    )


# --- Finding endpoints by route and backend -------------------------------------------------------


NAMES = st.sampled_from("abcd")
ROUTES = st.sampled_from([None, "/1", "/2"])
TAGS = st.sets(st.sampled_from("xyz"), max_size=2)


def record(name: str, route: str | None, traffic: set[str], shadows: set[str]) -> EndpointRecord:
    return EndpointRecord(
        name=name,
        route=route,
        traffic=dict.fromkeys(traffic, 1.0),
        shadows=dict.fromkeys(shadows, 1.0),
    )


@given(st.lists(st.tuples(NAMES, ROUTES, TAGS, TAGS, st.sampled_from(["", "remove", "lay"]))))
def test_what_is_found_is_what_a_check_of_each_finds(changes: list) -> None:
    made = Endpoints({}, Changes())
    for name, route, traffic, shadows, what in changes:
        if what == "remove":
            made.pop(name, None)
        elif what == "lay":
            if name in made:
                made.lay(name, Overlay(dict.fromkeys(traffic, 1.0)) if traffic else None)
        elif not [e for e in made.values() if e.route == route is not None and e.name != name]:
            made[name] = record(name, route, traffic, shadows)  # routes are given once
    for route in (None, "/1", "/2"):
        assert made.at(route) == [e for e in made.values() if route and e.route == route]
    for tag in "xyz":
        used = [n for n, e in made.items() if tag in {*e.traffic, *e.shadows}]
        used += [n for n in made if tag in made.served(n).traffic]
        assert {n for n in "abcd" if f"endpoint {n!r}" in made.uses(tag)} == set(used)
        assert not made.uses(tag, {("endpoint", n) for n in used})
    assert not Endpoints(made, Changes()).keys() ^ made.keys()


def quickest(backends: int) -> float:
    """Return the least seconds that a change of traffic takes, of many."""
    one = BackendRecord(tag="b0", releases=(Release(code_hash="h", code_digest="d", config={}),))
    records = {f"b{i}": replace(one, tag=f"b{i}") for i in range(backends)}
    endpoints = {f"e{i}": record(f"e{i}", f"/{i}", {f"b{i}"}, set()) for i in range(backends)}
    cluster = Cluster({"backend": records, "endpoint": endpoints}, 1, 0.0)
    seconds = []
    for number in range(50):
        began = time.perf_counter()
        made(cluster, ask.traffic("e0", {f"b{number % 2}": 1.0}))
        made(cluster, ask.shadow("e0", "b1", number % 2))
        made(cluster, ask.endpoint(f"n{number}", "b1", route=f"/n{number}"))
        made(cluster, ask.unname(f"n{number}"))
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def test_a_change_costs_the_same_in_a_large_cluster() -> None:
    assert quickest(3_000) < 4 * quickest(10)
