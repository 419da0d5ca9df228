"""Everything that travels in parts: answers, values of generators, and uploads.

Theory of operation. Parts go straight between a replica and the caller, as whole answers do. The
sending end keeps at most ``WINDOW`` bytes ahead of what the other end has taken; beyond that it
waits. So a slow client slows a generator down, slow user code slows its client, and neither costs
memory. The router only holds the query's slot, and may die meanwhile.

A replica sends an answer with a :class:`Sender`; the caller takes it from a :class:`Stream`. A
caller sends what follows a query with a :class:`~greenroom.actors.caller.uploads.Upload`; the
replica takes it from :class:`Parts`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
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
from greenroom.actors.runtime.loop import Callback, nothing
from greenroom.core.routing.tickets import BODY

WINDOW = 512 * 1024
MAX_PART = 256 * 1024
# A request's body is read in large parts only while they are taken at once. With the sizes of an
# answer, 10 MB there and back took 1.4 times as long.
BODY_WINDOW = MAX_BODY_PART = 1024 * 1024
MAX_JOINED = 64 * 1024  # bytes of small parts that are joined into one
YIELD_AFTER_S = 0.002
# Added to the size of each part, so that empty parts are bounded, too. A part that is joined to
# another one counts its bytes only.
PART_COST = 256
JOINED_COST = 48
# Each message wakes its receiver, which costs more than the parts in it; but what a turn of the
# loop produced should leave soon, too.
MOST_JOINED = 256


def window_for(follows: str) -> int:
    """Return how far a sender may be ahead: of an answer, or of what follows a query."""
    return BODY_WINDOW if follows == BODY else WINDOW


class StreamFailedError(Exception):
    """A stream broke off; the text says why."""


class NobodyListensError(OSError):
    """The other end wants no more. ASGI asks for an OSError when an app sends to it."""


class Window:
    """The sending end's count of what is under way; one task at a time may wait for room."""

    def __init__(self, follows: str = "") -> None:
        self._size = window_for(follows)
        self._ahead = 0
        self._is_closed = False
        self._waiting: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether more may be sent now."""
        return self._ahead < self._size and not self._is_closed

    @property
    def is_closed(self) -> bool:
        """Return whether the other end will take nothing more."""
        return self._is_closed

    def sent(self, size: int) -> None:
        """Count what was sent."""
        self._ahead += size

    def taken(self, size: int) -> None:
        """Count what the other end has taken."""
        self._ahead -= size
        if self._ahead < self._size:
            self._wake()

    def reset(self) -> None:
        """Begin again, with another receiver."""
        self._ahead = 0
        self._wake()

    def lift(self) -> None:
        """Have room for everything from now on."""
        self._size = sys.maxsize
        self._wake()

    def close(self) -> None:
        """End all waiting: the other end will take nothing more."""
        self._is_closed = True
        self._wake()

    async def room(self) -> None:
        """Wait until more may be sent; NobodyListensError once the window is closed."""
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

    Small parts made in one turn of the loop leave joined, at its end; ``at_turn_end`` calls back
    then.
    """

    def __init__(
        self,
        query_id: int,
        put: Callable[[StreamPart], None],
        at_turn_end: Callable[[Callback], object],
    ) -> None:
        self._query_id = query_id
        self._put = put
        self._at_turn_end = at_turn_end
        self._gathered: list[bytes] = []
        self._gathered_size = 0
        self._flush_due = False
        self._rest: Iterator[StreamPart] | None = None  # of what is sent, or was cancelled midway
        self._sending = asyncio.Lock()  # several tasks may send, and what they send has parts
        self._window = Window()
        self._yielded_at = 0.0
        self.taken = self._window.taken
        self.close = self._window.close

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """Send the next bytes; return when more may be made.

        This lets the loop run now and then, so that parts leave even if a generator awaits nothing.
        Where it is cancelled, what has begun to leave leaves whole, before whatever is sent next.
        """
        is_small = ends == MORE and len(data) < MAX_JOINED
        joins = is_small and self._rest is None and not self._sending.locked()
        if joins:
            self._gather(data)
        if not (joins and self._window.is_open):
            async with self._sending:
                await self._send_rest()
                if not is_small:
                    self.flush()
                    self._rest = pieces(self._query_id, data, ends)
                    await self._send_rest()
                elif not joins:
                    self._gather(data)
                await self._window.room()
        if monotonic() - self._yielded_at > YIELD_AFTER_S:
            await asyncio.sleep(0)
            self._yielded_at = monotonic()

    def finish(self) -> None:
        """Put all that has begun to leave, before what ends the answer."""
        self.flush()
        if not self._window.is_closed:
            for part in self._rest or ():
                self._put(part)

    async def _send_rest(self) -> None:
        for part in self._rest or ():
            self._put(part)
            self._window.sent(cost(part))
            await self._window.room()
        self._rest = None

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
    """Cut ``data`` into parts; the last one says what they end."""
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
    """The receiving end; ``report_taken`` sends the sender how much has been taken.

    :meth:`arrived` and :meth:`ended` are called on the loop that parts arrive on. :meth:`next` is
    for coroutines on that loop, :meth:`take_value` for any thread.
    """

    def __init__(self, report_taken: Callable[[int], None], follows: str = "") -> None:
        self._report_taken = report_taken
        self._report_from = window_for(follows) // 2
        # Reentrant: the garbage collector may close a stream anywhere.
        self._lock = threading.RLock()
        self._parts: deque[StreamPart] = deque()
        self._value: list[bytes] = []  # what was taken of a value that is not complete
        self._unreported = 0  # taken, and not yet reported
        self._is_complete = False
        self._end: Answer | None = None
        self._wake: Callback | None = None

    @property
    def is_complete(self) -> bool:
        """Return whether the part that ends everything is here, though perhaps not taken yet."""
        return self._is_complete

    @property
    def end(self) -> Answer | None:
        """Return what ended it, when no part is left; None before."""
        end = self._end  # read first: no part comes after it, and before it some may
        return None if self._parts else end

    async def next(self) -> StreamPart | None:
        """Return the next part, None at the end; StreamFailedError when it broke off.

        Cancelling it loses nothing.
        """
        while not self._parts:
            if self._end is not None:
                if not isinstance(self._end, StreamEnded):
                    raise StreamFailedError(getattr(self._end, "text", "it was answered anew"))
                return None
            arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._wake = partial(_resolve, arrival)
            await arrival
        return self._take()

    async def next_message(self) -> StreamPart | None:
        """Return the next text, binary message or value, its parts joined; else like :meth:`next`.

        The part that ends everything is not joined to what is not complete.
        """
        while (part := await self.next()) is not None and part.ends != END:
            if (value := self._completed(part)) is not None:
                return part._replace(data=value)
        return part

    def _completed(self, part: StreamPart) -> bytes | None:
        """Return the value that a part ends; None while more of it is to come."""
        self._value.append(part.data)
        if part.ends == MORE:
            return None
        value = b"".join(self._value) if len(self._value) > 1 else part.data
        self._value.clear()
        return value

    async def next_bytes(self) -> bytes | None:
        """Return the bytes of the parts that are here, up to MAX_JOINED; else like :meth:`next`."""
        part = await self.next()
        if part is None or not self._parts:
            return None if part is None else part.data
        found = [part.data]
        size = len(part.data)
        while self._parts and (size := size + len(self._parts[0].data)) <= MAX_JOINED:
            found.append(self._take().data)
        return b"".join(found)

    def take_value(self, wake: Callback) -> bytes | None:
        """Return the next value, all parts of it joined; None when it is not complete.

        Unless this is the :attr:`end`, ``wake`` is called, on any thread, when more is here. A
        value may be larger than the window: its parts are taken as they arrive.
        """
        with self._lock:
            while self._parts:
                if (value := self._completed(self._take())) is not None:
                    return value
            if self._end is None:
                self._wake = wake
            return None

    def arrived(self, part: StreamPart) -> None:
        """Take in the next part."""
        with self._lock:
            if self._end is not None or self._is_complete:
                return
            self._parts.append(part)
            self._is_complete = part.ends == END
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def ended(self, end: Answer) -> None:
        """Note the end, after the parts that are here; only the first end counts."""
        with self._lock:
            if self._end is not None:
                return
            self._end = end
            self._report_taken = _ignore  # it may hold this: a cycle, for the collector to find
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def _take(self) -> StreamPart:
        with self._lock:
            part = self._parts.popleft()
            self._unreported += cost(part)
            # Not for each part: the sender may be a window ahead, so it never waits for less.
            if self._unreported >= self._report_from and self._end is None:
                size, self._unreported = self._unreported, 0
                self._report_taken(size)
        return part


