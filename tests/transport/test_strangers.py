from __future__ import annotations

from greenroom.actors.transport.admission import (
    MAX_LINES,
    MAX_SOURCE_LINES,
    WINDOW_S,
    PendingHandshakes,
    Refusals,
    TokenBucket,
)


def test_strangers_are_counted_until_they_have_left() -> None:
    strangers: PendingHandshakes[int] = PendingHandshakes()
    assert strangers.came(1, "a", 0.0) is None
    assert strangers.came(2, "a", 0.0) is None
    assert len(strangers) == 2
    assert strangers.left(1)
    assert not strangers.left(1)
    assert strangers.left(2)
    assert len(strangers) == 0


def test_each_has_its_time() -> None:
    strangers: PendingHandshakes[int] = PendingHandshakes(patience_s=5.0)
    strangers.came(1, "a", 0.0)
    strangers.came(2, "b", 1.0)
    assert strangers.overdue(4.9) == []
    assert strangers.overdue(5.0) == [1]
    assert strangers.overdue(6.0) == [1, 2]


def test_the_oldest_of_the_busiest_source_makes_room() -> None:
    strangers: PendingHandshakes[int] = PendingHandshakes(limit=4)
    for stranger, source in enumerate("abbb"):
        strangers.came(stranger, source, 0.0)
    assert strangers.came(4, "c", 1.0) == 1
    assert strangers.came(5, "b", 1.0) == 2
    assert len(strangers) == 4


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
