"""HTTP/1.1 on a connection of the worker: uvicorn's protocol on httptools, made stricter.

gunicorn's own parser, in Python, costs twice the CPU (docs/performance.md), and its C parser leaks
every connection. What is added to uvicorn's (written against 0.54, ``protocols/http/``):

- limits on the request line and the headers, as gunicorn has them, for llhttp has none;
- refusals of what llhttp lets pass and other servers may read differently: several Host headers,
  chunks in HTTP/1.0, other versions (:mod:`.malformed` has those that end with their request);
- a refusal never overtakes the answer to an earlier request of the same connection;
- a request whose client leaves is cancelled, wherever it waits;
- a client that still sends when it is refused gets to read why;
- a response's head leaves with its first bytes, in one system call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from understudy.http_front.socket_protocol import PING_S, PONG_S, FrontSocket

MAX_LINE_BYTES = 4094
MAX_HEADERS = 100
MAX_HEADER_BYTES = 8190  # name and value
MAX_HEAD_BYTES = 65536  # that are kept of a head that is not complete
LINGER_S = 2.0
LARGE = 64 * 1024  # bytes of a part that is not copied
AHEAD = 256 * 1024  # bytes of a body that nobody has taken; uvicorn's 64 KiB are less than one read

_FORWARDED = frozenset({b"x-forwarded-proto", b"x-forwarded-for"})
_VERSIONS = frozenset({"1.0", "1.1"})
_CHECKED = _FORWARDED | {b"host", b"transfer-encoding", b"expect"}


class RefusedRequestError(Exception):
    """A request that is refused before anybody looks at it, with its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Connections(ServerState):
    """What all connections of a worker share; uvicorn's protocols add and remove themselves."""

    def __init__(
        self,
        app: Any,
        *,
        keep_alive_s: float,
        header_timeout_s: float,
        max_message_bytes: int,
        trusted: str,
    ) -> None:
        super().__init__()
        self.header_timeout_s = header_timeout_s
        self.app = app
        self.forwarded_app = ProxyHeadersMiddleware(app, trusted)
        self.config = Config(
            self.forwarded_app,  # for WebSockets; requests take the one that they need
            interface="asgi3",
            http=FrontProtocol,
            ws=FrontSocket,
            ws_max_size=max_message_bytes,
            ws_per_message_deflate=False,  # it would have all others wait
            ws_ping_interval=PING_S,
            ws_ping_timeout=PONG_S,
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # any number will do
        )
        self.config.load()

    def make(self) -> FrontProtocol:
        """Make the protocol of a new connection; called on the loop."""
        return FrontProtocol(self)

    def has_sockets(self) -> bool:
        """Tell whether WebSockets are open, or are being closed."""
        return any(isinstance(each, FrontSocket) for each in self.connections)

    def tell_time(self) -> None:
        """Set the Date of answers; to be called every second."""
        self.default_headers = [(b"date", formatdate(usegmt=True).encode())]

    def give_up(self, now: float, *, served_too: bool, fresh_s: float) -> None:
        """Close connections that wait for a request; see :meth:`FrontProtocol.give_up`."""
        for connection in list(self.connections):
            if isinstance(connection, FrontProtocol):
                connection.give_up(now, served_too=served_too, fresh_s=fresh_s)


