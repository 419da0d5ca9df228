"""The table of replica states."""

import itertools

import pytest

from greenroom.core.errors import IllegalTransitionError
from greenroom.core.lifecycle.replicas import (
    MAX_BACKOFF_S,
    PATIENCE_S,
    TRANSITIONS,
    FailureRow,
    ReplicaEvent,
    ReplicaState,
)
from greenroom.core.transitions import next_state

ILLEGAL = sorted(set(itertools.product(ReplicaState, ReplicaEvent)) - TRANSITIONS.keys())


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_an_event_that_is_not_in_the_table_raises_naming_it_and_the_state(
    state: ReplicaState, event: ReplicaEvent
) -> None:
    message = rf"^event {event.value} in state {state.value}$"
    with pytest.raises(IllegalTransitionError, match=message):
        next_state(TRANSITIONS, state, event)


def test_every_state_leads_to_stopped_which_nothing_leaves() -> None:
    reached = {ReplicaState.STOPPED}
    for _ in ReplicaState:
        reached |= {before for (before, _), after in TRANSITIONS.items() if after in reached}
    assert reached == set(ReplicaState)
    assert not any(before is ReplicaState.STOPPED for before, _ in TRANSITIONS)


def test_a_row_of_failures_is_spent_after_enough_of_them_and_enough_time() -> None:
    row = FailureRow(MAX_BACKOFF_S, patience_s=PATIENCE_S)
    now, tries = 100.0, 0
    while not tries or not row.is_spent(20, now):
        now = row.start_at if tries else now
        tries += 1
        row.add("host", now, now)
    assert (tries, now) == (9, 100.0 + PATIENCE_S)


def test_a_row_of_slow_failures_is_spent_after_three() -> None:
    row = FailureRow(MAX_BACKOFF_S, patience_s=PATIENCE_S)
    for count, now in enumerate([100.0, 160.0, 220.0], 1):
        row.add("host", now - 60.0, now)
        assert row.is_spent(20, now) == (count == 3)
    row.clear()
    row.add("host", 300.0, 300.0)
    assert not row.is_spent(20, 300.0), "the time counts from the first failure since a success"
    assert row.is_spent(1, 300.0)