def _ignore(_size: int) -> None:
    pass


def _resolve(arrival: asyncio.Future[None]) -> None:
    if not arrival.done():
        arrival.set_result(None)


class Source(Protocol):
    """The sending end, as a :class:`Stream` sees it. Both methods are called from any thread."""

    def taken(self, size: int) -> None:
        """Tell the replica that so much was taken."""

    def stop(self) -> None:
        """Cancel the query: its answer is no longer wanted."""


class Stream(Parts):
    """The caller's end of an answer in parts."""

    def __init__(self, begun: StreamBegun, source: Source) -> None:
        super().__init__(source.taken)
        self.status = begun.status
        self.headers = begun.headers
        self._stop: Callback = source.stop
        self._is_left = False
        self._on_over: list[Callback] = []

    def close(self) -> None:
        """Want no more of it; harmless when it is over, or was left."""
        with self._lock:
            if self._end is not None or self._is_left:
                return
            self._parts.clear()
        self._stop()
        self.ended(FailedAnswer(0, "RequestCancelledError", "it was cancelled"))

    def leave(self) -> None:
        """Want no more of it, but let it go on to its end; any more of it stops it."""
        self._is_left = True

    def when_over(self, callback: Callback) -> None:
        """Call when it has ended or was closed, or now; on any thread."""
        with self._lock:
            if self._end is None:
                self._on_over.append(callback)
                return
        callback()

    def arrived(self, part: StreamPart) -> None:
        """Take in the next part."""
        if self._is_left:
            self._is_left = False
            self.close()
        super().arrived(part)

    def ended(self, end: Answer) -> None:
        """Note the end, after the parts that are here; only the first end counts."""
        super().ended(end)
        with self._lock:
            over, self._on_over = self._on_over, []
            self._stop = nothing
        for callback in over:
            callback()
