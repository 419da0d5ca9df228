"""One HTTP request on its way through the worker, with what becomes of it.

The front makes an Exchange before anything else looks at the request, hands it to Falcon in the
scope, and writes the access log from it at the end. Whatever the answer and whoever gives it, it
leaves through :meth:`Exchange.send`, so every answer carries the request id.
"""

from __future__ import annotations

import http
import itertools
import os
import re
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote

from greenroom.actors.large_bytes import Pieces

if TYPE_CHECKING:
    from greenroom.http_front.body import Upload

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
