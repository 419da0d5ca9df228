"""HTTP/1.1 on a connection of the worker.

One request at a time: its head (:mod:`.heads`), its body, its response, then the next one. What the
client sends ahead waits as the bytes it is, and meanwhile the connection is not read. Each message
ends where one Content-Length or the chunks (:mod:`.bodies`) say. An ``Upgrade`` changes nothing
about that: a WebSocket's opening (:mod:`.websocket`) has no body, and any other request that would
upgrade is served as the plain request that it is.

A request whose body is here is offered to the short way first; any other becomes an ASGI scope with
a task. A request whose client leaves is cancelled wherever it waits, also while its body is not
read. A client that still sends when it is refused gets to read why.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from urllib.parse import unquote

from greenroom.actors.runtime.loop import nothing
from greenroom.core.errors import BodyIncompleteError
from greenroom.http_front.bodies import WHOLE, BadChunksError, ChunkedBody, TrailersTooLargeError
from greenroom.http_front.connections import NO_ROOM, Connections, Pace, Sending, peer_of
from greenroom.http_front.exchange import CLOSE, PAGES_KEY, App, Event, Headers, Scope
from greenroom.http_front.heads import MAX_HEAD_BYTES, Head, HeadReader, RefusedRequestError
from greenroom.http_front.responses import STATUS_LINES
from greenroom.http_front.websocket import FrontSocket

LINGER_S = 2.0
AHEAD = 256 * 1024  # bytes of a body that wait to be taken
LARGE = 64 * 1024  # bytes of a part that is not copied
READ = 256 * 1024  # bytes that are read at once, as asyncio does
MOST_READ = 1024 * 1024  # of a body that is taken as fast as it comes

_ASGI = {"version": "3.0", "spec_version": "2.4"}
_RESET = struct.pack("ii", 1, 0)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_DISCONNECT: Event = {"type": "http.disconnect"}
_STAYS = (b"x-request-disconnect-disabled", b"?1")  # Ray Serve's header, of a request that goes on


class Request:
    """A request of a connection with its response, which an ASGI app gives, or :meth:`reply`."""

    __slots__ = (
        "_event",
        "_has_given_all",
        "_is_chunked",
        "_left",
        "_protocol",
        "_start",
        "body",
        "counted",
        "expects_continue",
        "is_complete",
        "is_disconnected",
        "is_late",
        "is_started",
        "keep_alive",
        "more_body",
        "pace",
        "scope",
    )

    def __init__(self, protocol: FrontProtocol, scope: Scope, *, keep_alive: bool) -> None:
        self._protocol = protocol
        self.scope = scope
        self.keep_alive = keep_alive
        self.body: bytes | bytearray = b""  # what has come and waits to be taken
        self.more_body = False
        self.counted = 0  # bytes of the body, in Connections.waiting_bytes
        self.expects_continue = False
        self.pace: Pace | None = None  # of the body, where one follows
        self.is_late = False  # the body comes too slowly
        self.is_disconnected = False
        self.is_started = False  # the response is
        self.is_complete = False
        self._event: asyncio.Event | None = None
        self._has_given_all = False
        self._start: Event | None = None  # of the response, until the first part of its body
        self._is_chunked = False
        self._left: int | None = None  # of a response body with a length

    def wake(self) -> None:
        """Let :meth:`receive` look again."""
        if self._event is not None:
            self._event.set()

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response; its headers are valid, in lower case, and have its length."""
        if self.is_disconnected:
            return
        lines = [STATUS_LINES[status], self._protocol.shared.default_head]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self.is_started = True
        self._protocol.write(lines, body)
        self._protocol.completed(self)

    def go_on(self, app: App) -> asyncio.Task[None]:
        """Have an ASGI app answer, in a task."""
        return self._protocol.shared.run(self._answer(app))

    async def _answer(self, app: App) -> None:
        """Have the app answer; it logs its own errors, and raises to cut the connection."""
        try:
            await app(self.scope, self.receive, self.send)
        except (asyncio.CancelledError, Exception):
            self._protocol.cut(self)
        else:
            if not self.is_complete:
                self._protocol.cut(self)

    @property
    def ends_with_connection(self) -> bool:
        """Whether the response that has begun has no other end than the connection's."""
        return self.is_started and not self._is_chunked and self._left is None

    async def receive(self) -> Event:
        """Return the next part of the body; its end once more, when there is no more.

        BodyIncompleteError when the client has kept us waiting for too long.
        """
        if self.expects_continue:
            self.expects_continue = False
            waits = self.more_body and not self.body  # the client, with its body
            if waits and not (self.is_started or self.is_disconnected):
                self._protocol.write([], _CONTINUE)
        while not (self.is_disconnected or self.is_complete):
            if self.body or not (self.more_body or self._has_given_all):
                body, self.body = self.body, b""
                self._has_given_all = not self.more_body
                self._protocol.throttle()
                return {"type": "http.request", "body": bytes(body), "more_body": self.more_body}
            if self.is_late:
                raise BodyIncompleteError("the request body came too slowly")
            if self._event is None:
                self._event = asyncio.Event()
            self._event.clear()
            await self._wait(self._event)
        return _DISCONNECT

    async def _wait(self, event: asyncio.Event) -> None:
        if self.pace is None or not self.more_body:
            await event.wait()
            return
        time = self._protocol.shared.loop.time
        self.pace.wait(time())
        try:
            await event.wait()
        finally:
            self.pace.stop(time())

    async def send(self, event: Event) -> None:
        """Send an event of the response; its head leaves with the first part of its body."""
        await self._protocol.drained()
        if self.is_disconnected:
            return
        kind = event["type"]
        has_start = self.is_started or self._start is not None
        if self.is_complete or (kind == "http.response.start") is has_start:
            raise RuntimeError(f"the ASGI event {kind!r} is not expected now")
        if kind == "http.response.start":
            self._start = event
        elif kind == "http.response.body":
            self._send_body(event.get("body", b""), more=event.get("more_body", False))
        else:
            raise RuntimeError(f"the ASGI event {kind!r} is none of a response's")

    def _send_body(self, body: bytes, *, more: bool) -> None:
        lines: list[bytes] = []
        if self._start is not None:
            start, self._start = self._start, None
            self._begin(lines, start["status"], start.get("headers", ()))
        tail = b""
        if self.scope["method"] == "HEAD":
            body = b""
        elif self._is_chunked:
            if body:
                lines.append(b"%x\r\n" % len(body))
                tail = b"\r\n"
            if not more:
                tail += b"0\r\n\r\n"
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the response is not as long as its Content-Length")
        self.is_started = True
        if lines or body or tail:
            self._protocol.write(lines, body, tail)
        if not more:
            self._protocol.completed(self)

    def _begin(self, lines: list[bytes], status: int, headers: Headers) -> None:
        lines += (STATUS_LINES[status], self._protocol.shared.default_head)
        says_close = False
        for given, value in headers:
            name = given.lower()
            if name == b"content-length":
                self._left = int(value)
            elif name == b"transfer-encoding":
                continue  # it is ours to choose
            elif name == b"connection" and b"close" in value.lower():
                says_close = True
                self.keep_alive = False
            lines += (name, b": ", value, b"\r\n")
        if not (self.keep_alive or says_close):
            lines.append(b"connection: close\r\n")
        if self.scope["method"] == "HEAD" or status in {204, 304}:
            self._left = 0
        elif self._left is None and self.scope["http_version"] == "1.1":
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")


