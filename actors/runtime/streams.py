"""What comes in parts: both ends, of an answer and of what follows a query.

Theory of operation. Parts go straight between a replica and whoever asked, as whole answers do. The
sending end keeps at most ``WINDOW`` bytes ahead of what was taken at the other; beyond that it
waits. So a slow client slows a generator down, slow user code slows its client, and neither costs
memory. The router has no part in it but the query's slot, and may die meanwhile.

Answers go from a :class:`Sender` to a :class:`Stream`. What follows a query goes from a
:class:`greenroom.actors.caller.feeds.Feed` to :class:`Parts` in the replica.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Protocol

from greenroom.actors.messages.queries import (
    END,
    MORE,
    Answer,
    FailedAnswer,
    StreamBegun,
    StreamEnded,
    StreamPart,
)
from greenroom.core.routing.tickets import BODY

WINDOW = 512 * 1024
MAX_PART = 256 * 1024
# Of a request's body, whose sender reads large parts only while they are taken at once. With those
# of an answer, 10 MB there and back took 1.4 times the time.
BODY_WINDOW = MAX_BODY_PART = 1024 * 1024
MAX_JOINED = 64 * 1024  # bytes of small parts that are joined to one
COME_ROUND_S = 0.002
# What a part costs beside its bytes, so that empty ones are bounded too; less when it is joined to
# another, after which only its bytes are left of it.
PART_COST = 256
JOINED_COST = 48
# So many are joined at most: each message wakes its receiver, and that costs more than the parts.
# What was made in a turn of the loop leaves at its end anyway, after COME_ROUND_S at most.
MOST_JOINED = 256


def window_for(follows: str) -> int:
    """Return how far a sender may be ahead: of an answer, or of what follows a query."""
    return BODY_WINDOW if follows == BODY else WINDOW


class StreamFailedError(Exception):
    """A stream broke off; the text says why."""


class NobodyListensError(OSError):
    """The other end wants no more; ASGI asks for an OSError where something is sent to it."""


class Window:
    """The sending end's count of what is under way; one at a time may wait for room."""

    def __init__(self, follows: str = "") -> None:
        self._size = window_for(follows)
        self._ahead = 0
        self._is_closed = False
        self._waiting: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether more may be sent now."""
        return self._ahead < self._size and not self._is_closed

    def sent(self, size: int) -> None:
        """Count what was sent."""
        self._ahead += size

    def taken(self, size: int) -> None:
        """Count what the other end has taken."""
        self._ahead -= size
        if self._ahead < self._size:
            self._wake()

    def reset(self) -> None:
        """Begin anew: what is under way goes to an end that is forgotten."""
        self._ahead = 0
        self._wake()

    def close(self) -> None:
        """Let nobody wait for an end that will take nothing more."""
        self._is_closed = True
        self._wake()

    async def room(self) -> None:
        """Wait until more may be sent; NobodyListensError when it never may."""
        while self._ahead >= self._size and not self._is_closed:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._is_closed:
            raise NobodyListensError("the other end has gone")

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class Sender:
    """The replica's end of an answer, on user code's loop; ``put`` sends an item to the caller.

    What is made in one turn of the loop leaves joined, at its end; ``at_turn_end`` calls back then.
    """

    def __init__(
        self,
        query_id: int,
        put: Callable[[StreamPart], None],
        at_turn_end: Callable[[Callable[[], None]], object],
    ) -> None:
        self._query_id = query_id
        self._put = put
        self._at_turn_end = at_turn_end
        self._gathered: list[bytes] = []
        self._gathered_size = 0
        self._flush_due = False
        self._window = Window()
        self._came_round_at = 0.0
        self.taken = self._window.taken
        self.close = self._window.close

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """Send the next bytes; returns when more may be made.

        What was sent leaves when the loop comes round, so a generator that awaits nothing else
        must await that now and then.
        """
        if ends == MORE and len(data) < MAX_JOINED:
            self._gather(data)
            if not self._window.is_open:
                await self._window.room()
        else:
            self.flush()
            for part in pieces(self._query_id, data, ends):
                self._put(part)
                self._window.sent(cost(part))
                await self._window.room()
        if monotonic() - self._came_round_at > COME_ROUND_S:
            await asyncio.sleep(0)
            self._came_round_at = monotonic()

    def flush(self) -> None:
        """Put what has gathered, before anything else is put for this query."""
        gathered, self._gathered, self._gathered_size = self._gathered, [], 0
        if gathered:
            self._put(StreamPart(self._query_id, b"".join(gathered), MORE, len(gathered)))

    def _gather(self, data: bytes) -> None:
        size = len(data)
        if self._gathered_size + size > MAX_JOINED or len(self._gathered) >= MOST_JOINED:
            self.flush()
        self._window.sent(size + (JOINED_COST if self._gathered else PART_COST))
        self._gathered.append(data)
        self._gathered_size += size
        if not self._flush_due:
            self._flush_due = True
            self._at_turn_end(self._turn_ended)

    def _turn_ended(self) -> None:
        self._flush_due = False
        self.flush()


def pieces(number: int, data: bytes, ends: int, most: int = MAX_PART) -> Iterator[StreamPart]:
    """Cut ``data`` into parts; the last one tells what they end."""
    if len(data) <= most:
        if data or ends != MORE:
            yield StreamPart(number, data, ends)
        return
    view = memoryview(data)
    last = (len(view) - 1) // most * most
    for start in range(0, last, most):
        yield StreamPart(number, bytes(view[start : start + most]))
    yield StreamPart(number, bytes(view[last:]), ends)


def cost(part: StreamPart) -> int:
    """Return what a part counts for in the window."""
    return len(part.data) + PART_COST + JOINED_COST * (part.parts - 1)


class Parts:
    """The taking end, on its loop; ``tell_taken`` tells the other how much has been taken."""

    def __init__(self, tell_taken: Callable[[int], None], follows: str = "") -> None:
        self._tell_taken = tell_taken
        self._window = window_for(follows)
        self._parts: deque[StreamPart] = deque()
        self._untold = 0  # taken, and the other end does not know
        self._is_complete = False
        self._is_over = False
        self._failure = ""  # why it is over, where it is no good end
        self._arrival: asyncio.Future[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Return whether the END is here, though perhaps not taken yet."""
        return self._is_complete

    async def next(self) -> StreamPart | None:
        """Return the next part, None at the end; StreamFailedError when it broke off.

        Cancelling it loses nothing.
        """
        while not self._parts:
            if self._is_over:
                if self._failure:
                    raise StreamFailedError(self._failure)
                return None
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        part = self._parts.popleft()
        self._took(part)
        return part

    def _took(self, part: StreamPart) -> None:
        self._untold += cost(part)
        # Not for each: the sender may be a window ahead, so it cannot wait for less than this.
        if self._untold >= self._window // 2:
            self._tell_taken(self._untold)
            self._untold = 0

    async def next_bytes(self, most: int) -> bytes | None:
        """Return the bytes of all parts that are here, up to ``most``; else like :meth:`next`."""
        part = await self.next()
        if part is None or not self._parts:
            return None if part is None else part.data
        found = [part.data]
        size = len(part.data)
        while self._parts and (size := size + len(self._parts[0].data)) <= most:
            part = self._parts.popleft()
            found.append(part.data)
            self._took(part)
        return b"".join(found)

    def arrived(self, part: StreamPart) -> None:
        """Take the next part."""
        self._parts.append(part)
        self._is_complete = part.ends == END
        self._wake()

    def ended(self, failure: str = "") -> None:
        """Take the end, after the parts that are here; only the first counts."""
        if not self._is_over:
            self._is_over, self._failure = True, failure
            self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class Source(Protocol):
    """What a :class:`Stream` needs of its caller."""

    def taken(self, size: int) -> None:
        """Tell the replica."""

    def stop(self) -> None:
        """Tell everybody that nobody wants more of it."""


