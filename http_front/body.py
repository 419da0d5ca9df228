"""Request bodies: within their limits of size and time, whole or in parts, or not at all.

A body of up to WHOLE bytes is read before its query leaves, and goes with it. A larger one follows
it (:class:`Upload`), from the moment a replica wants it: a request that is refused before costs the
client nothing but its headers, if it asked by ``Expect: 100-continue``. So does a body of unknown
length that is not there at once, so that user code sees its parts when they come.

A client may keep us waiting for its body ``timeout_s`` in all, and a second more for every
MIN_RATE bytes. What user code takes does not count: nothing is read meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from time import monotonic
from typing import Any

from greenroom.actors.streams import NobodyListensError
from greenroom.core.errors import BodyIncompleteError, BodyTooLargeError, GreenroomError
from greenroom.http_front.dispatcher import Feed
from greenroom.http_front.exchange import Event, Receive

_logger = logging.getLogger(__name__)

WHOLE = 1024 * 1024
AT_ONCE_S = 0.02  # how long a body of unknown length may take to go whole
MIN_RATE = 500  # bytes per second


class Patience:
    """Ends waits that take too long, by a quarter of ``timeout_s`` at most; from one event loop.

    One timer looks after all of them: a timer for each would cost every request 5 us.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._due: dict[asyncio.Task[Any], float] = {}
        self._ended: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, task: asyncio.Task[Any], left_s: float) -> None:
        """Watch a task that begins to wait; it is cancelled when it waits for over ``left_s``."""
        self._due[task] = monotonic() + left_s
        if self._timer is None:
            self._look_later()

    def end(self, task: asyncio.Task[Any]) -> None:
        """Watch a task no more."""
        self._due.pop(task, None)

    def has_ended(self, task: asyncio.Task[Any]) -> bool:
        """Return whether a task was cancelled here; then it may go on as if it was not."""
        if task not in self._ended:
            return False
        self._ended.remove(task)
        if hasattr(task, "uncancel"):  # since 3.11
            task.uncancel()
        return True

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.timeout_s / 4, self._look)

    def _look(self) -> None:
        self._timer = None
        now = monotonic()
        for task in [task for task, due in self._due.items() if due <= now]:
            del self._due[task]
            self._ended.add(task)
            task.cancel()
        if self._due:
            self._look_later()


class BodyLimits:
    """What a client may send, and for how long; one for all bodies of a worker."""

    def __init__(self, max_bytes: int | None, timeout_s: float) -> None:
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.patience = Patience(timeout_s)


class Body:
    """One request's body as it comes.

    ``declared`` is the content-length header, which the server has found to be a number.
    """

    __slots__ = ("_declared", "_event", "_limits", "_receive", "_waited_s", "is_complete", "size")

    def __init__(self, receive: Receive, declared: bytes | None, limits: BodyLimits) -> None:
        self.size = 0  # of what has come
        self.is_complete = False
        self._receive = receive
        self._declared = None if declared is None else int(declared)
        self._limits = limits
        self._event: asyncio.Future[Event] | None = None
        self._waited_s = 0.0

    async def begin(self) -> bytes:
        """Return the body, or what is to go with the query when the rest follows.

        Raises BodyTooLargeError, or BodyIncompleteError. What came in one piece, as nearly all do,
        is returned without a copy.
        """
        declared, limit = self._declared, self._limits.max_bytes
        if declared is not None:
            if limit is not None and declared > limit:
                raise BodyTooLargeError(_too_large(f" of {declared} bytes", limit))
            if declared > WHOLE:
                return b""
        piece = await self.next()
        if self.is_complete:
            return piece
        pieces: list[bytes] = [piece]
        while not self.is_complete and self.size < WHOLE:
            if declared is None and not await self._comes_at_once():
                break
            pieces.append(await self.next())
        return b"".join(pieces)

    async def next(self) -> bytes:
        """Return the next bytes, perhaps none; the last ones make it complete."""
        begun_at = monotonic()
        left_s = self._limits.timeout_s + self.size / MIN_RATE - self._waited_s
        if left_s <= 0:
            raise BodyIncompleteError(_too_slow(self.size))
        waiting = self._receive() if self._event is None else self._asked(self._event)
        event = await self._within(waiting, left_s)
        self._event = None
        self._waited_s += monotonic() - begun_at
        return self._take(event)

    async def close(self) -> None:
        """Ask for no more; what was asked for and has not come stays with the server."""
        event, self._event = self._event, None
        if event is not None:
            event.cancel()
            await asyncio.wait((event,))

    async def _within(self, waiting: Awaitable[Event], left_s: float) -> Event:
        task = asyncio.current_task()
        assert task is not None
        patience = self._limits.patience
        patience.begin(task, left_s)
        try:
            return await waiting
        except asyncio.CancelledError:
            if not patience.has_ended(task):
                raise
            raise BodyIncompleteError(_too_slow(self.size)) from None
        finally:
            patience.end(task)

    async def _asked(self, event: asyncio.Future[Event]) -> Event:
        """Return an event that was asked for before; it stays asked for if this is cancelled."""
        await asyncio.wait((event,))
        return event.result()

    async def _comes_at_once(self) -> bool:
        """Tell whether the next event is there, or nearly; it is kept."""
        if self._event is None:
            self._event = asyncio.ensure_future(self._receive())
        done, _ = await asyncio.wait((self._event,), timeout=AT_ONCE_S)
        return bool(done)

    def _take(self, event: Event) -> bytes:
        if event["type"] != "http.request":
            # Falcon's stream would give what came as if it were everything.
            raise BodyIncompleteError("the request body did not arrive in full")
        piece: bytes = event.get("body", b"")
        self.size += len(piece)
        limit = self._limits.max_bytes
        if limit is not None and self.size > limit:
            raise BodyTooLargeError(_too_large("", limit))
        self.is_complete = not event.get("more_body", False)
        return piece


class Upload:
    """Sends on a body that follows its query."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._sending: asyncio.Task[None] | None = None

    def begin(self, feed: Feed) -> None:
        """Send it to ``feed`` from now on."""
        self._sending = asyncio.create_task(self._send(feed))

    async def end(self) -> None:
        """Send no more: the query is over."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait((self._sending,))
        await self.body.close()

    async def _send(self, feed: Feed) -> None:
        try:
            while not self.body.is_complete:
                await feed.send(await self.body.next())
            feed.end()
        except NobodyListensError:
            return
        except GreenroomError as error:
            feed.fail(type(error).__name__, str(error))
        except Exception:
            _logger.exception("a request body could not be sent on")
            feed.fail("GreenroomError", "the request body could not be sent on")


def _too_large(size: str, limit: int) -> str:
    return f"the body{size} is over the limit of {limit} bytes"


def _too_slow(size: int) -> str:
    return f"the request body came too slowly: {size} bytes so far"
