"""Which processes count as silent, and when: with a clock in the test's hand."""

from __future__ import annotations

import pytest

from greenroom.core.silence import BUSY_TIMES, TICK_S, Doing, Silence, Ticks

LIMIT_S = 5.0


class Watched:
    """One process that is looked at once a tick."""

    def __init__(self) -> None:
        self.ticks, self.silence = Ticks(), Silence()
        self.now = 1000.0
        self.beats = 1
        self.check()

    def check(
        self, doing: Doing = Doing.STILL, *, patience_s: float = 0.0, runs_user_code: bool = False
    ) -> bool:
        """Look once; return whether the process is to be given up."""
        passed_s = self.ticks.passed_s(self.now)
        if self.silence.is_broken(self.beats):
            return False
        return self.silence.is_due(
            doing, passed_s, LIMIT_S, patience_s, runs_user_code=runs_user_code
        )

    def ticks_until_due(self, most: int = 200, doing: Doing = Doing.STILL, **more: object) -> int:
        for count in range(1, most + 1):
            self.now += TICK_S
            if self.check(doing, **more):  # type: ignore[arg-type]
                return count
        return 0


def test_what_stands_still_is_abandoned_after_the_limit() -> None:
    assert Watched().ticks_until_due() == LIMIT_S / TICK_S


def test_what_beats_is_never_abandoned() -> None:
    watched = Watched()
    for _ in range(100):
        watched.now += TICK_S
        watched.beats += 1
        assert not watched.check()


def test_a_beat_begins_the_silence_anew() -> None:
    watched = Watched()
    assert watched.ticks_until_due(most=4) == 0
    watched.beats += 1
    assert watched.ticks_until_due() == 1 + LIMIT_S / TICK_S


def test_what_has_never_beaten_is_not_silent_but_starts() -> None:
    watched = Watched()
    watched.beats = 0
    assert watched.ticks_until_due() == 0


@pytest.mark.parametrize("doing", [Doing.BUSY, Doing.DISK])
def test_what_is_busy_gets_more_time(doing: Doing) -> None:
    assert Watched().ticks_until_due(doing=doing) == BUSY_TIMES * LIMIT_S / TICK_S


def test_a_replica_may_be_busy_for_as_long_as_health_checks_let_it() -> None:
    assert Watched().ticks_until_due(doing=Doing.BUSY, runs_user_code=True) == 0
    assert Watched().ticks_until_due(runs_user_code=True) == LIMIT_S / TICK_S


def test_what_a_debugger_holds_is_not_silent() -> None:
    assert Watched().ticks_until_due(doing=Doing.HELD) == 0


def test_what_has_asked_for_patience_gets_it() -> None:
    assert Watched().ticks_until_due(patience_s=60.0) == 60 / TICK_S
    assert Watched().ticks_until_due(patience_s=1.0) == LIMIT_S / TICK_S


def test_time_in_which_the_watcher_itself_stood_still_does_not_count() -> None:
    watched = Watched()
    assert watched.ticks_until_due(most=4) == 0
    watched.now += 3600.0  # the machine was suspended
    assert not watched.check()
    assert watched.ticks_until_due() == LIMIT_S / TICK_S


def test_a_watcher_that_runs_by_fits_and_starts_judges_no_process() -> None:
    watched = Watched()
    for _ in range(100):
        watched.now += 3.0
        assert not watched.check()
