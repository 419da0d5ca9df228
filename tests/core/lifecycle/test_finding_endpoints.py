"""Endpoints are found by route and by backend, and what that costs does not follow their number."""

from __future__ import annotations

import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.cluster.cluster import Cluster
from greenroom.core.lifecycle.endpoints import Endpoints, users_of
from greenroom.core.records import BackendRecord, EndpointRecord, Release
from tests.core import requests as ask

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


@given(st.lists(st.tuples(NAMES, ROUTES, TAGS, TAGS, st.booleans())))
def test_what_is_found_is_what_a_look_at_each_finds(changes: list) -> None:
    made = Endpoints({})
    for name, route, traffic, shadows, is_removed in changes:
        if is_removed:
            made.pop(name, None)
        elif not [e for e in made.values() if e.route == route is not None and e.name != name]:
            made[name] = record(name, route, traffic, shadows)  # routes are given once
    for route in (None, "/1", "/2"):
        assert made.at(route) == [e for e in made.values() if route and e.route == route]
    for tag in "xyz":
        assert users_of(made.using(tag), tag) == users_of(made.values(), tag)
    assert not Endpoints(made).keys() ^ made.keys()


def test_an_endpoint_that_is_gone_is_not_found() -> None:
    made = Endpoints({"e": record("e", "/r", {"b"}, {"s"})})
    assert made.pop("e") is not None
    assert made.pop("e", None) is None
    assert (made.at("/r"), made.using("b"), made.using("s")) == ([], [], [])


def quickest(backends: int) -> float:
    """Return the least seconds that a change of traffic takes, of many."""
    one = BackendRecord(tag="b0", releases=(Release(code_hash="h", code_digest="d", config={}),))
    records = {f"b{i}": replace(one, tag=f"b{i}") for i in range(backends)}
    endpoints = {f"e{i}": record(f"e{i}", f"/{i}", {f"b{i}"}, set()) for i in range(backends)}
    cluster = Cluster({"backend": records, "endpoint": endpoints}, 1, 0.0)
    seconds = []
    for number in range(50):
        began = time.perf_counter()
        ask.traffic("e0", {f"b{number % 2}": 1.0})(cluster)
        ask.shadow("e0", "b1", number % 2)(cluster)
        ask.endpoint(f"n{number}", "b1", route=f"/n{number}")(cluster)
        ask.unname(f"n{number}")(cluster)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def test_a_change_costs_the_same_in_a_large_cluster() -> None:
    assert quickest(3_000) < 4 * quickest(10)
