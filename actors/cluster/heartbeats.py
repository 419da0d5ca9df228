"""Heartbeats between hosts: they prove that a link works both ways.

Theory of operation. A host's processes send a *beat* to the controller every ``BEAT_S``, over a
link of its own (actors/transport/beats.py). The controller answers each at once, and the next beat
names the newest answer received. A beat that names a recent answer thus proves that the host hears
the controller, too. Other beats do not count: they may have waited in a cut link, or in the memory
of a process that was stopped, and a link that works in one direction only is useless. An answer
says when it was given, so that the controller sees from a beat alone how old that answer is.

    beat    incarnation of the sender 8, its number u64, time of the newest answer u64 (0: none)
    answer  incarnation of the controller 8, its time in microseconds u64, number of the beat u64
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass

from greenroom.actors.messages.queries import Address, Process
from greenroom.actors.runtime.loop import Callback, Loop, Timer, nothing
from greenroom.core.cluster.hosts import BEAT_S, LOST_AFTER_S, Hosts

_BEAT = struct.Struct(">8sQQ")


@dataclass(slots=True)
class _Watched:
    """A process of a host whose end is watched for."""

    host: str
    unwatch: Callback = nothing
    newest: int | None = None  # the number of its newest beat, where its beats are the host's


class HostWatch:
    """The controller's end: the host processes and proxies of all hosts, and what beats.

    With the last process that beats ends its host. One that cannot be reached is not gone: whether
    its host is lost is judged by its beats.
    """

    def __init__(self, loop: Loop, hosts: Hosts, controller: Process, changed: Callback) -> None:
        self._loop = loop
        self._hosts = hosts
        self._controller = controller
        self._changed = changed
        self._watched: dict[str, _Watched] = {}  # by incarnation
        loop.answer_beats(self.answer)

    def close(self) -> None:
        """Answer no more."""
        self._loop.answer_beats(lambda _beat: b"")

    def watch(
        self, process: Process, host: str, at: str, sender: Address | None, on_end: Callback
    ) -> None:
        """Run ``on_end`` when a process of a host ends, and take its beats as the host's.

        Those count unless another host has that name, as ``at`` shows; "" is not known.
        """
        incarnation = process.incarnation
        if incarnation not in self._watched:

            def ended() -> None:
                self._ended(incarnation)
                on_end()
                self._changed()

            self._watched[incarnation] = watched = _Watched(host)
            watched.unwatch = self._loop.watch_process(
                process, ended, sender, on_unreachable=nothing
            )
        watched = self._watched[incarnation]
        record = self._hosts.records.get(host)
        is_its = record is None or at in ("", record.address)
        if host != self._hosts.own.name and is_its and watched.newest is None:
            watched.newest = 0

    def _ended(self, incarnation: str) -> None:
        watched = self._watched.pop(incarnation, None)
        left = {each.host for each in self._watched.values() if each.newest is not None}
        if watched is not None and watched.newest is not None and watched.host not in left:
            self._hosts.gone(watched.host, time.monotonic())

    def forget(self, host: str) -> None:
        """Watch the processes of a host no more that is no more on record."""
        for incarnation, watched in list(self._watched.items()):
            if watched.host == host:
                watched.unwatch()
                del self._watched[incarnation]

    def answer(self, beat: bytes) -> bytes:
        """Take a beat; return the answer, b"" for one that means nothing."""
        name, number, newest_answer = _BEAT.unpack(beat)
        watched = self._watched.get(name.hex())
        if watched is None or watched.newest is None or number <= watched.newest:
            return b""
        watched.newest, now = number, time.monotonic()
        at = int(now * 1e6)
        if newest_answer and 0 <= at - newest_answer < LOST_AFTER_S * 1e6:  # it hears us
            self._loop.guarded(self._hosts.beat, watched.host, now)
        return _BEAT.pack(bytes.fromhex(self._controller.incarnation), at, number)


class Beater:
    """A host's end: beats to one controller, from now on; nothing for one on this host."""

    def __init__(self, loop: Loop, controller: Address, incarnation: str) -> None:
        self._loop = loop
        self._incarnation = bytes.fromhex(incarnation)
        self._number = 0
        self._heard = 0
        self._heard_at = loop.asyncio.time()
        self._timer: Timer | None = None
        self._link = loop.beat_link(controller, self._answered)
        if self._link is not None:
            self._beat()

    @property
    def silent_s(self) -> float:
        """For how long the controller has not answered; infinite for one on this host."""
        return float("inf") if self._link is None else self._loop.asyncio.time() - self._heard_at

    def close(self) -> None:
        """Beat no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.close()

    def _beat(self) -> None:
        assert self._link is not None
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        # The clock, not a count: a later Beater of this process must not begin below this one.
        self._number = max(self._number + 1, time.monotonic_ns())
        self._link.send(_BEAT.pack(self._incarnation, self._number, self._heard))

    def _answered(self, answer: bytes) -> None:
        _, given_at, _ = _BEAT.unpack(answer)
        self._heard = max(self._heard, given_at)
        self._heard_at = self._loop.asyncio.time()
