"""The table of replica states, and how their failures are counted."""

import itertools

import pytest

from greenroom.core.errors import IllegalTransitionError
from greenroom.core.lifecycle.failures import (
    DEATH,
    HEALTH,
    KEPT,
    OF_STARTS,
    PATIENCE_S,
    START,
    START_HERE,
    Failures,
)
from greenroom.core.lifecycle.replicas import NEXT, Replica, ReplicaState
from greenroom.core.transitions import follow

LEGAL = {(state, after) for state, following in NEXT.items() for after in following}
ILLEGAL = sorted(set(itertools.product(ReplicaState, ReplicaState)) - LEGAL)


@pytest.mark.parametrize(("state", "after"), ILLEGAL)
def test_a_transition_that_is_not_in_the_table_raises_naming_both_states(
    state: ReplicaState, after: ReplicaState
) -> None:
    message = rf"^what is {state.value} cannot become {after.value}$"
    with pytest.raises(IllegalTransitionError, match=message):
        follow(NEXT, state, after)


def test_every_state_leads_to_stopped_which_nothing_leaves() -> None:
    reached = {ReplicaState.STOPPED}
    for _ in ReplicaState:
        reached |= {before for before, after in LEGAL if after in reached}
    assert reached == NEXT.keys() == set(ReplicaState)
    assert not NEXT[ReplicaState.STOPPED]


def began(since: float, host: str = "x") -> Replica:
    return Replica("b#1", release=1, host=host, since=since)


def test_a_row_of_failures_is_spent_after_enough_of_them_and_enough_time() -> None:
    failures, now, tries = Failures(), 100.0, 0
    while not tries or not failures.is_spent(1, 20, now):
        now = failures.pause_ends_at(1, *OF_STARTS) if tries else now
        tries += 1
        failures.add(START, began(now), now)
    assert (tries, now) == (9, 100.0 + PATIENCE_S)


def test_a_row_of_slow_failures_is_spent_after_three() -> None:
    failures = Failures()
    for count, now in enumerate([100.0, 160.0, 220.0], 1):
        failures.add(START, began(now - 60.0), now)
        assert failures.is_spent(1, 20, now) == (count == 3)
    failures.came_up()
    failures.add(START, began(300.0), 300.0)
    assert not failures.is_spent(1, 20, 300.0), "the time counts from the first since a success"
    assert failures.is_spent(1, 1, 300.0)


def test_failures_of_months_are_bounded_and_delay_the_next_start_as_before() -> None:
    failures = Failures()
    for number in range(10 * KEPT):
        now = 100.0 * number
        for kind in (START, START_HERE, DEATH):
            failures.add(kind, began(now), now)
    rows = [failures.row(kind, 1) for kind in (START, START_HERE, DEATH)]
    assert sum(map(len, rows)) == KEPT
    assert failures.pause_ends_at(1, *OF_STARTS) == now + 10.0


def test_only_a_fresh_replica_that_passes_its_check_ends_a_row_of_failed_ones() -> None:
    failures = Failures()
    failures.add(HEALTH, began(0.0), 100.0)
    failures.passed(99.0)
    assert len(failures.row(HEALTH, 1)) == 1, "its neighbour was healthy all the time"
    failures.passed(100.0)
    assert failures.row(HEALTH, 1) == []


def test_a_host_where_starts_failed_is_as_good_as_any_when_it_was_lost_since() -> None:
    failures = Failures()
    failures.add(START_HERE, began(0.0), 10.0)
    assert failures.avoided(1, 20.0) == {"x": 1}
    assert failures.host_gone("x", 200.0)
    assert failures.avoided(1, 200.0) == {}


def test_what_fails_together_is_of_a_host_only_if_all_of_it_was_there() -> None:
    failures = Failures()
    for host in ("x", "y"):
        failures.add(DEATH, began(0.0, host), 100.0)
    assert len(failures.row(DEATH, 1)) == 1
    failures.host_gone("x", 101.0)
    assert len(failures.row(DEATH, 1)) == 1
    failures.host_gone("y", 101.0)
    assert failures.row(DEATH, 1) == []