class _Joined:
    """The transport that a response is written to: what is written while held leaves at once."""

    __slots__ = ("_close", "_held", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self._close = close
        self._held: list[bytes] | None = None
        self.is_closing = transport.is_closing

    def write(self, content: bytes) -> None:
        if self._held is None:
            self._transport.write(content)
        else:
            self._held.append(content)

    def hold(self) -> None:
        self._held = []

    def let_go(self) -> None:
        held, self._held = self._held, None
        if not held:
            return
        if len(held[-1]) > LARGE:  # a system call more costs less than a copy
            *held, last = held
            self._transport.write(b"".join(held))
            self._transport.write(last)
        else:
            self._transport.write(b"".join(held))

    def close(self) -> None:
        self.let_go()
        self._close()


class FrontProtocol(HttpToolsProtocol):
    """One connection; it reaches into uvicorn's, which was not made for it."""

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections.config, connections, {})
        self._shared = connections
        self._joined: Any = None
        self._task: asyncio.Task[None] | None = None
        self._answering: Any = None  # the cycle whose turn it is
        self._refusal: RefusedRequestError | None = None
        self._is_broken = False
        self._start: Any = None  # of the response, until the first part of its body
        self._is_forwarded = False
        self._hosts = 0
        self._head_bytes = 0
        self.accepted_at = self.loop.time()
        self.begun_at: float | None = None  # when the request whose headers come in began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._joined = _Joined(transport, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio; nobody wants the answer any more."""
        super().connection_lost(exc)
        if self._task is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._task.cancel()

    def give_up(self, now: float, *, served_too: bool, fresh_s: float) -> None:
        """Close the connection, if it waits for a request that has not come.

        One that has sent nothing yet is closed after ``fresh_s``, one that was served before only
        if ``served_too``, and one that has sent half of its headers after HEADERS_TIMEOUT_S.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            return
        if self.begun_at is not None:
            if now - self.begun_at > self._shared.header_timeout_s:
                self._refused(408, "the headers did not arrive in time")
                self.send_400_response("")
        elif served_too if self.cycle is not None else now - self.accepted_at > fresh_s:
            self.transport.close()

    # --- What the parser calls ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self.begun_at = self.loop.time()
        self._head_bytes = 0
        self._is_forwarded = False
        self._hosts = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's target."""
        self.url += url
        if len(self.url) > MAX_LINE_BYTES:
            raise self._refused(414, f"the request line has over {MAX_LINE_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, within the limits."""
        name = name.lower()
        self.headers.append((name, value))
        if len(name) + len(value) > MAX_HEADER_BYTES:
            raise self._refused(431, f"a header has over {MAX_HEADER_BYTES} bytes")
        if len(self.headers) > MAX_HEADERS:
            raise self._refused(431, f"there are over {MAX_HEADERS} headers")
        if name in _CHECKED:
            self._check(name, value)

    def _check(self, name: bytes, value: bytes) -> None:
        if name in _FORWARDED:
            self._is_forwarded = True
        elif name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        elif name == b"host":
            self._hosts += 1
            if self._hosts > 1:
                raise self._refused(400, "there are several Host headers")
        elif self.parser.get_http_version() == "1.0":
            raise self._refused(400, "HTTP/1.0 has no Transfer-Encoding")

    def on_headers_complete(self) -> None:
        """Begin to answer, unless it is another request's turn."""
        self.begun_at = None
        if (version := self.parser.get_http_version()) not in _VERSIONS:
            raise self._refused(505, f"HTTP/{version} is not spoken here")
        self.app = self._shared.forwarded_app if self._is_forwarded else self._shared.app
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        """Become a WebSocket, unless requests before it are still being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._refused(400, "a WebSocket cannot be opened before the request ahead is answered")
            self.send_400_response("")
        else:
            super().handle_websocket_upgrade()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, and read no more while much of it is not taken."""
        cycle = self.cycle
        if cycle.response_complete or self.parser.should_upgrade():
            return
        cycle.body += body
        if len(cycle.body) > AHEAD:
            self.flow.pause_reading()
        cycle.message_event.set()

    # --- The response ---------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        cycle.transport = self._joined
        self._answering = cycle
        self._task = self.loop.create_task(self._answer(cycle, app))

    async def _answer(self, cycle: Any, app: Any) -> None:
        """Have the app answer; it logs its own errors, and raises to cut the connection."""
        try:
            await app(cycle.scope, cycle.receive, partial(self._send, cycle))
        except (asyncio.CancelledError, Exception):
            self._joined.close()
        else:
            if not cycle.response_complete:
                self._joined.close()
        finally:
            cycle.on_response = _nothing

    async def _send(self, cycle: Any, event: Any) -> None:
        if event["type"] == "http.response.start":
            self._start = event
        elif self._start is None:
            await cycle.send(event)
        else:
            start, self._start = self._start, None
            self._joined.hold()
            try:
                await cycle.send(start)
                await cycle.send(event)
            finally:
                self._joined.let_go()

    # --- Refusals -------------------------------------------------------------------------------

    def _refused(self, status: int, text: str) -> RefusedRequestError:
        self._refusal = RefusedRequestError(status, text)
        return self._refusal  # httptools gives its caller another error

    def data_received(self, data: bytes) -> None:
        """See asyncio; nothing is read after what cannot be read."""
        if self._is_broken:
            return
        super().data_received(data)
        if self.begun_at is not None and not self._is_broken:
            self._head_bytes += len(data)  # httptools keeps a header until its end
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refused(431, f"the headers have over {MAX_HEAD_BYTES} bytes")
                self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read, once earlier requests of the connection are answered."""
        self._is_broken = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._refuse(msg)
        elif not cycle.more_body:
            self._end_after(cycle)
        elif self.pipeline:  # what is broken is the body of the last request that waits
            self.pipeline.popleft()
            self._end_after(self.pipeline[0][0] if self.pipeline else self._answering)
        elif cycle.response_started:
            self._close()
        else:
            cycle.disconnected = True
            self._refuse(msg)

    def _end_after(self, cycle: Any) -> None:
        cycle.keep_alive = False
        self.flow.pause_reading()

    def _refuse(self, msg: str) -> None:
        if self._task is not None:
            self._task.cancel()
        refusal = self._refusal or RefusedRequestError(400, msg)
        text = str(refusal).encode()
        head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
        length = b"content-length: %d\r\n\r\n" % len(text)
        self.transport.write(STATUS_LINE[refusal.status] + head + length + text)
        self._linger()

    def _close(self) -> None:
        """Close after an answer, or amid one."""
        if self._answering.more_body and self._answering.response_complete:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close, but not before the client has had time to read the answer.

        Closing a socket with unread bytes resets it, and a reset can overtake the answer: the
        client would see a broken pipe instead of a 413.
        """
        self._is_broken = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _nothing() -> None:
    pass
