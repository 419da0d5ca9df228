"""Whether there is an order of operations that explains their answers: Wing and Gong's algorithm.

Each operation takes effect at one moment between its call and its return. The search goes through
calls and returns by time: it lets an open call take effect if the model allows its answer, and goes
back where a return comes whose operation has had no effect yet. As Lowe found, it need not look
again at a state with the same operations behind it (G. Lowe, "Testing for linearizability", 2017;
Porcupine does the same). Nothing here is of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State", bound=Hashable)
Kind = TypeVar("Kind")


class Call(NamedTuple, Generic[Kind]):
    """An operation; one that was never answered returns at infinity."""

    asked_at: float
    answered_at: float
    operation: Kind


def unexplained(
    calls: Sequence[Call[Kind]],
    state: State,
    step: Callable[[State, Kind], tuple[bool, State]],
) -> Kind | None:
    """Return None if the calls are linearizable, else the operation that the search got stuck at.

    ``step`` returns whether the operation may be answered so in a state, and the state after it.
    """
    # Places 0 to 2n-1 are calls and returns by time, in a linked list; a call before a return of
    # the same moment, so that the two count as concurrent.
    events = sorted(
        [(call.asked_at, 0, number) for number, call in enumerate(calls)]
        + [(call.answered_at, 1, number) for number, call in enumerate(calls)]
    )
    size = len(events)
    place_of_return = {number: at for at, (_, kind, number) in enumerate(events) if kind}
    after = [*range(1, size + 1), 0]  # the last item is the list's head
    before = [size, *range(size)]
    seen = set()
    done = 0  # a bit for each operation that has had its effect
    taken: list[tuple[int, State]] = []  # the places of their calls, and the states before
    furthest, stuck_at = -1, None

    def unlink(place: int) -> None:
        after[before[place]], before[after[place]] = after[place], before[place]

    def link(place: int) -> None:
        after[before[place]] = before[after[place]] = place

    place = after[size]
    while place != size:
        _, is_return, number = events[place]
        if not is_return:
            is_allowed, then = step(state, calls[number].operation)
            key = (done | 1 << number, then)
            if is_allowed and key not in seen:
                seen.add(key)
                taken.append((place, state))
                done, state = key
                unlink(place)
                unlink(place_of_return[number])
                place = after[size]
            else:
                place = after[place]
            continue
        if len(taken) > furthest:
            furthest, stuck_at = len(taken), calls[number].operation
        if not taken:
            return stuck_at
        place, state = taken.pop()
        number = events[place][2]
        done &= ~(1 << number)
        link(place_of_return[number])
        link(place)
        place = after[place]
    return None
