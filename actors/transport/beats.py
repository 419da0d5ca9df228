"""Beats over links of their own, which large messages cannot delay: the two ends of such a link.

Theory of operation. A beat is ``SIZE`` bytes; the process that it is for answers each at once with
as many. Its meaning is for those who send and answer (actors/cluster/heartbeats.py).

A link is any number of TCP connections, one as a rule. A connection that was cut for seconds sends
nothing for as long after the cut heals, since TCP doubles its pauses. So whenever nothing was heard
for ``REDIAL_S`` another connection is dialed, and the first that is answered ends all others. On
one that is lossy, few beats are under way: then the kernel sends what is lost again without longer
and longer pauses (``prepare_tcp``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from greenroom.actors.transport.tls import TlsStream

SIZE = 24
REDIAL_S = 0.5
MOST_DIALED = 3  # at once: a busy host is not kept busier
MOST_UNANSWERED = 3  # on a connection; the kernel calls it thin with fewer than 4 packets under way
_READ_SIZE = 64 * 1024

Dial = Callable[[], Coroutine[Any, Any, TlsStream]]


class BeatLink:
    """The end that beats. ``on_answer`` gets the answers, in the order of each connection."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, dial: Dial, on_answer: Callable[[bytes], None]
    ) -> None:
        self._loop = loop
        self._dial = dial
        self._on_answer = on_answer
        self._beat = b""
        self._tasks: set[asyncio.Task[None]] = set()  # one a connection
        self._unanswered: dict[TlsStream, int] = {}
        self._active_at = float("-inf")  # when it was heard or dialed last

    def send(self, beat: bytes) -> None:
        """Beat; where nothing is connected, as soon as that is so, unless another beat follows."""
        self._beat = beat
        now = self._loop.time()
        dialed = len(self._tasks) - len(self._unanswered)
        if now - self._active_at >= REDIAL_S and dialed < MOST_DIALED:
            self._active_at = now
            task = self._loop.create_task(self._connect())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        for stream, count in self._unanswered.items():
            if count < MOST_UNANSWERED:
                self._send(stream, count)

    def close(self) -> None:
        """Beat no more."""
        for task in self._tasks:
            task.cancel()
        for stream in self._unanswered:
            stream.close()
        self._unanswered.clear()

    def _send(self, stream: TlsStream, count: int) -> None:
        self._unanswered[stream] = count + 1
        with contextlib.suppress(OSError):  # its end is noticed by reading
            stream.send(self._beat)

    async def _connect(self) -> None:
        with contextlib.suppress(OSError):  # silence is all that counts
            stream = await self._dial()
            try:
                self._send(stream, 0)
                while received := await stream.receive(_READ_SIZE):
                    self._heard(stream, received)
            finally:
                self._unanswered.pop(stream, None)
                stream.close()

    def _heard(self, stream: TlsStream, received: bytes) -> None:
        self._active_at = self._loop.time()
        answers = list(beats_in(received))
        self._unanswered[stream] = max(self._unanswered[stream] - len(answers), 0)
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        for answer in answers:
            self._on_answer(answer)


async def answer_beats(stream: TlsStream, answer: Callable[[bytes], bytes]) -> None:
    """Answer what arrives until the connection ends; b"" is no answer."""
    with contextlib.suppress(OSError), contextlib.closing(stream):
        while received := await stream.receive(_READ_SIZE):
            answers = b"".join(map(answer, beats_in(received)))
            if answers:
                stream.send(answers)


def beats_in(received: bytes) -> Iterator[bytes]:
    """Yield the beats. Each travels in one TLS record, so none is ever torn."""
    return (received[at : at + SIZE] for at in range(0, len(received) - SIZE + 1, SIZE))
