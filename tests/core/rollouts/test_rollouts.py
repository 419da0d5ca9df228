"""Rollouts over a cluster: steps, holding, going back, crashes, and what is refused meanwhile."""

from __future__ import annotations

import pytest

from greenroom.core.comparing.comparing import Differences
from greenroom.core.errors import ConflictError, InvalidRequestError, UnknownNameError
from greenroom.core.rollouts.judging import DEFAULT_RULES
from greenroom.core.rollouts.rollouts import WENT_BACK
from tests.core import requests as ask
from tests.core.rollouts.steering import (
    HOLD_S,
    abort,
    begun,
    promote,
    report,
    start,
    state,
    tally,
    traffic,
    with_endpoint,
)
from tests.core.worlds import World


@pytest.fixture
def world() -> World:
    return with_endpoint()


# --- The way up -----------------------------------------------------------------------------------


def test_it_goes_up_step_by_step_and_its_goal_is_reached_at_the_end(world: World) -> None:
    goal = begun(world)
    report(world, v1=tally(900), v2=tally(100))
    assert state(world)["why"] == "no objection so far; held for 0 of 100 s"
    world.wait(HOLD_S - 1)
    assert state(world)["step"] == 1
    world.wait(1)
    assert traffic(world) == {"v1": 0.5, "v2": 0.5}
    assert state(world)["new"]["queries"] == 0, "each step is judged by itself"
    world.wait(HOLD_S)
    assert state(world)["why"] == "waits for traffic: 0 of 100 queries of the new backend"
    report(world, v1=tally(100), v2=tally(100))
    assert traffic(world) == {"v2": 1.0}
    assert world.table("rollout/e") is None
    assert world.goal_state(goal) == "succeeded"
    assert (state(world)["state"], state(world)["why"]) == (
        "promoted",
        "no rule was broken in any step",
    )
    world.complete(ask.delete("v1"))


def test_without_traffic_it_holds_for_ever_and_does_not_spin(world: World) -> None:
    begun(world)
    world.wait(100 * HOLD_S)
    assert traffic(world)["v2"] == 0.1
    due_at = world.cluster.next_due_at()
    assert due_at is None or due_at > world.now


def test_all_other_backends_give_up_their_share_in_proportion(world: World) -> None:
    world.request(ask.traffic("e", {"v1": 0.6, "v3": 0.3, "v2": 0.1}))
    world.request(start(steps=(0.5, 1.0)))
    world.flush()
    assert traffic(world) == {"v1": pytest.approx(1 / 3), "v3": pytest.approx(1 / 6), "v2": 0.5}
    abort(world)
    assert traffic(world) == {"v1": 0.6, "v3": 0.3, "v2": 0.1}


def test_the_same_call_again_has_the_same_goal_and_another_is_refused(world: World) -> None:
    goal = begun(world)
    assert world.request(start(steps=[0.1, 0.5, 1])) == goal
    for other in (start(hold_s=1.0), start(to="v3")):
        with pytest.raises(ConflictError, match=r"rollout of endpoint 'e' to 'v2' is under way"):
            world.request(other)


# --- Going back -----------------------------------------------------------------------------------


def test_it_goes_back_when_errors_show_and_the_goal_says_why(world: World) -> None:
    goal = begun(world)
    report(world, v1=tally(900), v2=tally(100, bad=2))
    assert traffic(world)["v2"] == 0.1, "two may be chance"
    assert 1 < state(world)["evidence"] < 100
    assert state(world)["why"].startswith("in doubt about error_rate_increase, so it waits")
    report(world, v1=tally(900), v2=tally(100, bad=5))
    assert traffic(world) == {"v1": 1.0}
    found = state(world)
    assert found["state"] == "went back"
    assert found["evidence"] >= 100
    assert "5 of 100 queries were bad, 0 of 900 with the old one" in found["why"]
    assert world.goal_state(goal) == "failed"
    assert "rollout of endpoint 'e' to 'v2' went back" in world.cluster.state.goal(goal).error
    assert world.table("rollout/e") is None
    world.request(ask.delete("v2"))


