"""When things are due."""

from __future__ import annotations

from greenroom.core.cluster.cluster import Schedule


def test_what_is_due_is_taken_once_and_the_rest_stays() -> None:
    schedule = Schedule()
    schedule.put("late", 9.0)
    schedule.put("soon", 1.0)
    assert schedule.next_at() == 1.0
    assert schedule.take(5.0) == {"soon"}
    assert schedule.take(5.0) == set()
    assert schedule.next_at() == 9.0


def test_a_newer_time_replaces_the_earlier_one() -> None:
    schedule = Schedule()
    schedule.put("a", 1.0)
    schedule.put("a", 3.0)
    assert schedule.take(2.0) == set()
    assert schedule.take(3.0) == {"a"}


def test_never_leaves_a_name_as_it_is() -> None:
    schedule = Schedule()
    schedule.put("a", float("inf"))
    assert schedule.next_at() == float("inf")
    assert schedule.take(1e9) == set()
