"""Heartbeats between hosts: they prove that a link works both ways.

Theory of operation. A host's processes send a *beat* to the controller every ``BEAT_S``, over a
link of its own (actors/transport/beats.py). The controller answers each at once, and the next beat
names the newest answer received. A beat that names a recent answer thus proves that the host hears
the controller, too. Other beats do not count: they may have waited in a cut link, or in the memory
of a process that was stopped, and a link that works in one direction only is useless.

    beat    incarnation of the sender 8, its number u64, newest number heard u64
    answer  the same, of the controller
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.core.cluster.hosts import BEAT_S, LOST_AFTER_S

_BEAT = struct.Struct(">8sQQ")
KEPT = 64  # answers whose times are known; more than fit into LOST_AFTER_S

Clock = Callable[[], float]


class _Member:
    """What the controller knows of one process that beats."""

    __slots__ = ("answered_at", "newest", "number")

    def __init__(self) -> None:
        self.newest = 0  # number of the last beat
        self.number = 0  # of the last answer
        self.answered_at: dict[int, float] = {}


class BeatListener:
    """The controller's end: ``on_beat(incarnation)`` for each beat of a process that hears us."""

    def __init__(
        self, incarnation: str, on_beat: Callable[[str], None], clock: Clock = time.monotonic
    ) -> None:
        self._incarnation = bytes.fromhex(incarnation)
        self._on_beat = on_beat
        self._clock = clock
        self._members: dict[str, _Member] = {}

    def expect(self, incarnation: str) -> None:
        """Listen to this process from now on; harmless when that is done already."""
        self._members.setdefault(incarnation, _Member())

    def forget(self, incarnation: str) -> None:
        """Listen to a process no more."""
        self._members.pop(incarnation, None)

    def answer(self, beat: bytes) -> bytes:
        """Take a beat and return the answer; b"" to one that means nothing."""
        name, number, heard = _BEAT.unpack(beat)
        member = self._members.get(name.hex())
        if member is None or number <= member.newest:
            return b""
        now = self._clock()
        is_heard = now - member.answered_at.get(heard, float("-inf")) < LOST_AFTER_S
        member.newest = number
        member.number += 1
        member.answered_at[member.number] = now
        member.answered_at.pop(member.number - KEPT, None)
        if is_heard:
            self._on_beat(name.hex())
        return _BEAT.pack(self._incarnation, member.number, number)


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
        _, number, _ = _BEAT.unpack(answer)
        self._heard = max(self._heard, number)
        self._heard_at = self._loop.asyncio.time()
