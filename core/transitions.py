"""State machines as tables: (state, event) -> state."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from greenroom.core.errors import IllegalTransitionError

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


def next_state(table: Mapping[tuple[State, Event], State], state: State, event: Event) -> State:
    """Return the state after ``event``; raise IllegalTransitionError naming both otherwise."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransitionError(f"event {event.value} in state {state.value}") from None