def test_trouble_that_both_backends_have_is_no_reason(world: World) -> None:
    begun(world)
    report(world, v1=tally(900, bad=450), v2=tally(100, bad=50))
    assert traffic(world)["v2"] == 0.1


def test_slow_answers_are_judged_by_the_old_backends_p95(world: World) -> None:
    begun(world, abort_if={"p95_latency_ratio": 1.5})
    report(world, v1=tally(99), v2=tally(11))
    found = state(world)["why"]
    assert found == "waits for traffic: 11 of 100 queries of the new backend"
    report(world, v1=tally(900), v2=tally(100, seconds=0.019))
    report(world, v1=tally(1800), v2=tally(200, seconds=0.019))
    assert traffic(world)["v2"] == 0.1, "slower, but not by half"
    report(world, v1=tally(2700), v2=tally(300, seconds=0.03))
    assert traffic(world) == {"v1": 1.0}
    assert "p95 latency is 0.03" in state(world)["why"]


def test_an_absolute_p95_is_a_rule_too(world: World) -> None:
    begun(world, abort_if={"p95_latency_s": 0.1})
    report(world, v1=tally(900, seconds=5), v2=tally(100, seconds=0.09))
    assert traffic(world)["v2"] == 0.1
    report(world, v1=tally(900), v2=tally(100, seconds=0.2))
    assert traffic(world) == {"v1": 1.0}


# --- Differences ----------------------------------------------------------------------------------

RULE = {"difference_rate": 0.01, "error_rate_increase": 0.0}


def compared(world: World, different: int, of: int, replica: str = "r", **counts: int) -> None:
    """Let a replica report what it has found since the rollout began, and proxies their counts."""
    found = Differences(of, different, **counts)
    place = ("e", "v2", world.table("endpoint/e").compares["v2"][0])
    world.cluster.differences.reported(replica, {place: found.plain()})
    report(world, v1=tally(900), v2=tally(100))


def test_different_answers_send_it_back_and_the_reason_says_how_many(world: World) -> None:
    world.request(ask.shadow("e", "v2", 0.1, compare="json"))
    goal = begun(world, abort_if=RULE)
    compared(world, different=1, of=60)
    found = "waits for traffic: 60 of 100 compared answers"
    assert state(world)["why"] == found
    compared(world, different=1, of=60, not_compared=7)
    assert state(world)["why"] == f"{found}; 7 could not be compared"
    compared(world, different=3, of=110)
    assert state(world)["why"].startswith("in doubt about difference_rate, so it waits for more")
    compared(world, different=9, of=70, replica="another")
    assert traffic(world) == {"v1": 1.0}
    why = "difference_rate: 12 of 180 compared answers were different; at most 0.01 of them may be"
    assert (state(world)["state"], state(world)["why"]) == ("went back", why)
    assert why in world.cluster.state.goal(goal).error
    world.request(ask.shadow("e", "v2", 0.0))
    world.boot()
    found = state(world)["rules"]["difference_rate"]
    assert found["finding"] in why, "the comparison is over, and what it has shown is kept"
    assert found["evidence"] > 100


def test_what_was_compared_before_the_rollout_or_before_a_restart_does_not_mislead(
    world: World,
) -> None:
    world.request(ask.shadow("e", "v2", 0.1, compare="json"))
    world.flush()
    earlier = ("e", "v2", world.table("endpoint/e").compares["v2"][0])
    begun(world, abort_if=RULE)
    bad = Differences(100, 100).plain()
    world.cluster.differences.reported("r", {earlier: bad})
    report(world, v1=tally(900), v2=tally(100))
    assert state(world)["why"] == "waits for traffic: 0 of 100 compared answers"
    compared(world, different=0, of=100)
    world.boot()
    world.wait(3)
    report(world, v1=tally(900), v2=tally(100))
    assert state(world)["why"] == "waits for traffic: 0 of 100 compared answers"
    compared(world, different=0, of=200)
    assert state(world)["why"].startswith("no objection so far")
    world.request(ask.shadow("e", "v2", 0.0))
    report(world, v1=tally(900), v2=tally(100))
    assert state(world)["why"] == "waits for traffic: 0 of 100 compared answers"