Begin = Callable[[Request, bytes], Callable[[], object] | None]


class FrontProtocol(asyncio.Protocol):
    """One connection that speaks HTTP.

    ``begin`` is the short way: it answers a request whose body is here, and returns what to call
    when the client leaves, or None. ``for_pages`` marks a connection for our own pages alone.
    """

    transport: asyncio.Transport

    def __init__(
        self, shared: Connections, begin: Begin | None = None, *, for_pages: bool = False
    ) -> None:
        self.shared = shared
        self._begin_shortly = begin
        self._for_pages = for_pages
        self._accepted_at = shared.loop.time()
        self._idle_since = self._accepted_at
        self._was_served = False
        self._request: Request | None = None  # until its body is read and its response is sent
        self._is_begun = False  # an app or the short way answers it
        self._leave: Callable[[], object] = nothing  # ends what answers
        self._is_reading = False  # and so the next request's turn comes by itself
        self._is_closing = False  # what comes is not for us any more
        self._is_paused = False
        self._successor: FrontSocket | None = None
        self._writable: asyncio.Event | None = None  # while nothing can be written
        self._sending = Sending()
        self._fd = -1
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None
        self._scheme = "http"
        self._heads = HeadReader(shared.options)
        self._head_begun_at: float | None = None  # while a head is not here in full
        self._ahead = b""  # bytes behind the request that is being answered
        self._rest = 0  # bytes that are to come of a body with a length
        self._chunks: ChunkedBody | None = None  # of any other body

    # --- The connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        self.transport = transport
        self._client = peer_of(transport.get_extra_info("peername"))
        self._server = peer_of(transport.get_extra_info("sockname"))
        if transport.get_extra_info("sslcontext"):
            self._scheme = "https"
        self.shared.add(self, self._client)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio; the response is not wanted any more."""
        self.shared.remove(self)
        self._is_closing = True
        self._unwatch()
        self.resume_writing()
        self._drop_request()
        self._heads.close()

    def pause_writing(self) -> None:
        """See asyncio."""
        self._writable = asyncio.Event()
        self.throttle()

    def resume_writing(self) -> None:
        """See asyncio."""
        if self._writable is not None:
            self._writable.set()
            self._writable = None
            self._go_on()

    async def drained(self) -> None:
        """Return when something can be written, or the client is gone."""
        while self._writable is not None:
            await self._writable.wait()

    def write(self, parts: list[bytes], body: bytes, tail: bytes = b"") -> None:
        """Write several parts by one system call, unless the body is large."""
        if len(body) > LARGE:  # a system call more costs less than a copy
            if parts:
                self.transport.write(b"".join(parts))
            self.transport.write(body)
            if tail:
                self.transport.write(tail)
        else:
            parts.append(body)
            parts.append(tail)
            self.transport.write(b"".join(parts))

    def fileno(self) -> int:
        """Return the connection's file descriptor."""
        return int(self.transport.get_extra_info("socket").fileno())

    def close(self) -> None:
        """Close; what was written still leaves."""
        self._is_closing = True
        self.transport.close()

    def evict(self) -> None:
        """See :class:`.connections.Connection`."""
        if self._is_answering:
            text = "this server has no room for a request that comes so slowly"
            self._refuse(RefusedRequestError(503, text, b"retry-after: 1\r\n"))
        self.close()

    @property
    def waiting_since(self) -> float | None:
        """See :class:`.connections.Connection`."""
        if self._is_closing:
            return 0.0
        if self._ahead:
            return None
        if self._request is not None and self._is_answering:
            pace = self._request.pace
            return None if pace is None else pace.since
        return self._head_begun_at or self._idle_since

    @property
    def _is_answering(self) -> bool:
        return self._request is not None and not self._request.is_complete

    def give_up(self, now: float, *, idle_s: float, fresh_s: float) -> None:
        """See :meth:`.connections.Connections.give_up`."""
        options = self.shared.options
        if self._sending.is_stuck(self.transport, now, options.send_timeout_s):
            self.transport.abort()
        elif self._is_closing or (since := self.waiting_since) is None:
            return
        elif self._request is not None and self._is_answering:
            if now - since > options.body_timeout_s:
                self._request.is_late = True
                self._request.wake()
        elif self._head_begun_at is not None:
            if now - self._head_begun_at > options.header_timeout_s:
                self._refuse(RefusedRequestError(408, "the headers did not arrive in time"))
        elif not self._was_served:
            if now - self._accepted_at > fresh_s:
                self.close()
        elif now - self._idle_since > idle_s:
            self.close()

    def throttle(self) -> None:
        """Read, or read no more, as what is here demands."""
        request = self._request
        if self._is_closing:
            pause = False
        elif self._ahead:
            pause = True
        elif request is not None and request.more_body:
            pause = len(request.body) > AHEAD
        else:
            pause = self._writable is not None
        if pause is self._is_paused or self.transport.is_closing():
            return
        self._is_paused = pause
        if pause:
            self.transport.pause_reading()
            # The client's end would lie behind what is not read.
            self._fd = self.fileno()
            self.shared.departures.watch(self._fd, self.transport.abort)
        else:
            self._unwatch()
            self.transport.resume_reading()

    def _unwatch(self) -> None:
        self.shared.departures.unwatch(self._fd)

    # --- Reading --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if not self._is_closing:
            self._read(self._ahead + data if self._ahead else data)

    def _read(self, data: bytes) -> None:
        """Read requests, and have them answered, for as long as responses come at once."""
        self._is_reading = True
        try:
            while True:
                self._ahead = data = self._take(data)
                # A request is begun when all of it is read that is here.
                self._begin()
                if not data or self._is_answering or self._writable is not None:
                    break
        finally:
            self._is_reading = False
        if self._is_closing:
            self._ahead = b""
        self.throttle()

    def _go_on(self) -> None:
        """Go on with what came ahead, now that its turn has come."""
        if self._is_closing or self._is_reading:
            return
        if self._ahead and not self._is_answering:
            data, self._ahead = self._ahead, b""
            self._read(data)
        else:
            self.throttle()

    def _take(self, data: bytes) -> bytes:
        """Take up to the end of one request; return what lies behind it."""
        try:
            while data and not self._is_closing:
                if self._request is None:
                    if self._writable is not None:
                        return data
                    head, data = self._heads.take(data)
                    if head is not None:
                        self._take_head(head)
                    elif self._head_begun_at is None:
                        self._head_begun_at = self.shared.loop.time()
                elif self._request.more_body:
                    data = self._take_body(self._request, data)
                else:
                    return data
        except RefusedRequestError as refusal:
            self._refuse(refusal)
        if data and self._successor is not None:
            self._successor.data_received(data)
        return b""

    def _take_head(self, head: Head) -> None:
        self._head_begun_at = None
        if head.is_opening:
            self._open_socket(head)
            return
        request = Request(self, self._scope("http", head), keep_alive=head.keep_alive)
        if head.has_body:
            self._expect_body(request, head)
        self._request = request
        self._is_begun = False

    def _scope(self, kind: str, head: Head) -> Scope:
        url = head.url
        if b"#" in url:
            url = url.partition(b"#")[0]
        raw_path, _, query = url.partition(b"?")
        if raw_path[:1] == b"/" and not raw_path.isascii():
            raise RefusedRequestError(400, "the path has bytes that are no ASCII")
        path = raw_path.decode("latin-1")
        scope: Scope = {
            "type": kind,
            "asgi": _ASGI,
            "http_version": head.version,
            "server": self._server,
            "client": self._client,
            "scheme": self._scheme,
            "root_path": "",
            "headers": head.headers,
            "method": head.method.decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
        }
        if head.is_forwarded:
            self.shared.proxies.apply(scope)
        if self._for_pages:
            scope[PAGES_KEY] = True
        return scope

    def _open_socket(self, head: Head) -> None:
        """Become a WebSocket: it takes over from here, with what lies behind its opening."""
        scope = self._scope("websocket", head)
        del scope["method"]
        scope["scheme"] = {"http": "ws", "https": "wss"}.get(scope["scheme"], scope["scheme"])
        self._is_closing = True
        self._heads.close()
        self._unwatch()
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()
        self.shared.remove(self)
        self._successor = FrontSocket(self.shared, scope, self._client)
        self.transport.set_protocol(self._successor)
        self._successor.connection_made(self.transport)

    # --- Bodies ---------------------------------------------------------------------------------

    def _expect_body(self, request: Request, head: Head) -> None:
        length = head.length or 0
        if self.shared.lacks_room(min(length, WHOLE)):
            raise _no_room_for_body()
        request.more_body = True
        request.pace = Pace()
        request.expects_continue = head.expects_continue
        self._rest = length
        self._chunks = ChunkedBody(MAX_HEAD_BYTES) if head.is_chunked else None

    def _take_body(self, request: Request, data: bytes) -> bytes:
        """Take what is of the body; return what lies behind it."""
        if self._chunks is None:
            piece = data[: self._rest]
            taken = len(piece)
            self._rest -= taken
            is_complete = not self._rest
            if self._rest >= LARGE and not request.body and self._is_begun:
                self._read_at_once(MOST_READ)
            elif is_complete:
                self._read_at_once(READ)
        else:
            pieces: list[bytes] = []
            try:
                taken = self._chunks.take(data, pieces)
            except BadChunksError as error:
                raise RefusedRequestError(400, str(error)) from None
            except TrailersTooLargeError:
                text = f"the trailers have over {MAX_HEAD_BYTES} bytes"
                raise RefusedRequestError(431, text) from None
            is_complete = self._chunks.is_complete
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if is_complete:
            request.more_body = False
        if request.is_complete:  # the rest is not wanted
            if is_complete:
                self._request = None
        elif piece or is_complete:
            self._keep(request, piece)
        return data[taken:]

    def _read_at_once(self, size: int) -> None:
        """Read up to so many bytes at once from now on, where the transport is asyncio's own."""
        if hasattr(self.transport, "max_size"):
            self.transport.max_size = size

    def _keep(self, request: Request, piece: bytes) -> None:
        if request.pace is not None and request.more_body:
            request.pace.took(len(piece), self.shared.loop.time())
        uncounted = min(len(piece), WHOLE - request.counted)
        if uncounted > 0:  # a body that follows its query takes no more room than that
            request.counted += uncounted
            self.shared.waiting_bytes += uncounted
            if self.shared.lacks_room() and not request.is_started:
                raise _no_room_for_body()
        if not request.body:
            request.body = piece
        elif len(piece) >= LARGE:
            request.body = b"".join((request.body, piece))
        else:
            if type(request.body) is bytes:
                request.body = bytearray(request.body)
            request.body += piece
        request.wake()

    # --- Answering ------------------------------------------------------------------------------

    def _begin(self) -> None:
        request = self._request
        if request is None or self._is_begun or self._is_closing:
            return
        self._is_begun = True
        leave = None
        if self._begin_shortly is not None and not request.more_body:
            leave = self._begin_shortly(request, bytes(request.body))
        if request.is_complete:
            return
        if leave is not None:
            request.body = b""  # the query has it
        self._leave = leave or request.go_on(self.shared.app).cancel

    def completed(self, request: Request) -> None:
        """Go on with the next request, if it is here and the connection goes on."""
        request.is_complete = True
        request.wake()
        self._release(request)
        self._leave = nothing
        self._was_served = True
        self._idle_since = self.shared.loop.time()
        if not request.keep_alive:
            if request.more_body or self._ahead:
                self._linger()
            else:
                self.close()
            return
        if not request.more_body:
            self._request = None
        self._go_on()

    def cut(self, request: Request) -> None:
        """End the connection: a response was not given, or not to its end."""
        if request.is_complete or request.is_disconnected or self.transport.is_closing():
            return
        if request.ends_with_connection:  # a close would look like its end
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        else:
            self.close()

    def _release(self, request: Request) -> None:
        """Keep nothing of the body, and count it no more."""
        self.shared.waiting_bytes -= request.counted
        request.counted = 0
        request.body = b""

    def _drop_request(self) -> None:
        """End what answers the request: its client has left."""
        request = self._request
        if request is not None and not (request.is_complete or request.is_disconnected):
            request.is_disconnected = True
            request.wake()
            self._release(request)
            if self._is_begun and _STAYS not in request.scope["headers"]:
                self._leave()

    # --- Refusals -------------------------------------------------------------------------------

    def _refuse(self, refusal: RefusedRequestError) -> None:
        """Refuse what cannot be read, and read no more."""
        request = self._request
        if request is not None and request.is_started:
            self.close()  # amid a response, or behind one
            return
        self._drop_request()
        text = str(refusal).encode("latin-1", "replace")
        head = STATUS_LINES[refusal.status] + self.shared.default_head + refusal.headers
        self.transport.write(
            b"%bcontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (head, len(text), text)
        )
        self._linger()

    def _linger(self) -> None:
        """Close, but not before the client has had time to read the response.

        Closing a socket with unread bytes resets it, and a reset can overtake the response: the
        client would see a broken pipe instead of a 413.
        """
        self._is_closing = True
        self._ahead = b""
        self._heads.close()
        self.throttle()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.shared.loop.call_later(LINGER_S, self.transport.close)


def _no_room_for_body() -> RefusedRequestError:
    return RefusedRequestError(503, NO_ROOM, b"retry-after: 1\r\n")
