"""Autoscaling as part of the cluster: restarts, zero, new settings, policies, what is told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from greenroom.core.autoscaling.decision import Outcome
from greenroom.core.cluster import status
from greenroom.core.cluster.autoscaler import ASK_AGAIN_S
from greenroom.core.effects import AskPolicy, Start
from tests.core import requests as ask
from tests.core.worlds import BROKEN, World

QUICK = {
    "max_replicas": 5,
    "look_back_period_s": 5,
    "upscale_delay_s": 5,
    "downscale_delay_s": 20,
}
CUSTOM = {"policy_function": "mine.policy", "code": b"pickled", "code_hash": "hash"}


class Scaled(World):
    """A world whose proxies report a load, every half second while there is any."""

    def __init__(self, proxies: int = 1) -> None:
        self.load: dict[str, tuple[int, int]] = {}
        super().__init__(proxies)

    def boot(self) -> None:
        super().boot()
        self.report_load()

    def report_load(self) -> None:
        for proxy in self.proxies:
            self.cluster.loads.expect(proxy.name, self.now)
            self.cluster.loads.report(proxy.name, self.load, self.now)

    def set_load(self, backend: str, queued: int, ongoing: int = 0) -> None:
        self.load[backend] = (queued, ongoing)
        self.report_load()
        self.flush()

    def run(self, seconds: float) -> None:
        """Let time pass: constructors return, what drains ends, proxies report."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            self.report_load()
            self.flush()
            self.work()
            self.flush()

    def target(self, backend: str = "a") -> int | None:
        return self.records["backend"][backend].target


def scaled(tag: str = "a", code: bytes = b"code", **given: Any) -> ask.Request:
    return ask.create(tag, code, autoscaling_config={**QUICK, **given})


def decisions(world: World, tag: str = "a") -> list[dict[str, Any]]:
    shown = status.autoscaling(world.cluster, world.now, world.now)
    found: list[dict[str, Any]] = shown.get(tag, {}).get("decisions", [])
    return found


def outcomes(world: World, tag: str = "a") -> list[Outcome]:
    return [Outcome(each["outcome"]) for each in decisions(world, tag)]


# --- Up, down, zero -----------------------------------------------------------------------------


def test_a_backend_grows_and_shrinks_with_its_load_without_goals_of_its_own() -> None:
    world = Scaled()
    goal = world.complete(scaled())
    goals = [g.id for g in world.cluster.state.goals.all()]
    assert goals == [goal]
    world.set_load("a", 2, 6)
    world.run(12)
    assert (world.target(), len(world.running("a"))) == (4, 4)
    world.set_load("a", 0, 2)
    world.run(40)
    assert (world.target(), len(world.running("a"))) == (1, 1)
    assert [g.id for g in world.cluster.state.goals.all()] == goals
    assert world.records["backend"]["a"].newest.config_id == 1, "replicas need not be told of it"


def test_the_first_query_at_zero_starts_a_replica_at_once() -> None:
    world = Scaled()
    goal = world.request(scaled(min_replicas=0))
    world.flush()
    assert world.goal_state(goal) == "succeeded"
    assert world.target() == 0
    world.run(600)
    assert not world.sent(Start)
    world.set_load("a", 1)
    assert [effect.backend for effect in world.sent(Start)] == ["a"]
    assert world.target() == 1
    world.converge()
    assert len(world.table("backend/a").replicas) == 1


def test_a_replica_from_zero_that_cannot_start_fails_the_backend_and_its_queries() -> None:
    world = Scaled()
    world.request(scaled(code=BROKEN, min_replicas=0))
    world.set_load("a", 1)
    world.run(200)
    assert world.records["backend"]["a"].failure == "boom"
    assert world.table("backend/a").unavailable
    assert decisions(world) == []


# --- Crashes and restarts -----------------------------------------------------------------------


def test_a_new_controller_keeps_the_scale_while_it_learns_the_load() -> None:
    world = Scaled(proxies=2)
    world.complete(scaled(downscale_delay_s=0, upscale_delay_s=0))
    world.set_load("a", 0, 5)  # at each of the two
    world.run(20)
    assert world.target() == 5
    for _ in range(3):
        load, world.load = world.load, {}
        World.boot(world)  # and no proxy has reported yet
        world.load = load
        world.now += 4
        world.flush()
        assert world.target() == 5
        world.run(15)
        assert world.target() == 5
    assert Outcome.DOWNSCALED not in outcomes(world)


# --- New code -----------------------------------------------------------------------------------


def deploy(code: bytes, **given: Any) -> ask.Request:
    return ask.version(code, autoscaling_config={**QUICK, **given})


