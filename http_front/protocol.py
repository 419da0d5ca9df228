"""HTTP/1.1 on a connection of the worker: uvicorn's protocol on httptools, made stricter.

gunicorn's own parser, in Python, costs twice the CPU (docs/performance.md), and its C parser leaks
every connection. What is added to uvicorn's (written against 0.54, ``protocols/http/``):

- limits on the request line and the headers, as gunicorn has them, for llhttp has none;
- refusals of what llhttp lets pass and other servers may read differently: several Host headers,
  chunks in HTTP/1.0, other versions (:mod:`.malformed` has those that end with their request);
- a refusal never overtakes the answer to an earlier request of the same connection;
- a request whose client leaves is cancelled, wherever it waits, also while its body is not read;
- a client that still sends when it is refused gets to read why;
- a response's head leaves with its first bytes, in one system call;
- a request that has come in whole is offered to ``begin`` first, which needs no task for it
  (:mod:`.whole`), and a whole answer is written at once;
- a body whose length is known goes past the parser, once its beginning is here;
- one look at all connections a second instead of a timer for each that is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Any

from httptools import HttpRequestParser
from uvicorn.config import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from greenroom.actors.loop import nothing
from greenroom.http_front.departures import Departures
from greenroom.http_front.exchange import CLOSE, App, Headers, Scope, whole_target
from greenroom.http_front.flow import MOST_READ, READ, Flow
from greenroom.http_front.joined import LARGE, Joined
from greenroom.http_front.open_ended import without_chunks
from greenroom.http_front.socket_protocol import PING_S, PONG_S, FrontSocket
from greenroom.http_front.whole import Turn

MAX_LINE_BYTES = 4094
MAX_HEADERS = 100
MAX_HEADER_BYTES = 8190  # name and value
MAX_HEAD_BYTES = 65536  # that are kept of a head that is not complete
LINGER_S = 2.0
AHEAD = 256 * 1024  # bytes of a body that nobody has taken; uvicorn's 64 KiB are less than one read

_FORWARDED = frozenset({b"x-forwarded-proto", b"x-forwarded-for"})
_VERSIONS = frozenset({"1.0", "1.1"})
_CHECKED = _FORWARDED | {b"host", b"transfer-encoding", b"expect"}


Begin = Callable[[Turn], Callable[[], object] | None]


class RefusedRequestError(Exception):
    """A request that is refused before anybody looks at it, with its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def _no_app(*_: object) -> None:
    pass


def _never(_turn: Turn) -> None:
    return None


class Connections(ServerState):
    """What all connections of a worker share; uvicorn's protocols add and remove themselves."""

    def __init__(
        self,
        app: Any,
        begin: Begin = _never,
        *,
        keep_alive_s: float,
        header_timeout_s: float,
        max_message_bytes: int,
        trusted: str,
    ) -> None:
        super().__init__()
        self.departures = Departures()
        self.header_timeout_s = header_timeout_s
        self.keep_alive_s = keep_alive_s
        self.app = app
        self.begin = begin
        self.default_head = b""
        self._believe: Any = ProxyHeadersMiddleware(_no_app, trusted)
        self.config = Config(
            ProxyHeadersMiddleware(app, trusted),  # for WebSockets
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
        )
        self.config.load()

    def make(self) -> FrontProtocol:
        """Make the protocol of a new connection; called on the loop."""
        return FrontProtocol(self)

    def has_sockets(self) -> bool:
        """Tell whether WebSockets are open, or are being closed."""
        return any(isinstance(each, FrontSocket) for each in self.connections)

    def believe_proxies(self, scope: Any) -> None:
        """Write into the scope what trusted proxies say of the client."""
        with contextlib.suppress(StopIteration):
            self._believe(scope, None, None).send(None)  # it awaits nothing but _no_app

    def tell_time(self) -> None:
        """Set the Date of answers; to be called every second."""
        date = formatdate(usegmt=True).encode()
        self.default_headers = [(b"date", date)]
        self.default_head = b"date: %s\r\n" % date

    def give_up(self, now: float, *, served_too: bool, fresh_s: float) -> None:
        """Close connections that wait for a request; see :meth:`FrontProtocol.give_up`."""
        for connection in list(self.connections):
            if isinstance(connection, FrontProtocol):
                connection.give_up(now, served_too=served_too, fresh_s=fresh_s)


