"""Each step of a rollout begins anew: its clocks, what counts as slow, who has to hold it."""

from __future__ import annotations

import pytest

from greenroom.core.rollouts.rollouts import UNDER_WAY, WENT_BACK
from tests.core.rollouts.steering import HOLD_S, begun, report, state, tally, traffic, with_endpoint
from tests.core.worlds import World

READY_TIMEOUT_S = 60.0


@pytest.fixture
def world() -> World:
    return with_endpoint()


def die(world: World) -> None:
    world.die(world.running("v2")[0].tag)


def test_each_outage_of_the_new_backend_has_the_whole_time_limit(world: World) -> None:
    begun(world)
    for _ in range(3):
        die(world)
        world.wait(0.7 * READY_TIMEOUT_S)
        assert state(world)["state"] == UNDER_WAY
        world.work()
        world.wait(1)
    die(world)
    world.wait(READY_TIMEOUT_S + 1)
    assert state(world)["state"] == WENT_BACK


@pytest.mark.parametrize("after_s", [10.0, 0.9 * HOLD_S])
def test_an_outage_ends_it_on_time_whether_the_step_ends_before_or_after(
    world: World, after_s: float
) -> None:
    begun(world)
    world.wait(after_s)
    die(world)
    world.wait(READY_TIMEOUT_S - 1)
    assert state(world)["state"] == UNDER_WAY
    world.wait(2)
    assert state(world)["state"] == WENT_BACK


def test_an_outage_in_which_nothing_else_happens_ends_it_on_time(world: World) -> None:
    begun(world)
    world.cluster.state.placement.close_host("", "it is full")
    die(world)
    world.flush()
    died_at = world.now
    while state(world)["state"] == UNDER_WAY:
        due_at = world.cluster.next_due_at()
        assert due_at is not None
        world.now = due_at
        world.flush()
    assert world.now == died_at + READY_TIMEOUT_S


def test_each_step_holds_for_its_whole_time_also_after_a_new_controller(world: World) -> None:
    begun(world)
    world.wait(0.6 * HOLD_S)
    world.boot()
    world.wait(3)
    report(world, v1=tally(900), v2=tally(100))
    world.wait(0.5 * HOLD_S)
    assert state(world)["step"] == 2
    report(world, v1=tally(500), v2=tally(500))
    world.wait(0.7 * HOLD_S)
    assert state(world)["why"].startswith("no objection so far")
    world.wait(0.3 * HOLD_S)
    assert traffic(world) == {"v2": 1.0}


def test_each_step_has_a_bound_of_its_own_for_what_is_slow(world: World) -> None:
    """In the first one all was slow for a reason that is gone in the second."""
    begun(world, abort_if={"p95_latency_ratio": 1.5})
    report(world, v1=tally(900, seconds=1.0), v2=tally(100, seconds=1.0))
    world.wait(HOLD_S)
    assert state(world)["step"] == 2
    report(world, v1=tally(500, seconds=0.01), v2=tally(500, seconds=0.1))
    report(world, v1=tally(1000, seconds=0.01), v2=tally(1000, seconds=0.1))
    assert traffic(world) == {"v1": 1.0}
    assert "p95 latency" in state(world)["why"]


@pytest.mark.parametrize("hold_s", [100.1, 100.3])
def test_a_step_is_over_when_it_has_stood_for_as_long_as_it_is_to(hold_s: float) -> None:
    assert (1000.0 + hold_s) - 1000.0 < hold_s, "by the clock it stood for a moment less"
    world = with_endpoint()
    assert world.now == 1000.0
    begun(world, hold_s=hold_s)
    report(world, v1=tally(900), v2=tally(200))
    world.wait(hold_s + 1)
    assert state(world)["step"] == 2
