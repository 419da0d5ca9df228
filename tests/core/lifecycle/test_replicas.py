"""The table of replica states."""

import itertools

import pytest

from greenroom.core.lifecycle.replicas import (
    TRANSITIONS,
    IllegalTransitionError,
    ReplicaEvent,
    ReplicaState,
    next_state,
)

ILLEGAL = sorted(set(itertools.product(ReplicaState, ReplicaEvent)) - TRANSITIONS.keys())


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_an_event_that_is_not_in_the_table_raises_naming_it_and_the_state(
    state: ReplicaState, event: ReplicaEvent
) -> None:
    told = rf"^event {event.value} in state {state.value}$"
    with pytest.raises(IllegalTransitionError, match=told):
        next_state(state, event)


def test_every_state_leads_to_stopped_which_nothing_leaves() -> None:
    reached = {ReplicaState.STOPPED}
    for _ in ReplicaState:
        reached |= {before for (before, _), after in TRANSITIONS.items() if after in reached}
    assert reached == set(ReplicaState)
    assert not any(before is ReplicaState.STOPPED for before, _ in TRANSITIONS)
