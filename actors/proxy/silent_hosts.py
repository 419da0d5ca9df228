"""Which other hosts do not answer at present: noticed within half a second.

Theory of operation. A proxy beats to the admin of each host that it has links to (its gate; see
actors/transport/beats.py). A host from which no answer has come for ``SILENT_S`` is *silent*. It
need not be lost: that is for the controller to judge, which takes its time, and only then are the
host's replicas replaced. Silence costs little where it is wrong: until the host answers again the
router sends its queries elsewhere, and connections with it are tried, of which those are lost that
do not work. After ``GONE_AFTER_S`` the controller has judged the host, too.

Each beat says when it was sent, and so does its answer. So an answer that waited in a cut link, or
in a host that was stopped, speaks of then and not of now. A proxy that was late itself judges
nothing until answers have had time to arrive.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable

from greenroom.actors.messages.queries import Address
from greenroom.actors.runtime.loop import Callback, Loop, Timer
from greenroom.actors.transport.beats import BeatLink

logger = logging.getLogger(__name__)

BEAT_S = 0.15
SILENT_S = 0.5
GONE_AFTER_S = 3.0
FIRST_S = 0.8  # for the first answer, which takes some handshakes
LATE_S = 0.2  # between two beats, beyond BEAT_S: this process was late

_BEAT = struct.Struct(">Q16x")  # when it was sent, in microseconds


class _Host:
    """What is known of one other host."""

    __slots__ = ("answered_at", "followers", "gate", "is_silent", "link")

    def __init__(self) -> None:
        self.gate = ""  # HOST:PORT
        self.link: BeatLink | None = None
        self.followers = 0
        self.answered_at = 0.0  # when the newest answered beat was sent
        self.is_silent = False


class SilentHosts:
    """Calls ``silent(host, for_long)`` with each beat to a host that does not answer, by its name.

    It is silent for long after ``GONE_AFTER_S``. ``answers(host)`` is called once it is not silent
    any more, or is not followed.
    """

    def __init__(
        self, loop: Loop, silent: Callable[[str, bool], None], answers: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._silent = silent
        self._answers = answers
        self._hosts: dict[str, _Host] = {}
        self._timer: Timer | None = None
        self._beat_at = 0.0

    def follow(self, name: str, process: Address) -> Callback:
        """Beat to the host of a process from now on; return what ends that."""
        host = self._hosts.setdefault(name, _Host())
        host.followers += 1
        at = process.addressDetails
        gate = f"{at.host}:{at.port}"
        if gate != host.gate:  # new, or back at another address
            self._hang_up(name, host)
            host.gate, host.answered_at = gate, self._now() + FIRST_S - SILENT_S
            target = self._loop.machine.address_of(gate)
            host.link = self._loop.beat_link(target, lambda beat: self._answered(name, host, beat))
        if self._timer is None:
            self._beat_at = self._now()
            self._beat()
        return lambda: self._unfollow(name, host)

    def _unfollow(self, name: str, host: _Host) -> None:
        host.followers -= 1
        if host.followers:
            return
        del self._hosts[name]
        self._hang_up(name, host)
        if not self._hosts and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self, name: str, host: _Host) -> None:
        if host.link is not None:
            host.link.close()
        if host.is_silent:  # not now: the caller is amid a change of its own
            host.is_silent = False
            self._loop.call_later(0, lambda: self._answers(name))

    def _now(self) -> float:
        return self._loop.asyncio.time()

    def _beat(self) -> None:
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        now = self._now()
        was_late = now - self._beat_at > BEAT_S + LATE_S
        self._beat_at = now
        beat = _BEAT.pack(int(now * 1e6))
        for name, host in list(self._hosts.items()):
            if host.link is not None:
                host.link.send(beat)
            silent_s = now - host.answered_at
            if host.is_silent:
                self._silent(name, not was_late and silent_s > GONE_AFTER_S)
            elif was_late:
                host.answered_at = max(host.answered_at, now - BEAT_S)
            elif silent_s > SILENT_S:
                logger.info("host %s does not answer", name)
                host.is_silent = True
                self._loop.try_host(host.gate)
                self._silent(name, False)

    def _answered(self, name: str, host: _Host, answer: bytes) -> None:
        sent_at = _BEAT.unpack(answer)[0] / 1e6
        host.answered_at = max(host.answered_at, sent_at)
        if host.is_silent and self._now() - sent_at < SILENT_S:
            logger.info("host %s answers again", name)
            host.is_silent = False
            self._answers(name)