class Stream:
    """The caller's end of an answer, on its loop: what a query was answered with."""

    def __init__(self, begun: StreamBegun, source: Source) -> None:
        self.status = begun.status
        self.headers = begun.headers
        self._source = source
        self._is_over = self._is_left = False
        self._parts = Parts(source.taken)
        self.arrived: Callable[[StreamPart], None] = self._parts.arrived
        self.next_part = self._parts.next

    async def next(self) -> bytes | None:
        """Return the next bytes, None at the end; StreamFailedError when it broke off."""
        return await self._parts.next_bytes(MAX_JOINED)

    def close(self) -> None:
        """Want no more of it; harmless when it is over, or was left."""
        if not self._is_left:
            self._stop()

    def leave(self) -> None:
        """Want no more of it, and let it go on to its end; any more of it stops it."""
        self._is_left = True
        self.arrived = lambda _part: self._stop()

    def _stop(self) -> None:
        if not self._is_over:
            self._source.stop()
        self.ended(FailedAnswer(0, "RequestCancelledError", "closed"))

    def ended(self, end: Answer) -> None:
        """Take the end."""
        self._is_over = True
        self._parts.ended(_failure_of(end))


def _failure_of(end: Answer) -> str:
    if isinstance(end, StreamEnded):
        return ""
    return end.text if isinstance(end, FailedAnswer) else "it was answered anew"
