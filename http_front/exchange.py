"""One HTTP request on its way through the worker, with what becomes of it.

The front makes an Exchange before anything else looks at the request, hands it to Falcon in the
scope, and writes the access log from it at the end. Whatever the answer and whoever gives it, it
leaves through :meth:`Exchange.send`, so every answer carries the request id.
"""

from __future__ import annotations

import asyncio
import http
import itertools
import logging
import os
import re
from collections.abc import Awaitable, Callable
from time import monotonic, perf_counter
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

from greenroom.actors.caller.streams import NobodyListensError
from greenroom.actors.messages.queries import Pieces
from greenroom.core.errors import BodyIncompleteError, BodyTooLargeError, GreenroomError
from greenroom.http_front.dispatcher import Feed

Scope = dict[str, Any]
Event = dict[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SCOPE_KEY = "greenroom.exchange"
HEALTH = frozenset({"/-/healthz", "/-/readyz"})  # wherever requests are answered
PAGES_KEY = "greenroom.pages"  # of what came in where our own pages are alone
CLIENT_LEFT = 499

_acceptable_id = re.compile(rb"[\x20-\x7e]{1,200}").fullmatch


def whole_target(url: bytes) -> tuple[str, bytes]:
    """Return path and raw path of a target that is no path."""
    raw_path = url.partition(b"#")[0].partition(b"?")[0]
    return unquote(raw_path.decode("latin-1")), raw_path


class Reply(NamedTuple):
    """A whole response, ready to be sent: its headers are checked and carry the true length."""

    status: int
    headers: Headers
    body: bytes | Pieces


class RequestIds:
    """Takes over a client's request id, or makes one: a random prefix per worker, and a count.

    A uuid4 would cost more than the rest of reading the headers. Make it after the fork.
    """

    def __init__(self) -> None:
        self._prefix = os.urandom(8).hex()
        self._counter = itertools.count(1)

    def take(self, offered: bytes | None) -> str:
        """Return ``offered`` if it is printable ASCII of at most 200 characters, else a new id."""
        if offered is not None and _acceptable_id(offered):
            return offered.decode("ascii")
        return f"{self._prefix}{next(self._counter):08x}"


CLOSE = (b"connection", b"close")


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())


STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}


class Leaving(Protocol):
    """Who takes the requests."""

    leaving: bool
    """Whether answers ask clients to close their connections."""