def test_new_code_comes_up_at_the_scale_that_the_old_has() -> None:
    world = Scaled()
    world.complete(deploy(b"one"))
    world.set_load("app#d", 0, 8)
    world.run(15)
    assert world.target("app#d") == 4
    world.complete(deploy(b"two"))
    assert world.target("app#d") == 4
    assert [p.code for p in world.running("app#d")] == [b"two"] * 4
    world.complete(deploy(b"three", max_replicas=2))
    assert world.target("app#d") == 2
    world.request(deploy(b"four", max_replicas=2, initial_replicas=1))
    world.converge(10)
    assert len(world.running("app#d")) == 1, "an initial number that is new counts"


def test_a_release_that_cannot_start_leaves_the_scale_and_the_load_may_grow_meanwhile() -> None:
    world = Scaled()
    world.complete(deploy(b"one"))
    world.set_load("app#d", 0, 4)
    world.run(15)
    goal = world.request(deploy(BROKEN, max_replicas=3))
    world.set_load("app#d", 0, 20)
    world.run(200)
    assert world.goal_state(goal) == "failed"
    assert world.target("app#d") == 5, "five, the bound of the settings that it went back to"
    assert [p.code for p in world.running("app#d")] == [b"one"] * 5


# --- Anything, anytime --------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.integers(0, 15)),
        st.tuples(st.just("wait"), st.integers(1, 40)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("new proxy"), st.just(0)),
        st.tuples(st.just("kill"), st.just(0)),
        st.tuples(st.just("max"), st.integers(1, 8)),
        st.tuples(st.just("code"), st.sampled_from([b"one", b"two", BROKEN])),
        st.tuples(st.just("crash"), st.sampled_from(["before save", "after save", "amid effects"])),
    ),
    max_size=15,
)


@settings(max_examples=40)
@given(EVENTS, st.integers(0, 1))
def test_whatever_happens_bounds_hold_and_a_steady_load_gets_its_replicas(
    events: list[tuple[str, Any]], least: int
) -> None:
    world = Scaled(proxies=2)
    happen = {
        "load": lambda value: world.set_load("app#d", 0, value),
        "wait": world.run,
        "restart": lambda _: world.boot(),
        "new proxy": lambda _: world.restart_proxy(),
        "kill": lambda _: [world.die(tag) for tag in list(world.processes)[:1]],
        "crash": lambda point: setattr(world, "crash_at", point),
    }
    bounds = {"min_replicas": least, "max_replicas": 5}
    code = b"one"
    world.request(deploy(code, **bounds))
    for event, value in events:
        if event in happen:
            happen[event](value)
        else:
            bounds |= {"max_replicas": value} if event == "max" else {}
            code = value if event == "code" else code
            world.request(deploy(code, **bounds))
        world.flush()
        record = world.records["backend"]["app#d"]
        in_force = record.newest.config["autoscaling_config"]
        assert least <= (record.target or 0) <= in_force["max_replicas"] <= 8
    world.crash_at = None
    world.request(deploy(b"two", **bounds))
    world.set_load("app#d", 0, 3)  # at each of the two
    world.run(120)
    replicas = min(3, bounds["max_replicas"])
    assert world.target("app#d") == replicas
    assert [process.code for process in world.running("app#d")] == [b"two"] * replicas
    world.set_load("app#d", 0)
    world.run(90)
    assert (world.target("app#d"), len(world.running("app#d"))) == (least, least)


# --- Policies of the users' ---------------------------------------------------------------------


def custom_world() -> tuple[Scaled, AskPolicy]:
    world = Scaled()
    world.complete(scaled(policy=CUSTOM, upscale_delay_s=0))
    world.set_load("a", 3, 4)
    world.run(1.5)
    return world, world.sent(AskPolicy)[-1]


def answer(world: Scaled, question: AskPolicy, **given: Any) -> None:
    world.cluster.autoscaler.policy_answered("a", question.ask_id, given, world.now)
    world.flush()


def test_a_policy_is_asked_with_all_inputs_and_its_answer_counts() -> None:
    world = Scaled()
    world.request(scaled(policy=CUSTOM, upscale_delay_s=0))
    world.flush()
    world.work()
    world.flush()
    world.now += 1
    world.set_load("a", 3, 4)
    question = world.sent(AskPolicy)[-1]
    assert question.backend == "a"
    asked = question.question
    assert (asked["current_num_replicas"], asked["target_num_replicas"]) == (1, 1)
    assert asked["capacity_adjusted_max_replicas"] == 5
    assert asked["policy_state"] == {}
    assert "policy" not in asked["config"]
    answer(world, question, replicas=3, state={"seen": 1})
    assert world.target() == 3
    world.run(2)
    assert world.sent(AskPolicy)[-1].question["policy_state"] == {"seen": 1}


