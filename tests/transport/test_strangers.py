from __future__ import annotations

from greenroom.actors.transport.admission import (
    MAX_LINES,
    MAX_SOURCE_LINES,
    WINDOW_S,
    Refusals,
    TokenBucket,
)


def test_a_kind_of_refusal_is_said_once_per_source_and_window() -> None:
    refusals = Refusals()
    assert refusals.say("a", "garbage", 0.0)
    assert not refusals.say("a", "garbage", 1.0)
    assert refusals.say("a", "wrong key", 1.0)
    assert refusals.say("b", "garbage", 1.0)
    assert refusals.say("a", "garbage", WINDOW_S)
    assert refusals.unsaid() == 1, "also of a window that is over"
    assert refusals.unsaid() == 0


def test_a_flood_of_kinds_has_few_lines() -> None:
    refusals = Refusals()
    said = sum(refusals.say("a", f"kind {number}", 1.0) for number in range(10_000))
    assert said == MAX_SOURCE_LINES
    assert refusals.say("b", "garbage", 1.0), "another source is still heard"
    said += sum(refusals.say(f"{number}", "garbage", 1.0) for number in range(10_000))
    assert said == MAX_LINES - 1
    assert refusals.unsaid() == 20_000 - said


def test_a_burst_is_taken_without_a_rest_and_the_long_run_is_bounded() -> None:
    allowance, now, taken = TokenBucket(most=512, per_s=4000.0), 1000.0, 0
    rests = []
    while now < 1010.0:
        rest_s = allowance.take(32, now)
        taken += 32
        rests.append(rest_s)
        now += rest_s + 0.001
    assert not any(rests[:16]), "512 at once"
    assert all(rests[30:])
    assert taken <= 512 + 10 * 4000 + 32


def test_after_a_lull_no_more_is_taken_at_once_than_at_first() -> None:
    allowance = TokenBucket(most=100, per_s=1000.0)
    assert allowance.take(100, 5.0) == 0.0
    assert allowance.take(10, 5.0) == 0.01
    assert allowance.take(100, 500.0) == 0.0
    assert allowance.take(1, 500.0) == 0.001
