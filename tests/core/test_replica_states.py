import itertools

import pytest

from greenroom.core.lifecycle.replicas import (
    LIVE,
    TRANSITIONS,
    IllegalTransitionError,
    ReplicaEvent,
    ReplicaState,
    next_state,
)

LEGAL = [
    ("SHOULD_START", "START", "STARTING"),
    ("SHOULD_START", "RETIRE", "STOPPED"),
    ("STARTING", "STARTED", "RUNNING"),
    ("STARTING", "FAILED", "SHOULD_STOP"),
    ("STARTING", "RETIRE", "SHOULD_STOP"),
    ("STARTING", "EXITED", "STOPPED"),
    ("RUNNING", "RETIRE", "SHOULD_STOP"),
    ("RUNNING", "EXITED", "STOPPED"),
    ("SHOULD_STOP", "STOP", "STOPPING"),
    ("SHOULD_STOP", "EXITED", "STOPPED"),
    ("STOPPING", "EXITED", "STOPPED"),
    ("STARTING", "LOSE", "LOST"),
    ("RUNNING", "LOSE", "LOST"),
    ("LOST", "FIND", "STARTING"),
    ("LOST", "EXITED", "STOPPED"),
]
ILLEGAL = sorted(
    set(itertools.product([s.value for s in ReplicaState], [e.value for e in ReplicaEvent]))
    - {(state, event) for state, event, _ in LEGAL}
)


@pytest.mark.parametrize(("state", "event", "after"), LEGAL)
def test_a_legal_event_leads_to_the_next_state(state: str, event: str, after: str) -> None:
    assert next_state(ReplicaState(state), ReplicaEvent(event)) is ReplicaState(after)


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_any_other_event_raises_naming_state_and_event(state: str, event: str) -> None:
    with pytest.raises(IllegalTransitionError, match=rf"^event {event} in state {state}$"):
        next_state(ReplicaState(state), ReplicaEvent(event))


def test_the_table_holds_no_more_than_the_legal_ones() -> None:
    assert len(TRANSITIONS) == len(LEGAL)


def test_every_state_leads_to_stopped() -> None:
    reached = {ReplicaState.STOPPED}
    for _ in ReplicaState:
        reached |= {before for (before, _), after in TRANSITIONS.items() if after in reached}
    assert reached == set(ReplicaState)


def test_what_is_live_is_on_its_way_to_run_or_runs() -> None:
    assert {state.value for state in LIVE} == {"SHOULD_START", "STARTING", "RUNNING"}
