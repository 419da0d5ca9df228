"""State machines as tables: each state with those that may follow it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TypeVar

from greenroom.core.errors import IllegalTransitionError

State = TypeVar("State")


def follow(table: Mapping[State, Container[State]], state: State, after: State) -> State:
    """Return ``after``; raise IllegalTransitionError, naming both, unless it may follow."""
    if after not in table[state]:
        raise IllegalTransitionError(f"what is {state} cannot become {after}")
    return after
