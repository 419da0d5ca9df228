"""Rollouts of an endpoint in a world: begun, reported on, ended by hand, and how they stand."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.core import operations as ops
from greenroom.core.rollouts.judging import Tally
from greenroom.core.rollouts.rollouts import PROMOTED, WENT_BACK
from tests.core import requests as ask
from tests.core.worlds import World

HOLD_S = 100.0


def start(to: str = "v2", endpoint: str = "e", **settings: Any) -> ask.Request:
    asked = {
        "steps": (0.1, 0.5, 1.0),
        "hold_s": HOLD_S,
        "abort_if": {"error_rate_increase": 0.0},
        "alpha": 0.01,
        "min_samples": 100,
        "ready_timeout_s": 60.0,
    } | settings
    return ask.do(ops.StartRollout, endpoint=endpoint, to=to, **asked)


def abort(world: World) -> None:
    world.change(lambda cluster: cluster.rollouts.end("e", WENT_BACK), "abort rollout 'e'")


def promote(world: World) -> None:
    world.change(lambda cluster: cluster.rollouts.end("e", PROMOTED), "promote rollout 'e'")


def with_endpoint() -> World:
    """Backends "v1" to "v3" that run; endpoint "e" on "v1"."""
    world = World()
    for tag in ("v1", "v2", "v3"):
        world.request(ask.create(tag))
    world.complete(ask.endpoint("e", "v1", route="/e"))
    return world


def tally(queries: int, bad: int = 0, seconds: float = 0.01) -> Any:
    counted = Tally()
    for number in range(queries):
        counted.count(500 if number < bad else 200, (seconds,))
    return counted.plain()


def report(world: World, proxy: str = "p", token: str | None = None, **counted: Any) -> None:
    """Let a proxy report what it has counted so far in the present step."""
    token = token or world.table("rollout/e")
    world.request(lambda cluster: cluster.rollouts.reported("e", token, proxy, counted))
    world.flush()


def traffic(world: World) -> Any:
    world.flush()
    return dict(world.table("endpoint/e").traffic)


def state(world: World) -> Any:
    return world.cluster.rollouts.status(world.now)["e"]


def begun(world: World, **settings: Any) -> str:
    """Begin a rollout, and return its goal when the first step stands."""
    goal: str = world.request(start(**settings))
    world.flush()
    assert traffic(world) == {"v1": pytest.approx(0.9), "v2": 0.1}
    return goal
