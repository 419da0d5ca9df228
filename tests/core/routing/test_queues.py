"""Which endpoint has the next turn where several wait for one backend."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.routing.queues import FairQueue
from greenroom.core.routing.tickets import Ticket
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
        lines.take(first)
        names += first.endpoint
    return names


def test_lines_take_turns_however_long_they_are() -> None:
    assert served(waiting(*"aaaaaabbc"), 9) == "abcabaaaa"


def test_a_line_that_begins_goes_before_those_that_stand() -> None:
    lines = waiting(*"aaaabbbb")
    assert served(lines, 2) == "ab"
    lines.add(ticket(100, "c"))
    assert served(lines, 3) == "cab"


def test_one_that_asks_for_one_thing_at_a_time_is_new_only_once_per_round() -> None:
    lines = waiting(*"aaaabbbb")
    served(lines, 2)
    lines.add(ticket(100, "c"))
    assert served(lines, 1) == "c"
    lines.add(ticket(101, "c"))
    assert served(lines, 3) == "abc"


def test_what_is_put_back_has_the_next_turn() -> None:
    lines = waiting(*"aabb")
    first = lines.first()
    assert first is not None
    lines.take(first)
    lines.put_first(first)
    assert lines.first() is first
    assert lines.size == 4


def test_an_empty_queue_owes_no_endpoint_a_turn() -> None:
    lines = waiting("a")
    served(lines, 1)
    lines.add(ticket(1, "b"))
    lines.add(ticket(2, "a"))
    assert served(lines, 2) == "ba"
    assert lines.first() is None


def test_what_is_taken_out_leaves_as_it_came() -> None:
    lines = waiting(*"abab")
    assert [t.number for t in lines.take_all("a")] == [0, 2]
    assert [t.number for t in lines.take_all("nobody")] == []
    assert [t.number for t in lines.take_all()] == [1, 3]
    assert lines.size == 0


def test_the_longest_line_gives_up_its_newest_for_one_that_stays_shorter() -> None:
    lines = waiting(*"aaab")
    given_up = lines.longest_beside("b")
    assert given_up is not None
    assert given_up.number == 2
    assert lines.longest_beside("a") is None
    lines.remove(given_up)
    assert lines.longest_beside("b") is None, "they would change places for ever"
    assert FairQueue().longest_beside("a") is None


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
            lines.take(first)
            since[first.endpoint] = Counter()
            for other in since.values():
                other[first.endpoint] += 1
            since = {name: turns for name, turns in since.items() if lines.length(name)}
            assert all(turns <= 2 for each in since.values() for turns in each.values())
    assert lines.size == sum(lines.length(name) for name in "abcd")