class _Turn:
    """See :class:`greenroom.http_front.whole.Turn`."""

    __slots__ = ("_cycle", "_protocol", "body", "scope")

    def __init__(self, protocol: FrontProtocol, cycle: Any) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.scope: Scope = cycle.scope
        self.body = bytes(cycle.body)

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the whole answer."""
        self._protocol.reply(self._cycle, status, headers, body)

    def go_on(self, app: App) -> asyncio.Task[None]:
        """Have an ASGI app answer instead, in a task."""
        return self._protocol.run(self._cycle, app)


class FrontProtocol(HttpToolsProtocol):
    """One connection; it reaches into uvicorn's, which was not made for it."""

    flow: Flow

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections.config, connections, {})
        self._shared = connections
        self.app = connections.app
        self._fd = -1
        self._joined: Any = None
        self._leave: Callable[[], object] = nothing  # ends what answers
        self._answering: Any = None  # the cycle whose turn it is
        self._next_app: Any = None  # what is to answer it, until that has begun
        self._is_beginning = False
        self._refusal: RefusedRequestError | None = None
        self._is_broken = False
        self._start: Any = None  # of the response, until the first part of its body
        self._is_forwarded = False
        self._hosts = 0
        self._head_bytes = 0
        self._has_new_head = False
        self._rest = 0  # bytes that are to come of a body, past the parser
        self.accepted_at = self.loop.time()
        self.begun_at: float | None = None  # when the request whose headers come in began
        self._idle_since = self.accepted_at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._joined = Joined(transport, self._close)
        self.flow = Flow(transport, self._watch, self._unwatch)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio; nobody wants the answer any more."""
        super().connection_lost(exc)
        self._unwatch()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._leave()

    def give_up(self, now: float, *, served_too: bool, fresh_s: float) -> None:
        """Close the connection, if it waits for a request that has not come.

        One that has sent nothing yet is closed after ``fresh_s``, one that was served before after
        the time for which connections are kept, or at once if ``served_too``, and one that has sent
        half of its headers after ``header_timeout_s``.
        """
        if self._is_broken or (self.cycle is not None and not self.cycle.response_complete):
            return
        if self.begun_at is not None:
            if now - self.begun_at > self._shared.header_timeout_s:
                self._give_refusal(408, "the headers did not arrive in time")
        elif self.cycle is None:
            if now - self.accepted_at > fresh_s:
                self.transport.close()
        elif served_too or now - self._idle_since > self._shared.keep_alive_s:
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
        super().on_headers_complete()
        if self.url[:1] != b"/" and not self.parser.should_upgrade():
            self.scope["path"], self.scope["raw_path"] = whole_target(self.url)
        self._has_new_head = True
        if self._is_forwarded:
            self._shared.believe_proxies(self.scope)

    def handle_websocket_upgrade(self) -> None:
        """Become a WebSocket, unless requests before it are still being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._give_refusal(
                400, "a WebSocket cannot be opened before the request ahead is answered"
            )
        else:
            super().handle_websocket_upgrade()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, and read no more while much of it is not taken."""
        if not (self.cycle.response_complete or self.parser.should_upgrade()):
            self._keep(self.cycle, body)

    def _keep(self, cycle: Any, body: bytes) -> None:
        if not cycle.body:
            cycle.body = body  # uvicorn would copy it into a bytearray, and out of it again
        else:
            if len(body) >= LARGE:
                cycle.body = b"".join((cycle.body, body))
            else:
                cycle.body = bytearray(cycle.body) if type(cycle.body) is bytes else cycle.body
                cycle.body += body
            if len(cycle.body) > AHEAD:
                self.flow.pause_reading()
        cycle.message_event.set()

    def _rest_of_body(self) -> int:
        """Return how much is still to come of a body, if that can go past the parser.

        The parser would copy each byte once more, only to count it.
        """
        cycle = self.cycle
        if cycle is None or not cycle.more_body or cycle is not self._answering:
            return 0
        if self.parser.should_upgrade():
            return 0
        head = dict(self.headers)
        rest = int(head.get(b"content-length", 0)) - len(cycle.body)
        return rest if rest >= LARGE and b"transfer-encoding" not in head else 0

    def _take_rest(self, data: bytes) -> bytes:
        """Take what is of the body; return what lies behind it, which is for a new parser."""
        cycle, piece = self.cycle, data[: self._rest]
        self._rest -= len(piece)
        if not self._rest:
            self._renew_parser()
            self.flow.read_at_once(READ)
        elif not cycle.body:  # all of what came before has been taken
            self.flow.read_at_once(MOST_READ)
        if not cycle.response_complete:
            cycle.more_body = self._rest > 0
            self._keep(cycle, piece)
        return data[len(piece) :]

    def _renew_parser(self) -> None:
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def _watch(self) -> None:
        """Hear of the client's end though nothing is read: of a body, or of requests that wait."""
        self._fd = self.transport.get_extra_info("socket").fileno()
        self._shared.departures.watch(self._fd, self.transport.abort)

    def _unwatch(self) -> None:
        self._shared.departures.unwatch(self._fd)

    # --- The response ---------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        cycle.transport = self._joined
        self._answering, self._next_app = cycle, app
        if not self._is_beginning:
            self._begin()

    def _begin(self) -> None:
        """Begin to answer, and go on with the requests that wait while answers come at once."""
        self._is_beginning = True
        try:
            while self._next_app is not None:
                cycle, app, self._next_app = self._answering, self._next_app, None
                self._leave = self._begun(cycle) or self.run(cycle, app).cancel
        finally:
            self._is_beginning = False

    def _begun(self, cycle: Any) -> Callable[[], object] | None:
        if cycle.more_body or self.flow.write_paused:
            return None
        return self._shared.begin(_Turn(self, cycle))

    def run(self, cycle: Any, app: App) -> asyncio.Task[None]:
        """Have an ASGI app answer, in a task."""
        if cycle.scope["http_version"] == "1.0":
            app = without_chunks(app, cycle, self.transport)
        return self.loop.create_task(self._answer(cycle, app))

    async def _answer(self, cycle: Any, app: App) -> None:
        """Have the app answer; it logs its own errors, and raises to cut the connection."""
        try:
            await app(cycle.scope, cycle.receive, partial(self._send, cycle))
        except (asyncio.CancelledError, Exception):
            self._joined.close()
        else:
            if not cycle.response_complete:
                self._joined.close()
        finally:
            cycle.on_response = nothing

    def reply(self, cycle: Any, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer; its headers are valid, in lower case, and have its length."""
        if cycle.disconnected:
            return
        lines = [STATUS_LINE[status], self._shared.default_head]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if CLOSE in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        cycle.response_started = cycle.response_complete = True
        self._joined.write_all(lines, body)
        if not cycle.keep_alive:
            self._joined.close()
        self.on_response_complete()

    def on_response_complete(self) -> None:
        """Go on with the next request, if it is here."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._idle_since = self.loop.time()
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

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

    def _give_refusal(self, status: int, text: str) -> None:
        self._refused(status, text)
        self.send_400_response("")

    def _refused(self, status: int, text: str) -> RefusedRequestError:
        self._refusal = RefusedRequestError(status, text)
        return self._refusal  # httptools gives its caller another error

    def data_received(self, data: bytes) -> None:
        """See asyncio; nothing is read after what cannot be read."""
        if self._is_broken:
            return
        if self._rest and not (data := self._take_rest(data)):
            return
        self._is_beginning = True  # not before all that is here is read
        try:
            super().data_received(data)
        finally:
            self._is_beginning = False
        if self._has_new_head:
            self._has_new_head = False
            self._rest = 0 if self._is_broken else self._rest_of_body()
        if self.begun_at is not None and not self._is_broken:
            self._head_bytes += len(data)  # httptools keeps a header until its end
            if self._head_bytes > MAX_HEAD_BYTES:
                self._give_refusal(431, f"the headers have over {MAX_HEAD_BYTES} bytes")
        self._begin()

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
        self._next_app = None
        self._leave()
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
