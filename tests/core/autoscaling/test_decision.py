"""What autoscaling decides on load curves, and how loads add up; the test sets the time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from greenroom.core.agenda import Agenda
from greenroom.core.autoscaling.decision import (
    EXPIRE_S,
    FOUND_AFTER_S,
    LOADS,
    NEVER,
    Decision,
    Load,
    Loads,
    Outcome,
    Scaling,
    Window,
    number_from,
)
from greenroom.core.autoscaling.settings import AutoscalingConfig

Curve = Callable[[int], int]


def config(**given: Any) -> AutoscalingConfig:
    return AutoscalingConfig(**{"max_replicas": 10, **given})


class Run:
    """A backend whose replicas need ``start_s`` seconds to come up, under a load curve."""

    def __init__(self, setting: AutoscalingConfig, *, target: int = 1, start_s: int = 0) -> None:
        self.scaling = Scaling(setting)
        self.target = target
        self.decisions: list[Decision] = []
        self.trace: list[tuple[int, int]] = []
        self._start_s = start_s
        self.wanted_since = [-start_s] * target  # of each replica

    def step(self, now: float, load: int, **known: Any) -> Decision:
        running = sum(now >= since + self._start_s for since in self.wanted_since)
        decision = self.scaling.step(now, Load(0, load), running, self.target, **known)
        assert decision is not None
        if decision.target != self.target:
            self.trace.append((int(now), decision.target))
            self.wanted_since = self.wanted_since[: decision.target]
            self.wanted_since += [int(now)] * (decision.target - len(self.wanted_since))
        self.target = decision.target
        self.decisions.append(decision)
        return decision

    def replay(self, curve: Curve | Sequence[int], seconds: int = 0) -> list[tuple[int, int]]:
        """Step each second; return (second, new target) of each change."""
        loads = [curve(t) for t in range(seconds)] if callable(curve) else curve
        for now, load in enumerate(loads):
            self.step(now, load)
        return self.trace


# --- Curves -------------------------------------------------------------------------------------


def test_a_step_up_is_followed_after_the_delay_and_a_step_down_after_its_own():
    run = Run(config(upscale_delay_s=30, downscale_delay_s=600))
    trace = run.replay(lambda t: 12 if 100 <= t < 1000 else 2, 2000)
    # Above one replica's 2 on average from 101 on; the window is full of twelves by 131.
    # Six are too many from 1006 on, when the average is 10; 600 s later it is 2.
    assert trace == [(131, 6), (1606, 1)]


def test_to_zero_and_back():
    run = Run(
        config(min_replicas=0, downscale_delay_s=60, downscale_to_zero_delay_s=10),
        target=0,
        start_s=5,
    )
    trace = run.replay(lambda t: 9 if 10 <= t < 100 or 400 <= t < 410 else 0, 600)
    # The first query starts one at once. Nothing is decided before it runs. Idle from 100 on, the
    # average is 0 from 130 on; from five it goes to one, and only from one to zero.
    assert trace[:2] == [(10, 1), (45, 5)]
    assert trace[2:5] == [(164, 1), (175, 0), (400, 1)]
    assert trace[5:] == [(450, 0)]
    assert {d.outcome for d in run.decisions[11:15]} == {Outcome.WAITING}
    assert run.decisions[10].outcome is Outcome.FROM_ZERO


@pytest.mark.parametrize("per_replica", [0.1, 0.3, 0.7, 1.1, 3, 7])
def test_a_load_that_fits_exactly_wants_no_replica_more(per_replica):
    setting = config(max_replicas=1000, target_ongoing_requests=per_replica, upscale_delay_s=0)
    for replicas in range(1, 200):
        load = per_replica * replicas
        if load == int(load):
            run = Run(setting, target=1)
            run.replay(lambda _, load=int(load): load, 3)
            assert run.target == replicas


def test_a_new_controller_that_knows_only_the_target_does_not_flap():
    setting = config(upscale_delay_s=5, downscale_delay_s=0)
    before = Run(setting)
    before.replay(lambda t: 4 * (t % 3), 200)
    assert before.target == 2
    after = Run(setting, target=before.target)  # an empty window, and delays that begin anew
    for now in range(200, 400):
        after.step(now, 4 * (now % 3))
    assert after.trace == []


# --- Delays and what is not known yet -----------------------------------------------------------


def test_what_is_at_rest_is_not_due_again():
    run = Run(config())
    run.step(0.0, 0)
    assert run.scaling.due_at == NEVER
    run.step(5.0, 1)
    assert run.scaling.due_at == 6.0, "the average changes from now on"
    for now in range(6, 40):
        run.step(now, 1)
    assert run.scaling.due_at == NEVER, "and after a look-back period no more"


def test_a_step_is_due_when_a_delay_ends():
    run = Run(config(upscale_delay_s=2.5))
    run.step(0.0, 9)
    run.step(1.0, 9)
    run.step(2.0, 9)
    assert run.scaling.due_at == 2.5
    assert run.step(2.5, 9).outcome is Outcome.UPSCALED


def test_what_a_policy_of_the_users_wants_is_held_to_bounds_and_delays():
    scaling = Scaling(config(policy=lambda _: 7, upscale_delay_s=5, downscale_delay_s=0))
    target = 1
    trace = []
    for now in range(60):
        assert scaling.step(now, Load(0, 1), target, target) is None
        answer = {"replicas": 7 if now < 20 else 70 if now < 40 else 2.5}
        decision = scaling.step(now, Load(0, 1), target, target, answer=answer)
        assert decision is not None
        if decision.target != target:
            trace.append((now, decision.target))
        target = decision.target
    assert trace == [(5, 7), (25, 10), (40, 3)]


# --- A policy of the user's ---------------------------------------------------------------------


def test_a_policy_of_the_users_cannot_go_to_zero_under_load_nor_need_it_be_asked_at_zero():
    scaling = Scaling(config(min_replicas=0, policy=lambda _: 0, downscale_delay_s=0))
    for now in range(100):
        assert scaling.step(now, Load(0, 1), 1, 1, answer={"replicas": 0}).target == 1
    assert scaling.step(100.0, Load(1, 0), 0, 0).target == 1


@pytest.mark.parametrize(
    "value", [None, "3", True, math.nan, math.inf, -1, -0.5, 1e7, [3], {"replicas": 3}]
)
def test_a_number_of_replicas_is_finite_and_not_negative(value):
    with pytest.raises(ValueError, match=r"it returned .*, which is no number"):
        number_from({"replicas": value})


# --- Bounds and first targets -------------------------------------------------------------------


def test_a_scale_that_there_is_stays_within_the_bounds():
    assert config(min_replicas=2).first_target(None, 0) == 2
    assert config(min_replicas=0).first_target(None, 0) == 0
    assert config(min_replicas=2).first_target(config(), 7) == 7
    assert config(max_replicas=3).first_target(config(), 7) == 3
    assert config(initial_replicas=4).first_target(None, 7) == 4
    assert config(initial_replicas=4).first_target(config(initial_replicas=4), 7) == 7
    assert config(initial_replicas=5).first_target(config(initial_replicas=4), 7) == 5


@pytest.mark.parametrize(("function", "target"), [("max", 8), ("mean", 5), ("min", 1)])
def test_the_load_of_the_window_is_its_mean_its_highest_or_its_lowest(function, target):
    setting = config(
        aggregation_function=function,
        target_ongoing_requests=1,
        look_back_period_s=10,
        upscale_delay_s=0,
    )
    scaling = Scaling(setting)
    for at, load in ((0.0, 1), (5.0, 8)):
        scaling.step(at, Load(load, 0), 0, 1)
    decision = scaling.step(10.0, Load(8, 0), 1, 1)
    assert decision.target == target
    word = {"max": "highest", "mean": "average", "min": "lowest"}[function]
    assert decision.why.startswith(f"{word} load ")


# --- Windows ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 1000)), min_size=1, max_size=60),
    st.integers(1, 20),
)
def test_a_window_is_what_adding_up_every_millisecond_gives(changes, length_s):
    window, values, now = Window(length_s), [], 0
    for gap, value in changes:
        values += [values[-1]] * gap if values else []
        now += gap if values or gap == 0 else 0
        window.add(now / 1000, value)
        if len(values) > now:
            values[now] = value
        else:
            values.append(value)
        seen = values[:now][-length_s * 1000 :]
        expected = sum(seen) / len(seen) if seen else value
        assert window.average == pytest.approx(expected)
        assert window.aggregated("max") == max([*seen, value])
        assert window.aggregated("min") == min([*seen, value])


# --- What holds for every curve -----------------------------------------------------------------

CURVES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=12).map(
    lambda parts: [load for length, load in parts for _ in range(length)]
)
CONFIGS = st.builds(
    lambda bounds, **given: config(min_replicas=bounds[0], max_replicas=bounds[1], **given),
    st.tuples(st.integers(0, 4), st.integers(1, 12)).map(sorted).filter(lambda b: b[1] >= 1),
    target_ongoing_requests=st.sampled_from([0.5, 1, 2, 5]),
    look_back_period_s=st.sampled_from([1, 5, 30]),
    upscale_delay_s=st.sampled_from([0, 1, 7, 30]),
    downscale_delay_s=st.sampled_from([0, 1, 7, 30]),
    downscale_to_zero_delay_s=st.sampled_from([None, 0, 20]),
    upscaling_factor=st.sampled_from([None, 0.3, 1.0, 2.0]),
    downscaling_factor=st.sampled_from([None, 0.3, 1.0, 2.0]),
)


@settings(max_examples=60)
@given(CURVES, CONFIGS, st.integers(0, 20))
def test_more_load_never_wants_fewer_replicas(loads, setting, more):
    target = max(setting.min_replicas, 1)
    less, greater = Scaling(setting), Scaling(setting)
    for now, load in enumerate(loads):
        first = less.step(now, Load(0, load), target, target)
        second = greater.step(now, Load(0, load + more), target, target)
        assert first.inputs.scaled <= second.inputs.scaled


@settings(max_examples=60)
@given(CURVES, CONFIGS, st.integers(0, 3))
def test_the_targets_are_those_of_the_formulas_in_the_documentation(loads, setting, start_s):
    run = Run(setting, target=setting.min_replicas, start_s=start_s)
    assert run.replay(loads) == by_the_book(loads, setting, start_s)


def by_the_book(loads: list[int], c: AutoscalingConfig, start_s: int) -> list[tuple[int, int]]:
    """The formulas of docs/autoscaling.md, the plain way: all history, once a second."""
    trace: list[tuple[int, int]] = []
    target, born = c.min_replicas, [-start_s] * c.min_replicas
    side, since = 0, 0
    for now, load in enumerate(loads):
        seen = loads[max(0, now - int(c.look_back_period_s)) : now] or [load]
        new = target
        if target == 0:
            side = 0
            new = c.bounded(max(1, math.ceil(c.upscaling_factor or 1))) if load else 0
        elif any(now >= at + start_s for at in born):
            bounded = bounded_by_the_book(sum(seen) / len(seen), load, target, c)
            if (bounded > target) - (bounded < target) != side:
                side, since = (bounded > target) - (bounded < target), now
            delay = c.upscale_delay_s if side > 0 else c.downscale_delay_s
            if bounded == 0 and c.downscale_to_zero_delay_s is not None:
                delay = c.downscale_to_zero_delay_s
            is_known = side > 0 or now >= c.look_back_period_s
            if side and now - since >= delay and is_known:
                new, side = bounded, 0
        if new != target:
            trace.append((now, new))
            born = born[:new] + [now] * (new - target)
            target = new
    return trace


def bounded_by_the_book(average: float, load: int, target: int, c: AutoscalingConfig) -> int:
    wanted = average / c.target_ongoing_requests
    factor = (c.upscaling_factor if wanted > target else c.downscaling_factor) or 1
    scaled = math.ceil(round(target + factor * (wanted - target), 9))
    if scaled == target and math.ceil(round(wanted, 9)) < target:
        scaled -= 1
    bounded = min(max(scaled, c.min_replicas), c.max_replicas)
    return 1 if bounded == 0 and (target > 1 or average or load) else bounded


# --- Loads ----------------------------------------------------------------------------------------


def loads_of(now: float = 0.0) -> tuple[Loads, Agenda]:
    agenda = Agenda()
    return Loads(now, agenda), agenda


def changed(agenda: Agenda, *backends: str) -> set[str]:
    """Return of which of these the load has changed since this was last asked."""
    found = set(agenda.take("of", 0.0))
    for backend in backends:
        agenda.upon((LOADS, backend), "of", backend)
    return found


def expire(loads: Loads, agenda: Agenda, now: float) -> list[str]:
    """Reconcile the proxies that are due; return which those are."""
    due = agenda.take(LOADS, now)
    for proxy in due:
        loads.reconcile(proxy)
    return due


def test_a_proxy_that_goes_in_the_step_in_which_it_is_due_counts_no_more() -> None:
    loads, agenda = loads_of()
    loads.report("p", {"a": (1, 2)}, 0.0)
    assert agenda.first([LOADS], EXPIRE_S) == LOADS
    loads.forget("p")
    assert expire(loads, agenda, EXPIRE_S) == ["p"]
    assert (loads.of("a"), loads.queues("a")) == ((0, 0), ())


def test_sums_are_those_of_the_newest_reports_whatever_came_before() -> None:
    drawn = random.Random(7)
    (loads, _), newest = loads_of(), {}
    for _ in range(500):
        proxy = drawn.choice("pqr")
        load = {b: (drawn.randrange(3), drawn.randrange(3)) for b in "abc" if drawn.random() < 0.5}
        newest[proxy] = load
        loads.report(proxy, load, 0.0)
        for backend in "abc":
            each = [report.get(backend, (0, 0)) for report in newest.values()]
            assert loads.of(backend) == (sum(q for q, _ in each), sum(o for _, o in each))


def test_a_proxy_that_has_queries_and_falls_silent_counts_no_more() -> None:
    loads, agenda = loads_of()
    loads.report("p", {"a": (1, 2)}, 1.0)
    loads.report("q", {"a": (0, 1)}, 4.0)
    loads.report("idle", {}, 0.0)
    assert agenda.next_at() == 1.0 + EXPIRE_S
    assert expire(loads, agenda, EXPIRE_S) == [], "not yet"
    changed(agenda, "a")
    assert expire(loads, agenda, 1.0 + EXPIRE_S) == ["p"]
    assert changed(agenda) == {"a"}
    assert loads.of("a") == (0, 1)
    assert agenda.next_at() == 4.0 + EXPIRE_S
    assert loads.queues("a") == (0, 0), "q, and the one that has nothing to report"


def test_what_is_known_is_complete_when_every_proxy_has_reported_or_had_its_time() -> None:
    loads, agenda = loads_of(100.0)
    now = 100.0 + FOUND_AFTER_S
    assert not loads.is_complete(now - 0.1), "a new controller may not know of all yet"
    assert loads.is_complete(now)
    loads.expect("p", now)
    assert not loads.is_complete(now)
    loads.report("p", {}, now)
    loads.expect("p", now)
    assert loads.is_complete(now)
    loads.expect("q", now)
    expire(loads, agenda, now + EXPIRE_S)
    assert loads.is_complete(now + EXPIRE_S)
    loads.expect("r", now)
    loads.forget("r")
    assert loads.is_complete(now)