def test_no_difference_at_all_may_be_asked_for_and_the_other_rules_stay(world: World) -> None:
    world.request(ask.shadow("e", "v2", 0.1, compare="json"))
    begun(world, abort_if={"difference_rate": 0})
    rules = {name: rule["limit"] for name, rule in state(world)["rules"].items()}
    assert rules == {**DEFAULT_RULES, "difference_rate": 0.0}
    compared(world, different=0, of=20_000)
    assert traffic(world)["v2"] == 0.1
    compared(world, different=1, of=20_001)
    assert traffic(world) == {"v1": 1.0}


def test_answers_that_are_not_compared_cannot_be_judged(world: World) -> None:
    world.request(ask.shadow("e", "v2", 0.1))
    with pytest.raises(InvalidRequestError) as caught:
        world.request(start(abort_if={"difference_rate": 0.01}))
    message = (
        "abort_if['difference_rate']: no answers of 'v2' are compared with those of endpoint 'e'"
    )
    assert str(caught.value).startswith(message)
    assert world.cluster.rollouts.status(world.now) == {}


# --- A new backend that does not run --------------------------------------------------------------


def test_it_waits_for_the_new_backend_and_ends_past_the_deadline(world: World) -> None:
    world.request(ask.create("v4", num_replicas=2))
    goal = world.request(start(to="v4"))
    world.flush()
    assert traffic(world) == {"v1": 1.0, "v4": 0.0}
    assert state(world)["why"] == "backend 'v4' is not ready: 0 of 2 replicas run"
    world.wait(59)
    assert state(world)["state"] == "under way"
    world.wait(2)
    assert traffic(world) == {"v1": 1.0}
    assert world.goal_state(goal) == "failed"
    assert "no replica of 'v4' ran for 60 s" in state(world)["why"]


def test_a_new_controller_goes_on_where_the_old_one_was(world: World) -> None:
    goal = begun(world)
    report(world, v1=tally(900), v2=tally(100, bad=3))
    world.boot()
    world.wait(3)
    assert (state(world)["state"], state(world)["step"]) == ("under way", 1)
    report(world, v1=tally(900), v2=tally(100, bad=3))
    report(world, v1=tally(900), v2=tally(100, bad=5))
    assert traffic(world) == {"v1": 1.0}
    world.boot()
    world.wait(3)
    assert state(world)["state"] == "went back"
    assert world.goal_state(goal) == "failed"


# --- Restarts -------------------------------------------------------------------------------------


def test_a_new_controller_does_not_begin_with_a_save_of_what_was_counted(world: World) -> None:
    """One that dies of each save would otherwise get to nothing else."""
    begun(world)
    report(world, v1=tally(900), v2=tally(100))
    world.wait(HOLD_S / 2)
    saved = world.records["rollout"]["e"]
    for _ in range(3):
        world.boot()
        world.wait(HOLD_S / 20)
    assert world.records["rollout"]["e"] is saved
    world.wait(HOLD_S / 5)
    report(world, v1=tally(901), v2=tally(100))
    assert world.records["rollout"]["e"] is not saved


@pytest.mark.parametrize("point", ["before save", "after save"])
def test_a_crash_amid_a_decision_loses_neither_it_nor_the_traffic(world: World, point: str) -> None:
    begun(world)
    world.crash_at = point
    report(world, v1=tally(900), v2=tally(100, bad=9))
    world.wait(3)
    if state(world)["state"] == "under way":
        report(world, v1=tally(900), v2=tally(100, bad=9))
    assert traffic(world) == {"v1": 1.0}
    assert state(world)["state"] == "went back"


def test_what_a_dead_proxy_counted_is_remembered_and_saved_coarsely(world: World) -> None:
    begun(world)
    world.wait(HOLD_S / 2)
    report(world, "dead", v1=tally(450), v2=tally(50))
    world.wait(HOLD_S / 10)
    world.boot()
    world.wait(3)
    report(world, "p", v1=tally(450), v2=tally(50))
    assert state(world)["new"]["queries"] == 100
    assert state(world)["held_s"] == pytest.approx(0.6 * HOLD_S, abs=5)


