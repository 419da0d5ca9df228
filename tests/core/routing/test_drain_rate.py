"""How fast a backend gets through its queries, with a clock in the hand."""

from __future__ import annotations

import pytest

from greenroom.core.routing.queues import MEMORY_S, DrainRate


def busy(rate: float, seconds: float, begin: float = 0.0) -> DrainRate:
    """Return the pace of a backend that gets through so many per second while queries wait."""
    pace = DrainRate()
    pace.began(begin)
    for each in range(1, int(rate * seconds) + 1):
        pace.freed(1, begin + each / rate)
    return pace


@pytest.mark.parametrize("rate", [0.5, 10.0, 2000.0])
def test_the_wait_is_what_is_ahead_by_the_drain_rate(rate: float) -> None:
    pace = busy(rate, 30.0)
    assert pace.wait_s(100, 30.0) == pytest.approx(100 / rate, rel=0.15)
    assert pace.wait_s(0, 30.0) == 0.0


def test_without_a_slot_that_became_free_nothing_is_known() -> None:
    pace = DrainRate()
    pace.began(5.0)
    assert pace.wait_s(3, 6.0) is None
    assert pace.too_slow_for(3, 0.001, 6.0) is None, "so nobody is turned away"
    assert pace.retry_after_s(3, 5.1) == 1.0
    assert pace.retry_after_s(3, 25.0) == 20.0, "that it takes so long already is all there is"


def test_time_in_which_nothing_waited_does_not_count() -> None:
    pace = busy(10.0, 5.0)
    pace.began(1000.0)
    pace.freed(1, 1000.1)
    assert pace.wait_s(10, 1000.1) == pytest.approx(1.0, rel=0.05)


def test_a_new_rate_replaces_the_old_one() -> None:
    pace = busy(100.0, 60.0)
    for each in range(1, 10 * int(3 * MEMORY_S)):
        pace.freed(1, 60.0 + each / 10)
    now = 60.0 + 3 * MEMORY_S
    assert pace.wait_s(10, now) == pytest.approx(1.0, rel=0.5)


def test_with_more_slots_a_higher_rate_is_expected_at_once() -> None:
    pace = busy(10.0, 20.0)
    pace.resized(5.0)
    assert pace.wait_s(100, 20.0) == pytest.approx(2.0, rel=0.05)


def test_waiting_for_half_of_what_is_left_is_too_long() -> None:
    pace = busy(10.0, 20.0)
    assert pace.too_slow_for(10, 2.2, 20.0) is None
    assert pace.too_slow_for(10, 1.8, 20.0) == pytest.approx(1.0, rel=0.05)


def test_neither_the_first_query_nor_one_that_hangs_says_much_about_the_others() -> None:
    pace = DrainRate()
    pace.ran(5.0)
    for _ in range(20):
        pace.ran(0.01)
    assert pace.run_s == pytest.approx(0.01, rel=0.5)
    before = pace.run_s
    pace.ran(100.0)
    assert pace.run_s < 1.2 * before
