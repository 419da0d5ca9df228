"""Which hosts do not answer: noticed soon, taken back at once, and never by an old answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.actors.proxy.silent_hosts import BEAT_S, FIRST_S, GONE_AFTER_S, SILENT_S, SilentHosts
from tests.support.lone_loop import LoneLoop


class Watched:
    def __init__(self) -> None:
        self.loop = LoneLoop()
        self.heard: list[tuple[str, bool]] = []  # as far as it changes
        self.beats: list[bool] = []  # to a silent host: whether it is so for long
        self.hosts = SilentHosts(self.loop, self._silent, lambda host: self._note(host, False))

    def _silent(self, host: str, for_long: bool) -> None:
        self.beats.append(for_long)
        self._note(host, True)

    def _note(self, host: str, is_silent: bool) -> None:
        if self.heard[-1:] != [(host, is_silent)]:
            self.heard.append((host, is_silent))

    def follow(self, name: str = "b", host: str = "10.0.0.2") -> Callable[[], None]:
        at: Any = SimpleNamespace(addressDetails=SimpleNamespace(host=host, port=1900))
        return self.hosts.follow(name, at)


@pytest.fixture
def watched():
    return Watched()


def test_a_host_that_answers_is_never_silent(watched):
    watched.follow()
    watched.loop.pass_time(60)
    assert watched.heard == []
    assert [link.target.addressDetails.text for link in watched.loop.links] == ["10.0.0.2:1900"]


def test_a_host_that_stops_answering_is_silent_soon_and_back_with_its_next_answer(watched):
    watched.follow()
    watched.loop.pass_time(1)
    (link,) = watched.loop.links
    link.is_cut = True
    watched.loop.pass_time(SILENT_S - BEAT_S)
    assert (watched.heard, watched.loop.tried) == ([], [])
    watched.loop.pass_time(3 * BEAT_S)
    assert watched.heard == [("b", True)]
    watched.loop.pass_time(5)
    assert watched.loop.tried == ["10.0.0.2:1900"]  # once: what was sent will do
    link.is_cut = False
    watched.loop.pass_time(2 * BEAT_S)
    assert watched.heard == [("b", True), ("b", False)]


def test_each_beat_to_a_silent_host_says_so_and_whether_for_long(watched):
    watched.follow()
    watched.loop.pass_time(1)
    (link,) = watched.loop.links
    link.is_cut = True
    watched.loop.pass_time(GONE_AFTER_S - BEAT_S)
    assert watched.heard == [("b", True)]
    assert len(watched.beats) > (GONE_AFTER_S - SILENT_S - 3 * BEAT_S) / BEAT_S
    assert not any(watched.beats)
    watched.loop.pass_time(3 * BEAT_S)
    assert watched.beats[-1]
    link.is_cut = False
    watched.loop.pass_time(2 * BEAT_S)
    watched.beats.clear()
    watched.loop.pass_time(2 * GONE_AFTER_S)
    assert watched.beats == []


def test_an_answer_that_was_held_up_does_not_bring_a_host_back(watched):
    watched.follow()
    watched.loop.pass_time(1)
    (link,) = watched.loop.links
    link.is_cut = True
    watched.loop.pass_time(2)
    for beat in link.kept[:-5]:
        link.on_answer(beat)
    assert watched.heard == [("b", True)]


def test_a_host_has_a_little_longer_for_its_first_answer(watched):
    watched.loop.are_links_cut = True
    watched.follow()
    watched.loop.pass_time(FIRST_S)
    assert watched.heard == []
    watched.loop.pass_time(2 * BEAT_S)
    assert watched.heard == [("b", True)]


def test_a_process_that_was_late_itself_blames_no_host(watched):
    watched.follow()
    watched.loop.pass_time(1)
    (link,) = watched.loop.links
    link.is_cut = True
    watched.loop.stand_still(5)  # it was stopped
    watched.loop.pass_time(BEAT_S)
    link.is_cut = False  # its first answers came late
    watched.loop.pass_time(5)
    assert watched.heard == []


def test_a_host_is_followed_once_and_as_long_as_anything_there_is(watched):
    first, second = watched.follow(), watched.follow()
    (link,) = watched.loop.links
    first()
    assert not link.is_closed
    second()
    assert link.is_closed
    watched.loop.pass_time(10 * BEAT_S)
    assert not watched.loop.due()


def test_a_silent_host_that_is_followed_no_more_is_not_silent(watched):
    unfollow = watched.follow()
    watched.loop.pass_time(1)
    watched.loop.links[0].is_cut = True
    watched.loop.pass_time(1)
    unfollow()
    watched.loop.pass_time(0.1)
    assert watched.heard == [("b", True), ("b", False)]


def test_a_host_that_is_back_at_another_address_is_beaten_to_there(watched):
    watched.follow()
    watched.loop.pass_time(1)
    watched.loop.links[0].is_cut = True
    watched.loop.pass_time(1)
    watched.follow(host="10.0.0.9")
    watched.loop.pass_time(5)
    assert watched.loop.links[0].is_closed
    assert watched.loop.links[1].target.addressDetails.text == "10.0.0.9:1900"
    assert watched.heard == [("b", True), ("b", False)]