def test_a_policy_hears_the_numbers_of_the_replicas_by_name() -> None:
    world = Scaled()
    world.complete(scaled(policy=CUSTOM, min_replicas=2, upscale_delay_s=0))
    first, second = world.running("a")
    first.stats, second.stats = {"gpu": 0.5, "queue": 3.0}, {"gpu": 0.25}
    world.report(first)
    world.report(second)
    world.flush()
    world.now += 1
    world.set_load("a", 3, 4)
    asked = world.sent(AskPolicy)[-1].question
    by_name = {"gpu": {first.tag: 0.5, second.tag: 0.25}, "queue": {first.tag: 3.0}}
    assert asked["aggregated_metrics"] == by_name
    assert asked["running_replicas"] == sorted([first.tag, second.tag])


def at_zero() -> Scaled:
    """Return a world with a policy of the user's that is asked, and no replica."""
    world = Scaled()
    world.complete(scaled(policy=CUSTOM, min_replicas=0, initial_replicas=0, upscale_delay_s=0))
    assert world.target() == 0
    return world


def test_the_first_query_at_zero_waits_for_no_policy() -> None:
    world = at_zero()
    world.run(1.5)
    assert world.sent(AskPolicy)
    world.set_load("a", 1)
    assert world.target() == 1
    assert outcomes(world)[-1] is Outcome.FROM_ZERO


def test_one_question_is_open_at_a_time_and_a_lost_one_is_asked_again() -> None:
    world, first = custom_world()
    world.run(30)
    assert not world.sent(AskPolicy)
    world.run(ASK_AGAIN_S)
    again = world.sent(AskPolicy)
    assert [q.ask_id for q in again] == [first.ask_id + 1]
    answer(world, first, replicas=5)
    assert world.target() == 1, "the late answer to the first counts no more"
    answer(world, again[0], replicas=5)
    assert world.target() == 5


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        ({"error": "Traceback ...\nZeroDivisionError: by zero"}, "ZeroDivisionError: by zero"),
        ({"replicas": -3}, "it returned -3, which is no number of replicas"),
    ],
)
def test_a_policy_that_fails_is_reported_until_it_answers_and_the_target_stays(
    given: Any, failure: str
) -> None:
    world, question = custom_world()
    world.cluster.autoscaler.take_log()
    answer(world, question, **given)
    assert world.target() == 1
    shown = status.autoscaling(world.cluster, world.now, 5e8)["a"]
    assert shown["policy_failures"] == 1
    last = shown["decisions"][-1]
    assert (last["outcome"], last["at"]) == ("POLICY_FAILED", 5e8)
    assert "the policy failed" in last["why"]
    assert [str(decision) for _, decision in world.cluster.autoscaler.take_log()]
    found = status.backends(world.cluster)["a"]
    assert found["policy_failure"] == failure
    assert "its autoscaling policy failed, so the target stays: " in found["message"]
    world.run(2)
    answer(world, world.sent(AskPolicy)[-1], replicas=1)
    found = status.backends(world.cluster)["a"]
    assert (found["status"], found["message"]) == ("HEALTHY", "")
    assert "policy_failure" not in found


# --- What is told -------------------------------------------------------------------------------


def test_status_says_upscaling_and_downscaling_while_replicas_come_and_go() -> None:
    world = Scaled()
    world.complete(scaled(initial_replicas=1))
    world.set_load("a", 8)
    while world.target() == 1:
        world.now += 0.5
        world.report_load()
        world.flush()
    found = status.backends(world.cluster)["a"]
    assert (found["status"], found["message"]) == ("UPSCALING", "1 of 4 replicas run")
    world.run(1)
    assert status.backends(world.cluster)["a"]["status"] == "HEALTHY"
    world.set_load("a", 0)
    while world.target() == 4:
        world.now += 0.5
        world.report_load()
        world.flush()
    assert status.backends(world.cluster)["a"]["status"] == "DOWNSCALING"
    world.run(1)
    assert status.backends(world.cluster)["a"]["status"] == "HEALTHY"


def test_the_latest_decisions_are_kept_with_their_inputs_and_equal_ones_as_one() -> None:
    world = Scaled()
    world.complete(scaled(max_replicas=30, downscale_delay_s=5))
    for round_ in range(20):
        world.set_load("a", 0 if round_ % 2 else 20)
        world.run(20)
    kept = decisions(world)
    assert len(kept) == 20
    assert max(each["times"] for each in kept) > 1
    shown = status.autoscaling(world.cluster, world.now, 1e9)["a"]
    assert shown["target_replicas"] == world.target()
    assert "code" not in shown["config"]["policy"]
    ups = [d for d in shown["decisions"] if d["outcome"] == "UPSCALED"]
    assert (ups[-1]["from"], ups[-1]["to"]) == (1, 10)
    inputs = ups[-1]["inputs"]
    assert inputs["delay"] == "upscale_delay_s"
    assert (inputs["wanted"], inputs["average"], inputs["window_s"]) == (10, 20, 5)
    assert shown["decisions"][-1]["at"] <= 1e9
