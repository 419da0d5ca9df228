"""Answers that come in parts: the replica's end, and the caller's.

Theory of operation. Parts go straight from the replica to whoever asked, as whole answers do. The
replica sends at most ``WINDOW`` bytes ahead of what was taken at the other end; beyond that
:meth:`Sender.send` waits, so a slow client slows the generator down and costs no memory. The caller
tells what was taken, and that it wants no more, to the replica itself: the router has no part in a
stream but its slot, and may die meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from understudy.actors.messages import Answer, FailedAnswer, StreamBegun, StreamEnded, StreamPart

WINDOW = 256 * 1024
MAX_PART = 64 * 1024
PART_COST = 256  # what a part costs beside its bytes, so that empty ones are bounded too


class Sender:
    """The replica's end of one stream, on user code's loop; ``put`` sends an item to the caller."""

    def __init__(self, query_id: int, put: Callable[[StreamBegun | StreamPart], None]) -> None:
        self._query_id = query_id
        self._put = put
        self._ahead = 0
        self._room: asyncio.Future[None] | None = None

    async def send(self, data: bytes) -> None:
        """Send the next bytes; returns when more may be made."""
        view = memoryview(data)
        for start in range(0, len(view), MAX_PART):
            part = StreamPart(self._query_id, bytes(view[start : start + MAX_PART]))
            self._put(part)
            self._ahead += cost(part)
            while self._ahead >= WINDOW:
                self._room = asyncio.get_running_loop().create_future()
                await self._room

    def taken(self, size: int) -> None:
        """Note that the caller has taken so much."""
        self._ahead -= size
        room = self._room
        if room is not None and self._ahead < WINDOW and not room.done():
            room.set_result(None)


def cost(part: StreamPart) -> int:
    """Return what a part counts for in the window."""
    return len(part.data) + PART_COST


class Source(Protocol):
    """What a :class:`Stream` needs of its caller."""

    def taken(self, size: int) -> None:
        """Tell the replica."""

    def stop(self) -> None:
        """Tell everybody that nobody wants more of it."""


class StreamFailedError(Exception):
    """A stream broke off; the text says why."""


class Stream:
    """The caller's end of one stream, on its loop: what a query was answered with."""

    def __init__(self, begun: StreamBegun, source: Source) -> None:
        self.status = begun.status
        self.headers = begun.headers
        self._source = source
        self._parts: deque[StreamPart] = deque()
        self._untold = 0  # taken, and the replica does not know
        self._end: Answer | None = None
        self._arrival: asyncio.Future[None] | None = None

    async def next(self) -> bytes | None:
        """Return the next bytes, None at the end; StreamFailedError when it broke off.

        To ask for more means that what came before was taken.
        """
        while not self._parts:
            if self._end is not None:
                _check_end(self._end)
                return None
            self._tell()
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        part = self._parts.popleft()
        self._untold += cost(part)
        if self._untold >= WINDOW // 2:
            self._tell()
        return part.data

    def close(self) -> None:
        """Want no more of it; harmless when it is over."""
        if self._end is None:
            self._end = FailedAnswer(0, "RequestCancelledError", "closed")
            self._source.stop()

    def arrived(self, part: StreamPart) -> None:
        """Take the next part."""
        self._parts.append(part)
        self._wake()

    def ended(self, end: Answer) -> None:
        """Take the end."""
        if self._end is None:
            self._end = end
            self._wake()

    def _tell(self) -> None:
        if self._untold:
            self._source.taken(self._untold)
            self._untold = 0

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


def _check_end(end: Answer) -> None:
    if not isinstance(end, StreamEnded):
        text = end.text if isinstance(end, FailedAnswer) else "it was answered anew"
        raise StreamFailedError(text)
