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
from collections.abc import Callable
from dataclasses import dataclass

from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.core.cluster.hosts import BEAT_S, LOST_AFTER_S

_BEAT = struct.Struct(">8sQQ")


@dataclass(slots=True)
class Heard:
    """The newest beat of a process that the controller listens to, by its number."""

    newest: int = 0


def answer(
    beat: bytes, controller: str, heard_of: Callable[[str], Heard | None], now: float
) -> tuple[bytes, str]:
    """Take a beat, at the controller's end; ``heard_of`` says what was heard of an incarnation.

    Return the answer, b"" for a beat that means nothing, and the incarnation of a process that
    hears us, else "".
    """
    name, number, newest_answer = _BEAT.unpack(beat)
    incarnation = name.hex()
    heard = heard_of(incarnation)
    if heard is None or number <= heard.newest:
        return b"", ""
    heard.newest = number
    at = int(now * 1e6)
    hears_us = newest_answer and 0 <= at - newest_answer < LOST_AFTER_S * 1e6
    return _BEAT.pack(bytes.fromhex(controller), at, number), incarnation if hears_us else ""


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