class Exchange:
    """A request and the state of its answer; ``path`` is the one to route by."""

    __slots__ = (
        "_front",
        "_send",
        "body",
        "bytes_out",
        "full_path",
        "head",
        "method",
        "path",
        "raw_path",
        "reply_headers",
        "request_id",
        "scope",
        "started_at",
        "status",
        "upload",
    )

    _send: Send

    def __init__(self, scope: Scope, ids: RequestIds, front: Leaving) -> None:
        self.started_at = perf_counter()
        self.scope = scope
        self.head: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = ids.take(self.head.get(b"x-request-id"))
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.full_path = self.path
        self.raw_path: bytes = scope["raw_path"]
        self.body = b""  # or what comes before the rest of it, which is to be sent on
        self.upload: Upload | None = None
        # Headers to send in place of the event's: Falcon keeps one value per name, as str.
        self.reply_headers: Headers | None = None
        self.status = 0  # 0 until the answer has begun
        self.bytes_out = 0
        self._front = front

    def resolve_target(self, root_path: str) -> None:
        """Split the path into ``full_path`` and ``path``, which lacks ``root_path``.

        ``full_path`` has the root path whether or not the proxy in front of us
        took it off. An absolute-form target is reduced to its path.
        """
        path, raw_path = self.path, self.raw_path
        if path[:1] != "/" and "://" in path:
            raw_path = b"/" + raw_path.partition(b"://")[2].partition(b"/")[2]
            path = unquote(raw_path.decode("latin-1"))
        self.full_path, self.path, self.raw_path = path, path, raw_path
        if not root_path:
            return
        if path == root_path or path.startswith(root_path + "/"):
            self.path = path[len(root_path) :] or "/"
        else:
            self.full_path = root_path + path
            self.raw_path = root_path.encode() + raw_path

    def send_by(self, send: Send) -> None:
        """Send the answer's events by ``send`` from now on."""
        self._send = send

    def finish(self, reply: Reply) -> tuple[Headers, bytes]:
        """Return the headers and the body by which a whole answer leaves; both are counted.

        A body in pieces leaves by :meth:`reply`.
        """
        body = b"" if self.method == "HEAD" or isinstance(reply.body, Pieces) else reply.body
        self.bytes_out = len(body)
        return self._complete(reply.headers), body

    def _complete(self, headers: Headers) -> Headers:
        headers.append((b"x-request-id", self.request_id.encode("ascii")))
        # Also to what was asked before the front began to leave: the client's next request on this
        # connection would be refused.
        if (self._front.leaving or self._has_body_left) and CLOSE not in headers:
            headers.append(CLOSE)
        return headers

    async def send(self, event: Event) -> None:
        """Pass an ASGI event of the answer to the server, adding the request id."""
        if event["type"] == "http.response.start":
            self.status = event["status"]
            headers = self.reply_headers
            if headers is None:
                headers = list(event["headers"])
            headers = self._complete(headers)
            event = {"type": "http.response.start", "status": self.status, "headers": headers}
        else:
            self.bytes_out += len(event.get("body", b""))
        await self._send(event)

    @property
    def _has_body_left(self) -> bool:
        """Whether the client would have to send the rest before its next request."""
        return self.upload is not None and not self.upload.body.is_complete

    async def reply(self, reply: Reply) -> None:
        """Send a whole answer."""
        self.reply_headers = reply.headers
        await self.send({"type": "http.response.start", "status": reply.status, "headers": ()})
        body = b"" if self.method == "HEAD" else reply.body
        if isinstance(body, Pieces):  # each leaves when the client has taken those before it
            for piece in body:
                await self.send({"type": "http.response.body", "body": piece, "more_body": True})
            body = b""
        await self.send({"type": "http.response.body", "body": body})


class _SameId(RequestIds):
    """Gives the id that a request has already."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id

    def take(self, offered: bytes | None) -> str:
        return self._id


class InnerExchange(Exchange):
    """A request as middlewares have passed it on; its answer goes to them.

    The exchange outside of them adds what every answer has, and counts.
    """

    __slots__ = ()

    def __init__(self, scope: Scope, send: Send, outer: Exchange) -> None:
        super().__init__(scope, _SameId(outer.request_id), outer._front)
        self.send_by(send)

    async def send(self, event: Event) -> None:
        """Pass an ASGI event of the answer to the innermost middleware."""
        if event["type"] == "http.response.start":
            self.status = event["status"]
            headers = self.reply_headers
            if headers is not None:
                if self._has_body_left and CLOSE not in headers:
                    headers.append(CLOSE)
                event = {**event, "headers": headers}
        elif isinstance(event.get("body"), memoryview):
            event = {**event, "body": bytes(event["body"])}  # ASGI knows bytes only
        # A copy, as middlewares write into events, and Falcon ends every stream with the same one:
        # the end of one client's compressed answer would come after the next client's.
        await self._send({**event})


# Request bodies: within their limits of size and time, whole or in parts, or not at all.
#
# A body of up to WHOLE bytes is read before its query leaves, and goes with it. A larger one
# follows it (:class:`Upload`), from the moment a replica wants it: a request that is refused
# before costs the client nothing but its headers, if it asked by ``Expect: 100-continue``. So
# does a body of unknown length that is not there at once, so that user code sees its parts when
# they come.
#
# A client may keep us waiting for its body ``timeout_s`` in all, and a second more for every
# MIN_RATE bytes. What user code takes does not count: nothing is read meanwhile.

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
