from __future__ import annotations

import itertools
from typing import Any

import pytest

from greenroom.actors.transport.handshake import (
    CONNECTION,
    SESSION,
    ConnectionEvent,
    ConnectionState,
    IllegalEventError,
    SessionEvent,
    SessionState,
    next_state,
)
from tests.transport.pairs import Link, Process, joined, session


@pytest.mark.parametrize(
    ("table", "states", "events"),
    [(CONNECTION, ConnectionState, ConnectionEvent), (SESSION, SessionState, SessionEvent)],
)
def test_every_pair_is_a_transition_or_raises_naming_both(
    table: Any, states: Any, events: Any
) -> None:
    for state, event in itertools.product(states, events):
        if (state, event) in table:
            assert next_state(table, state, event) in states
        else:
            with pytest.raises(IllegalEventError, match=f"{event.value} in state {state.value}"):
                next_state(table, state, event)


def test_nothing_leaves_the_last_states() -> None:
    for (state, _), after in CONNECTION.items():
        assert state is not ConnectionState.DEAD or after is ConnectionState.DEAD
    for (session_state, _), later in SESSION.items():
        assert session_state is not SessionState.ENDED or later is SessionState.ENDED


def test_no_way_leads_past_the_proof_or_the_welcome() -> None:
    ways_in = {(s, e) for (s, e), after in CONNECTION.items() if after is ConnectionState.OPEN}
    assert ways_in == {
        (ConnectionState.WELCOMING, ConnectionEvent.WELCOME),
        (ConnectionState.OPEN, ConnectionEvent.ACKNOWLEDGE),
    }
    ways_in = {(s, e) for (s, e), after in CONNECTION.items() if after is ConnectionState.WELCOMING}
    assert {event for _, event in ways_in} == {ConnectionEvent.IDENTITY}


def test_acknowledging_before_the_connection_is_open_raises() -> None:
    link = Link(Process("a"), Process("b"), remote=True)
    with pytest.raises(IllegalEventError, match="ACKNOWLEDGE in state GREETING"):
        link.ends[0].acknowledge()


def test_sending_in_an_ended_session_raises() -> None:
    left, right, _ = joined(remote=False)
    ended = session(left, right)
    left.sessions.forget("b")
    with pytest.raises(IllegalEventError, match="SEND in state ENDED"):
        ended.send([b"late"])


def test_a_dead_connection_takes_bytes_and_says_nothing() -> None:
    left, right, link = joined(remote=True)
    session(left, right).send([b"under way"])
    link.collect()
    link.ends[1].close()
    link.carry(0)
    assert right.messages() == []
    assert link.ends[1].receive_eof() == []
    assert link.ends[1].data_to_send() == []
    link.ends[1].close()
