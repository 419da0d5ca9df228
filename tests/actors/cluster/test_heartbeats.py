"""Beats: only those of a known process that hears the answers count."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.actors.cluster.heartbeats import Beater, BeatListener
from greenroom.core.cluster.hosts import LOST_AFTER_S


class Link:
    """The controller's end and one host's, on one loop, and what is between them."""

    def __init__(self) -> None:
        self.asyncio = asyncio.new_event_loop()
        self.controller, self.host = secrets.token_hex(8), secrets.token_hex(8)
        self.beats: list[str] = []
        self.clock_ahead_s = 0.0
        self.listener = BeatListener(
            self.controller, self.beats.append, lambda: time.monotonic() + self.clock_ahead_s
        )
        self.carry: Callable[[bytes], bytes] = self.listener.answer
        self.sent: list[bytes] = []
        self.is_closed = False
        self.beater: Beater | None = None

    def beat(self) -> Beater:
        loop: Any = self
        self.beater = Beater(loop, SimpleNamespace(), self.host)
        return self.beater

    # What a Beater needs of its loop, and of a link.

    def beat_link(self, _target: Any, on_answer: Callable[[bytes], None]) -> Any:
        self._on_answer = on_answer
        return self

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self.asyncio.call_later(delay_s / 20, callback)

    def send(self, beat: bytes) -> None:
        self.sent.append(beat)
        if answer := self.carry(beat):
            self._on_answer(answer)

    def close(self) -> None:
        self.is_closed = True

    def until(self, condition: Callable[[], object]) -> None:
        async def wait() -> None:
            deadline = time.monotonic() + 10
            while not condition():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.002)

        self.asyncio.run_until_complete(wait())

    def until_sent(self, more: int) -> None:
        """Let so many more beats be sent; what must not happen has had its chance."""
        before = len(self.sent)
        self.until(lambda: len(self.sent) >= before + more)


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    if link.beater is not None:
        link.beater.close()
    link.asyncio.close()


def test_a_host_that_hears_the_answers_is_heard_again_and_again(link: Link) -> None:
    link.listener.expect(link.host)
    link.beat()
    link.until(lambda: len(link.beats) >= 3)
    assert set(link.beats) == {link.host}


def test_a_later_beater_of_the_same_process_is_heard_too(link: Link) -> None:
    link.listener.expect(link.host)
    link.beat().close()
    heard = len(link.beats)
    link.beat()
    link.until(lambda: len(link.beats) > heard)


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_process_that_is_not_known_is_not_heard(link: Link, is_forgotten: bool) -> None:
    if is_forgotten:
        link.listener.expect(link.host)
        link.listener.forget(link.host)
    link.beat()
    link.until_sent(4)
    assert link.beats == []


def test_a_host_that_does_not_hear_the_answers_is_not_heard(link: Link) -> None:
    def carry(beat: bytes) -> bytes:
        link.listener.answer(beat)
        return b""  # lost on the way back

    link.listener.expect(link.host)
    link.carry = carry
    beater = link.beat()
    link.until_sent(4)
    assert link.beats == []
    assert beater.silent_s > 0


def test_a_beat_that_names_an_old_answer_is_not_heard(link: Link) -> None:
    link.listener.expect(link.host)
    link.beat()
    link.until(lambda: link.beats)
    link.clock_ahead_s += LOST_AFTER_S
    link.beats.clear()
    link.until_sent(1)  # it names an answer from before
    assert link.beats == []
    link.until(lambda: link.beats)


def test_a_beat_that_comes_again_or_late_counts_for_nothing(link: Link) -> None:
    link.listener.expect(link.host)
    link.beat()
    link.until_sent(4)
    assert link.beater is not None
    link.beater.close()
    heard = len(link.beats)
    assert [link.listener.answer(beat) for beat in link.sent] == [b""] * len(link.sent)
    assert len(link.beats) == heard


def test_silence_is_counted_from_the_last_answer_and_a_closed_beater_ends_its_link(
    link: Link,
) -> None:
    link.listener.expect(link.host)
    beater = link.beat()
    link.until_sent(3)
    assert beater.silent_s < 0.5
    link.carry = lambda _beat: b""
    link.until(lambda: beater.silent_s > 0.05)
    beater.close()
    assert link.is_closed


def test_nothing_beats_for_a_controller_on_this_host(link: Link) -> None:
    link.beat_link = lambda *_: None  # type: ignore[method-assign]
    beater = link.beat()
    assert beater.silent_s == float("inf")
    assert link.sent == []
    beater.close()
