"""Hosts are lost quickly, back slowly, and judged by what the judge has listened to."""

from __future__ import annotations

import random

from greenroom.core.cluster.hosts import (
    BEAT_S,
    CHECK_S,
    GAP_S,
    LOST_AFTER_S,
    PAUSE_S,
    STEADY_S,
    Beats,
)


class Judge:
    """A judge that looks every LOOK_S, at a host whose beats the test decides on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.beats = Beats(self.now)
        self.judged: list[tuple[str, float]] = []

    def run(self, seconds: float, beats: float = 1.0, rng: random.Random | None = None) -> None:
        """Let time pass; each beat arrives with that probability."""
        rng = rng or random.Random(0)
        end = self.now + seconds
        while self.now < end:
            self.now += BEAT_S
            if rng.random() < beats:
                self.beats.heard(self.now)
            self.check()

    def check(self) -> None:
        if self.beats.check(self.now):
            self.judged.append(("lost" if self.beats.is_lost else "back", self.now))


def test_a_silent_host_is_lost_within_three_seconds_and_once() -> None:
    judge = Judge()
    judge.run(5)
    begun = judge.now
    judge.run(10, beats=0)
    ((what, at),) = judge.judged
    assert what == "lost"
    assert LOST_AFTER_S < at - begun < 3 - CHECK_S


def test_a_host_is_back_when_it_has_been_heard_steadily() -> None:
    judge = Judge()
    judge.run(5, beats=0)
    begun = judge.now
    judge.run(5)
    assert [what for what, _ in judge.judged] == ["lost", "back"]
    assert STEADY_S <= judge.judged[1][1] - begun < STEADY_S + 3 * BEAT_S


def test_a_link_that_comes_and_goes_leaves_a_host_lost() -> None:
    judge = Judge()
    judge.run(5, beats=0)
    for _ in range(20):
        judge.run(STEADY_S / 2)
        judge.run(GAP_S + 2 * BEAT_S, beats=0)
    assert [what for what, _ in judge.judged] == ["lost"]


def test_a_loss_of_thirty_percent_both_ways_never_flaps_in_an_hour() -> None:
    judge = Judge()
    judge.run(3600, beats=0.7 * 0.7, rng=random.Random(1))
    assert judge.judged == []


def test_time_in_which_the_judge_did_not_listen_does_not_count() -> None:
    judge = Judge()
    judge.run(5)
    judge.now += 60  # stopped, or the whole machine was
    judge.run(5)
    assert judge.judged == []


def test_a_host_that_is_abandoned_is_lost_at_once_and_can_come_back() -> None:
    judge = Judge()
    assert judge.beats.abandon()
    assert not judge.beats.abandon()
    judge.run(5)
    assert [what for what, _ in judge.judged] == ["back"]


def test_a_judge_that_is_always_late_still_judges() -> None:
    judge = Judge()
    begun = judge.now
    while not judge.judged:
        judge.now += PAUSE_S * 0.9
        judge.check()
        assert judge.now - begun < LOST_AFTER_S + PAUSE_S
