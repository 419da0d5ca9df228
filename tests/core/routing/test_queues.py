"""Which endpoint has the next turn where several wait for one backend, and how long it takes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from greenroom.core.errors import IllegalTransitionError
from greenroom.core.routing.queues import MEMORY_S, DrainRate, FairQueue
from greenroom.core.routing.tickets import ENDED, NEW, QUEUED, Ticket
from tests.core.routing.queries import Query


def ticket(number: int, endpoint: str = "e") -> Ticket:
    return Ticket(number, "c", Query(number), endpoint, "/", 0.0)


def waiting(*endpoints: str) -> FairQueue:
    lines = FairQueue()
    for number, endpoint in enumerate(endpoints):
        lines.add(ticket(number, endpoint))
    return lines


def served(lines: FairQueue, turns: int) -> str:
    """Return whose turns come next."""
    names = ""
    for _ in range(turns):
        first = lines.first()
        assert first is not None
        lines.remove(first, had_turn=True)
        names += first.endpoint
    return names


def test_a_ticket_is_queued_once_and_what_the_table_does_not_have_raises() -> None:
    waits = ticket(1)
    assert waits.state is NEW
    lines = FairQueue()
    lines.add(waits)
    assert waits.state is QUEUED
    with pytest.raises(IllegalTransitionError, match="that is QUEUED cannot become QUEUED"):
        lines.add(waits)
    with pytest.raises(IllegalTransitionError, match="that is QUEUED cannot become ENDED"):
        waits.become(ENDED)
    assert lines.size == 1
    lines.remove(waits)
    assert waits.state is NEW
    waits.become(ENDED)
    with pytest.raises(IllegalTransitionError, match="that is ENDED cannot become NEW"):
        waits.become(NEW)


def test_lines_take_turns_however_long_they_are() -> None:
    assert served(waiting(*"aaaaaabbc"), 9) == "abcabaaaa"


def test_what_is_put_back_has_the_next_turn() -> None:
    lines = waiting(*"aabb")
    first = lines.first()
    assert first is not None
    lines.remove(first, had_turn=True)
    lines.add(first, first=True)
    assert lines.first() is first
    assert lines.size == 4


def test_an_empty_queue_owes_no_endpoint_a_turn() -> None:
    lines = waiting("a")
    served(lines, 1)
    lines.add(ticket(1, "b"))
    lines.add(ticket(2, "a"))
    assert served(lines, 2) == "ba"
    assert lines.first() is None


def test_ahead_is_what_has_its_turn_before() -> None:
    lines = waiting(*"aaaaaabbc")
    assert lines.ahead("new") == 0
    assert lines.ahead("c") == 3  # its own, and one each of a and b
    assert lines.ahead("a") == 9


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=60), st.randoms())
def test_no_endpoint_that_waits_gets_less_than_its_share(names: list[str], random: object) -> None:
    """Between two turns of a line that waits, no other has more than two: a new one, and one."""
    lines = FairQueue()
    since: dict[str, Counter[str]] = {}
    for number, name in enumerate(names):
        lines.add(ticket(number, name))
        since.setdefault(name, Counter())
        if random.random() < 0.6:  # type: ignore[attr-defined]
            first = lines.first()
            assert first is not None
            lines.remove(first, had_turn=True)
            since[first.endpoint] = Counter()
            for other in since.values():
                other[first.endpoint] += 1
            since = {name: turns for name, turns in since.items() if lines.length(name)}
            assert all(turns <= 2 for each in since.values() for turns in each.values())
    assert lines.size == sum(lines.length(name) for name in "abcd")


# --- Drain rate -----------------------------------------------------------------------------------


def busy(rate: float, seconds: float, begin: float = 0.0) -> DrainRate:
    """Return the rate of a backend that gets through so many per second while queries wait."""
    drain = DrainRate()
    drain.began(begin)
    for each in range(1, int(rate * seconds) + 1):
        drain.freed(1, begin + each / rate)
    return drain


@pytest.mark.parametrize("rate", [0.5, 10.0, 2000.0])
def test_the_wait_is_what_is_ahead_by_the_drain_rate(rate: float) -> None:
    drain = busy(rate, 30.0)
    assert drain.wait_s(100, 30.0) == pytest.approx(100 / rate, rel=0.15)
    assert drain.wait_s(0, 30.0) == 0.0
    assert drain.retry_after_s(0, 30.0) == drain.wait_s(1, 30.0)


def test_without_a_slot_that_became_free_nothing_is_known() -> None:
    drain = DrainRate()
    drain.began(5.0)
    assert drain.wait_s(3, 6.0) is None
    assert drain.too_slow_for(3, 0.001, 6.0) is None, "so nobody is turned away"
    assert drain.retry_after_s(3, 5.1) == 1.0
    assert drain.retry_after_s(3, 25.0) == 20.0, "that it takes so long already is all there is"


def test_a_new_rate_replaces_the_old_one() -> None:
    drain = busy(100.0, 60.0)
    for each in range(1, 10 * int(3 * MEMORY_S)):
        drain.freed(1, 60.0 + each / 10)
    now = 60.0 + 3 * MEMORY_S
    assert drain.wait_s(10, now) == pytest.approx(1.0, rel=0.5)


def test_neither_the_first_query_nor_one_that_hangs_says_much_about_the_others() -> None:
    drain = DrainRate()
    drain.ran(5.0)
    for _ in range(20):
        drain.ran(0.01)
    assert drain.run_s == pytest.approx(0.01, rel=0.5)
    before = drain.run_s
    drain.ran(100.0)
    assert drain.run_s < 1.2 * before
