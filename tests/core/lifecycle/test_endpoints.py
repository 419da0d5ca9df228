"""Endpoints, their traffic and their shadows: what is refused, what repeats, what is remembered."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.core.errors import ConflictError, InvalidRequestError, UnknownNameError
from greenroom.core.routing.tables import EndpointTable
from tests.core import requests as ask
from tests.core.worlds import Spec, World


@pytest.fixture
def world() -> World:
    """Backends "v1", "v2", "v3"; endpoint "e" on "v1"; application "app" on "/"."""
    world = World()
    for tag in ("v1", "v2", "v3"):
        world.request(ask.create(tag))
    world.request(ask.endpoint("e", "v1", route="/e"))
    world.complete(ask.deploy("app", Spec("d", b"one", {})))
    return world


def refusal(world: World, change: ask.Request) -> str:
    """Return the text of a refusal that changed nothing."""
    before = dict(world.cluster.endpoints)
    with pytest.raises((ConflictError, InvalidRequestError, UnknownNameError)) as caught:
        change(world.cluster)
    world.cluster.advance(world.now)
    assert not world.cluster.take_changes()
    assert world.cluster.endpoints == before
    return str(caught.value)


# --- Traffic --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({}, "weights={}: must name at least one backend and its weight"),
        (["v1"], "weights=['v1']: must be a valid dictionary"),
        ({"v1": 0.5}, "the weights sum to 0.5: must be 1 within 1e-06"),
        ({"v1": 0.5, "v2": 0.6}, "the weights sum to 1.1: must be 1 within 1e-06"),
        ({"v1": 0.0, "v2": 0.0}, "the weights sum to 0: must be 1 within 1e-06"),
        ({"v1": 1 - 2e-6}, "the weights sum to 0.999998: must be 1 within 1e-06"),
        ({"v1": 1.5, "v2": -0.5}, "weights.v1=1.5: must be less than or equal to 1; "),
        ({"v1": 1.5, "v2": -0.5}, "weights.v2=-0.5: must be greater than or equal to 0"),
        ({"v1": True}, "weights.v1=True: must be a valid number"),
        ({"v1": "1"}, "weights.v1='1': must be a valid number"),
        ({"v1": float("nan")}, "weights.v1=nan: must be a finite number"),
        ({"v1": float("inf")}, "weights.v1=inf: must be a finite number"),
        (
            {"v1": 0.5, "nope": 0.25, "v9": 0.25},
            "weights: no backend is named 'nope', 'v9'; it could be: v1, v2, v3",
        ),
    ],
    ids=str,
)
def test_bad_weights_are_refused_naming_what_is_wrong(
    world: World, weights: Any, text: str
) -> None:
    assert text in refusal(world, ask.traffic("e", weights))


def test_traffic_goes_to_no_backend_of_an_application(world: World) -> None:
    (tag,) = [tag for tag in world.cluster.backends if tag.startswith("app#")]
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


def test_a_split_is_told_to_proxies_and_survives_a_crash(world: World) -> None:
    weights = {"v1": 0.9, "v2": 0.1, "v3": 0}
    world.complete(ask.traffic("e", weights))
    assert world.table("endpoint/e") == EndpointTable(
        name="e", route="/e", methods=("GET",), traffic=weights
    )
    world.boot()
    world.settle()
    assert world.cluster.endpoints["e"].traffic == weights


# --- Shadows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("proportion", [-0.1, 1.1, True, None, "0.5", float("nan")])
def test_a_bad_proportion_is_refused(world: World, proportion: Any) -> None:
    text = refusal(world, ask.shadow("e", "v2", proportion))
    assert text.startswith(f"shadow traffic 'e': proportion={proportion!r}: must be ")


def test_a_shadow_must_be_a_backend_that_no_deploy_takes_away(world: World) -> None:
    (tag,) = [tag for tag in world.cluster.backends if tag.startswith("app#")]
    for bad in ("nope", tag):
        assert refusal(world, ask.shadow("e", bad, 0.5)) == (
            f"shadow of endpoint 'e': backend: no backend is named '{bad}'; it could be: v1, v2, v3"
        )


def test_shadows_are_added_changed_and_ended_one_by_one(world: World) -> None:
    def shadows() -> Any:
        world.settle()
        return world.table("endpoint/e").shadows

    world.request(ask.shadow("e", "v3", 1))
    world.request(ask.shadow("e", "v2", 0.5))
    assert list(shadows().items()) == [("v2", 0.5), ("v3", 1.0)]
    ask.shadow("e", "v2", 0.5)(world.cluster)
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
    world.complete(ask.deploy("app", Spec("d", b"two", {})))
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
    before = dict(world.cluster.endpoints)
    with pytest.raises(InvalidRequestError, match="how='x'"):
        compared("x")
    assert world.cluster.endpoints == before


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
    assert "v3" not in world.cluster.backends


# --- Endpoints ------------------------------------------------------------------------------------


def test_the_same_endpoint_again_is_a_no_op_also_when_its_traffic_has_moved(world: World) -> None:
    world.request(ask.traffic("e", {"v2": 1.0}))
    world.request(ask.shadow("e", "v3", 1.0))
    world.complete(ask.delete("v1"))
    before = world.cluster.endpoints["e"]
    ask.endpoint("e", "v1", route="/e")(world.cluster)
    assert not world.cluster.take_changes()
    assert world.cluster.endpoints["e"] == before


def test_the_order_of_methods_makes_no_other_endpoint(world: World) -> None:
    world.complete(ask.endpoint("both", "v1", methods=("GET", "POST")))
    ask.endpoint("both", "v1", methods=("POST", "get"))(world.cluster)
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


def test_an_applications_endpoint_is_no_endpoint_of_anybody_elses_call(world: World) -> None:
    text = refusal(world, ask.endpoint("app#d", "v1", route="/"))
    assert "app#d" in text


def test_deleting_an_endpoint_twice_is_harmless_and_leaves_its_backends(world: World) -> None:
    world.request(ask.traffic("e", {"v1": 0.5, "v2": 0.5}))
    for _ in range(2):
        world.request(ask.unname("e"))
    world.settle()
    assert world.table("endpoint/e") is None
    assert {"v1", "v2", "v3"} <= set(world.cluster.backends)
