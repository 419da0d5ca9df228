"""Beats: only those of a known process that hears the answers count."""

from __future__ import annotations

import secrets
import time
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.actors.cluster import heartbeats
from greenroom.actors.cluster.heartbeats import BEAT_S, Beater, HostWatch
from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.loop import nothing
from greenroom.core.cluster.hosts import LOST_AFTER_S
from tests.support.lone_loop import LoneLoop


class Link:
    """The controller's end and one host's, on one loop, and what is between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = LoneLoop()
        self.host = Process(1, 1, secrets.token_hex(8))
        self.beats: list[str] = []
        self.gone: list[str] = []
        self.clock_ahead_s = 0.0
        now = lambda: self.loop.asyncio.time() + self.clock_ahead_s  # noqa: E731
        clock = SimpleNamespace(monotonic=now, monotonic_ns=time.monotonic_ns)
        monkeypatch.setattr(heartbeats, "time", clock)
        hosts: Any = SimpleNamespace(
            own=SimpleNamespace(name="own"),
            records={},
            beat=lambda host, _now: self.beats.append(host),
            gone=lambda host, _now: self.gone.append(host),
        )
        controller = Process(2, 2, secrets.token_hex(8))
        self.processes = HostWatch(self.loop, hosts, controller, nothing)
        self.answer = self.loop.answer_to = self.processes.answer
        self.watch(self.host)

    def watch(self, process: Process) -> None:
        self.processes.watch(process, "host", "", None, nothing)

    def beat(self) -> Beater:
        return Beater(self.loop, "controller", self.host.incarnation)

    def pass_beats(self, count: int) -> None:
        self.loop.pass_time(count * BEAT_S)

    @property
    def sent(self) -> list[bytes]:
        return [beat for each in self.loop.links for beat in each.sent]


@pytest.fixture
def link(monkeypatch):
    return Link(monkeypatch)


def test_a_host_that_hears_the_answers_is_heard_again_and_again(link):
    link.beat()
    link.pass_beats(4)
    assert link.beats == ["host"] * 4


def test_a_later_beater_of_the_same_process_is_heard_too(link):
    link.beat().close()
    heard = len(link.beats)
    link.beat()
    link.pass_beats(2)
    assert len(link.beats) > heard


def test_a_process_that_is_not_known_is_not_heard(link):
    link.processes.forget("host")
    link.beat()
    link.pass_beats(4)
    assert link.beats == []


def test_a_host_that_does_not_hear_the_answers_is_not_heard(link):
    def carry(beat: bytes) -> bytes:
        link.answer(beat)
        return b""  # lost on the way back

    link.loop.answer_to = carry
    beater = link.beat()
    link.pass_beats(4)
    assert link.beats == []
    assert beater.silent_s > 3 * BEAT_S


def test_a_beat_that_names_an_old_answer_is_not_heard(link):
    link.beat()
    link.pass_beats(2)
    assert link.beats
    link.clock_ahead_s += LOST_AFTER_S
    link.beats.clear()
    link.pass_beats(1)  # it names an answer from before
    assert link.beats == []
    link.pass_beats(2)
    assert link.beats


def test_a_beat_that_comes_again_or_late_counts_for_nothing(link):
    beater = link.beat()
    link.pass_beats(4)
    beater.close()
    heard = len(link.beats)
    assert [link.answer(beat) for beat in link.sent] == [b""] * len(link.sent)
    assert len(link.beats) == heard


def test_silence_is_counted_from_the_last_answer_and_a_closed_beater_ends_its_link(link):
    beater = link.beat()
    link.pass_beats(3)
    assert beater.silent_s <= BEAT_S
    link.loop.answer_to = lambda _beat: b""
    link.pass_beats(3)
    assert beater.silent_s > 2 * BEAT_S
    beater.close()
    assert link.loop.links[0].is_closed
    assert not link.loop.due()


def test_nothing_beats_for_a_controller_on_this_host(link):
    link.loop.beat_link = lambda *_: None  # type: ignore[method-assign]
    beater = link.beat()
    assert beater.silent_s == float("inf")
    assert link.sent == []
    beater.close()


def test_a_host_is_gone_with_the_last_process_that_beats_for_it(link):
    other = Process(3, 3, secrets.token_hex(8))
    link.watch(other)
    link.loop.end(link.host)
    assert link.gone == []
    link.loop.end(other)
    assert link.gone == ["host"]
