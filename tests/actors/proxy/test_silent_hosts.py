"""Which hosts do not answer: noticed soon, taken back at once, and never by an old answer."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.actors.proxy.silent_hosts import BEAT_S, FIRST_S, LOST_S, SILENT_S, SilentHosts

A_S = 0.01  # that a beat and its answer take


class Link:
    """To one host, which may keep beats instead of answering them."""

    def __init__(self, loop: Loop, gate: str, on_answer: Callable[[bytes], None]) -> None:
        self.loop, self.gate, self.on_answer = loop, gate, on_answer
        self.is_closed, self.is_cut = False, loop.are_links_cut
        self.kept: list[bytes] = []

    def send(self, beat: bytes) -> None:
        if self.is_cut:
            self.kept.append(beat)
        else:
            self.loop.call_later(A_S, lambda: self.on_answer(beat))

    def close(self) -> None:
        self.is_closed = True


class Loop:
    """Time that the test moves on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asyncio = SimpleNamespace(time=lambda: self.now)
        self.machine = SimpleNamespace(address_of=lambda gate: gate)
        self.are_links_cut = False
        self.links: list[Link] = []
        self.tried: list[str] = []
        self.try_host = self.tried.append
        self._due: list[Any] = []
        self._order = itertools.count()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        timer = SimpleNamespace(callback=callback)
        timer.cancel = lambda: setattr(timer, "callback", lambda: None)
        heapq.heappush(self._due, (self.now + delay_s, next(self._order), timer))
        return timer

    def beat_link(self, gate: Any, on_answer: Callable[[bytes], None]) -> Link:
        self.links.append(Link(self, gate, on_answer))
        return self.links[-1]

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            at, _, timer = heapq.heappop(self._due)
            self.now = max(self.now, at)
            timer.callback()
        self.now = end

    def is_idle(self) -> bool:
        self.run(10 * BEAT_S)
        return not self._due


class Watched:
    def __init__(self) -> None:
        self.loop = Loop()
        self.heard: list[tuple[str, bool]] = []
        self.lost: list[str] = []
        loop: Any = self.loop
        changed = lambda host, is_silent: self.heard.append((host, is_silent))  # noqa: E731
        self.hosts = SilentHosts(loop, changed, self.lost.append)

    def follow(self, name: str = "b", host: str = "10.0.0.2") -> Callable[[], None]:
        at: Any = SimpleNamespace(addressDetails=SimpleNamespace(host=host, port=1900))
        return self.hosts.follow(name, at)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_host_that_answers_is_never_silent(watched: Watched) -> None:
    watched.follow()
    watched.loop.run(60)
    assert watched.heard == []
    assert [link.gate for link in watched.loop.links] == ["10.0.0.2:1900"]


def test_a_host_that_stops_answering_is_silent_soon_and_back_with_its_next_answer(
    watched: Watched,
) -> None:
    watched.follow()
    watched.loop.run(1)
    (link,) = watched.loop.links
    link.is_cut = True
    watched.loop.run(SILENT_S - BEAT_S)
    assert (watched.heard, watched.loop.tried) == ([], [])
    watched.loop.run(3 * BEAT_S)
    assert watched.heard == [("b", True)]
    watched.loop.run(5)
    assert watched.loop.tried == ["10.0.0.2:1900"]  # once: what was sent will do
    link.is_cut = False
    watched.loop.run(2 * BEAT_S)
    assert watched.heard == [("b", True), ("b", False)]


def test_a_host_that_is_silent_for_long_is_called_lost_until_it_answers(watched: Watched) -> None:
    watched.follow()
    watched.loop.run(1)
    (link,) = watched.loop.links
    link.is_cut = True
    watched.loop.run(LOST_S - BEAT_S)
    assert (watched.heard, watched.lost) == ([("b", True)], [])
    watched.loop.run(3 * BEAT_S)
    assert set(watched.lost) == {"b"}
    link.is_cut = False
    watched.loop.run(2 * BEAT_S)
    watched.lost.clear()
    watched.loop.run(2 * LOST_S)
    assert watched.lost == []


def test_an_answer_that_was_held_up_does_not_bring_a_host_back(watched: Watched) -> None:
    watched.follow()
    watched.loop.run(1)
    (link,) = watched.loop.links
    link.is_cut = True
    watched.loop.run(2)
    for beat in link.kept[:-5]:
        link.on_answer(beat)
    assert watched.heard == [("b", True)]


def test_a_host_has_a_little_longer_for_its_first_answer(watched: Watched) -> None:
    watched.loop.are_links_cut = True
    watched.follow()
    watched.loop.run(FIRST_S)
    assert watched.heard == []
    watched.loop.run(2 * BEAT_S)
    assert watched.heard == [("b", True)]


def test_a_process_that_was_late_itself_blames_no_host(watched: Watched) -> None:
    watched.follow()
    watched.loop.run(1)
    watched.loop.now += 5  # it was stopped
    watched.loop.run(5)
    assert watched.heard == []


def test_a_host_is_followed_once_and_as_long_as_anything_there_is(watched: Watched) -> None:
    first, second = watched.follow(), watched.follow()
    (link,) = watched.loop.links
    first()
    assert not link.is_closed
    second()
    assert link.is_closed
    assert watched.loop.is_idle()


def test_a_silent_host_that_is_followed_no_more_is_not_silent(watched: Watched) -> None:
    unfollow = watched.follow()
    watched.loop.run(1)
    watched.loop.links[0].is_cut = True
    watched.loop.run(1)
    unfollow()
    watched.loop.run(0.1)
    assert watched.heard == [("b", True), ("b", False)]


def test_a_host_that_is_back_at_another_address_is_beaten_to_there(watched: Watched) -> None:
    watched.follow()
    watched.loop.run(1)
    watched.loop.links[0].is_cut = True
    watched.loop.run(1)
    watched.follow(host="10.0.0.9")
    watched.loop.run(5)
    assert watched.loop.links[0].is_closed
    assert watched.loop.links[1].gate == "10.0.0.9:1900"
    assert watched.heard == [("b", True), ("b", False)]