# --- Interference ---------------------------------------------------------------------------------


def test_other_changes_of_the_traffic_or_backends_are_refused_meanwhile(world: World) -> None:
    world.request(ask.create("v4"))
    world.request(start(to="v4"))
    world.flush()
    refused = [ask.traffic("e", {"v1": 1.0}), ask.delete("v1"), ask.delete("v4", force=True)]
    for change in refused:
        with pytest.raises(ConflictError) as caught:
            world.request(change)
        assert "rollout of endpoint 'e'" in str(caught.value)
        assert "abort_rollout('e') or promote_rollout('e') first" in str(caught.value)
    world.request(ask.shadow("e", "v3", 0.5))
    world.flush()
    assert world.table("endpoint/e").shadows == {"v3": 0.5}
    abort(world)
    world.request(ask.traffic("e", {"v3": 1.0}))
    world.request(ask.delete("v1"))
    world.request(ask.delete("v4"))


def test_it_is_ended_by_hand_either_way_and_that_may_be_repeated(world: World) -> None:
    goal = begun(world)
    abort(world)
    abort(world)
    assert traffic(world) == {"v1": 1.0}
    assert "it was aborted by request" in world.cluster.state.goal(goal).error
    assert [entry.what for entry in world.cluster.state.history][-1] == "abort rollout 'e'"
    with pytest.raises(UnknownNameError, match="no rollout of endpoint 'e' is under way"):
        promote(world)
    goal = begun(world)
    promote(world)
    promote(world)
    assert traffic(world) == {"v2": 1.0}
    world.flush()
    assert world.goal_state(goal) == "succeeded"
    with pytest.raises(UnknownNameError, match="no endpoint is named 'nope'"):
        world.request(lambda cluster: cluster.rollouts.end("nope", WENT_BACK))


def test_an_undo_of_what_it_changed_ends_it(world: World) -> None:
    earlier = world.cluster.state.history.last_id
    goal = world.change(start(), "rollout 'e'")
    world.flush()
    entries = [entry.what for entry in world.cluster.state.history if entry.id > earlier]
    assert entries == ["rollout 'e'"], "steps change no definition"
    assert world.cluster.state.endpoints["e"].traffic == {"v1": 1.0}
    with pytest.raises(InvalidRequestError, match=r"changed no definition.*ENDPOINT --abort"):
        world.change(ask.undo(None))
    world.change(ask.shadow("e", "v3", 0.5))
    world.change(ask.undo(None))
    world.flush()
    assert traffic(world) == {"v1": pytest.approx(0.9), "v2": 0.1}, "its traffic was not undone"
    abort(world)
    world.change(ask.traffic("e", {"v1": 0.5, "v3": 0.5}), "set traffic")
    goal = world.change(start())
    world.flush()
    (change,) = (entry.id for entry in world.cluster.state.history if entry.what == "set traffic")
    world.change(ask.undo(change))
    world.flush()
    assert traffic(world) == {"v1": 1.0}
    assert state(world)["state"] == "interrupted"
    assert world.goal_state(goal) == "failed"


def test_deleting_the_endpoint_ends_it_and_forgets_it(world: World) -> None:
    goal = begun(world)
    world.complete(ask.unname("e"))
    assert world.cluster.rollouts.status(world.now) == {}
    assert world.records["rollout"] == {}
    assert world.goal_state(goal) == "failed", "the traffic has not moved"
    world.request(ask.delete("v2"))


# --- Bad input ------------------------------------------------------------------------------------


def test_unknown_names_are_refused_and_begin_nothing(world: World) -> None:
    unknown = "to: no backend is named 'v9'; it could be: v1, v2, v3"
    with pytest.raises(InvalidRequestError, match=unknown):
        world.request(start(to="v9"))
    with pytest.raises(UnknownNameError, match="no endpoint is named 'nope'"):
        world.request(start(endpoint="nope"))
    assert world.cluster.rollouts.status(world.now) == {}
