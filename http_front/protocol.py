"""HTTP/1.1 on a connection of the worker.

One request at a time: its head (:mod:`.heads`), its body, its response, then the next one. What the
client sends ahead waits as the bytes it is, and meanwhile the connection is not read. Each message
ends where one Content-Length or the chunks (:mod:`.bodies`) say. An ``Upgrade`` changes nothing
about that: a WebSocket's opening has no body, and becomes one (:mod:`.websocket`) when the app
accepts it; any other request that would upgrade is served as the plain request that it is.

A request whose body is here is offered to the short way first; any other becomes an ASGI scope with
a task. A request whose client leaves is cancelled wherever it waits, also while its body is not
read. A client that still sends when it is refused gets to read why.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from greenroom.actors.caller.streams import StreamFailedError
from greenroom.actors.runtime.loop import nothing
from greenroom.core.errors import BodyIncompleteError
from greenroom.http_front.asgi import App, Event, Headers
from greenroom.http_front.bodies import LARGE, IncomingBody, RefusedRequestError
from greenroom.http_front.clients import peer_of
from greenroom.http_front.connections import ClientConnection, Connections, has_left, has_unread
from greenroom.http_front.heads import MAX_HEAD_BYTES, Head, HeadReader
from greenroom.http_front.request import CLOSE, Reply, Request
from greenroom.http_front.responses import TEXT, is_valid_header, response_head
from greenroom.http_front.websocket import (
    SUBPROTOCOL,
    SWITCHING,
    ClientGoneError,
    FrontSocket,
    disconnect,
    handshake,
)

_logger = logging.getLogger(__name__)

AHEAD = 256 * 1024  # bytes of a body that wait to be taken
READ = 256 * 1024  # bytes that are read at once, as asyncio does
MOST_READ = 1024 * 1024  # of a body that is taken as fast as it comes

_RESET = struct.pack("ii", 1, 0)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_DISCONNECT: Event = {"type": "http.disconnect"}
_STAYS = (b"x-request-disconnect-disabled", b"?1")  # Ray Serve's header, of a request that goes on


@dataclass(slots=True, eq=False)
class Cycle:
    """One request's time on its connection: its body, and the response that an app gives.

    An app gives that in ASGI's events, or as a whole by :meth:`reply`.
    """

    _protocol: FrontProtocol
    request: Request
    keep_alive: bool  # the connection goes on after it
    body: IncomingBody | None = None
    is_started: bool = False  # the response is
    is_complete: bool = False
    leave: Callable[[], object] = nothing  # ends what answers
    _event: asyncio.Event | None = None
    _has_given_all: bool = False
    _start: tuple[int, Headers] | None = None  # until the first part of the body
    _is_chunked: bool = False
    _left: int | None = None  # of a response body with a length

    @property
    def coming(self) -> IncomingBody | None:
        """The body, while some of it is to come."""
        return None if self.body is None or self.body.is_complete else self.body

    def wake(self) -> None:
        """Let :meth:`receive` check again."""
        if self._event is not None:
            self._event.set()

    def go_on(self, app: App) -> asyncio.Task[None]:
        """Have an ASGI app answer, in a task."""
        answering = self._protocol.shared.run(self._answer(app))
        self.leave = answering.cancel
        return answering

    async def _answer(self, app: App) -> None:
        """Have the app answer; it logs its own errors, and raises to cut the connection."""
        try:
            await app(self.request.scope, self.receive, self.send)
        except (asyncio.CancelledError, Exception):
            self._protocol.cut(self)
        else:
            if not (self.is_complete or self.request.is_disconnected):
                _logger.warning("request %s was cut off: its response has no end", self.request.id)
                self._protocol.cut(self)

    @property
    def ends_with_connection(self) -> bool:
        """Whether the response that has begun has no other end than the connection's."""
        return self.is_started and not self._is_chunked and self._left is None

    async def receive(self) -> Event:
        """Return the next part of the body; its end once more, when there is no more.

        BodyIncompleteError when the client has kept us waiting for too long.
        """
        if self.request.expects_continue:
            self.request.expects_continue = False
            waits = self.coming is not None and not self.coming.held  # the client, with its body
            if waits and not (self.is_started or self.request.is_disconnected):
                self._protocol.write(_CONTINUE)
        body = self.body
        while not (self.request.is_disconnected or self.is_complete):
            held = b"" if body is None else body.held
            more = self.coming is not None
            if held or not (more or self._has_given_all):
                if body is not None:
                    body.held = b""
                self._has_given_all = not more
                self._protocol.go_on()
                return {"type": "http.request", "body": bytes(held), "more_body": more}
            if body is not None and body.is_late:
                raise BodyIncompleteError("the request body came too slowly")
            if self._event is None:
                self._event = asyncio.Event()
            self._event.clear()
            await self._wait(self._event)
        return _DISCONNECT

    async def _wait(self, event: asyncio.Event) -> None:
        body, time = self.coming, self._protocol.shared.loop.time
        if body is not None:
            body.pace.wait(time())
        try:
            await event.wait()
        finally:
            if body is not None:
                body.pace.stop(time())

    async def send(self, event: Event) -> None:
        """Send an event of the response; its head leaves with the first part of its body."""
        if self.request.broken_by is not None:
            raise StreamFailedError(f"behind the middlewares: {self.request.broken_by}")
        await self._protocol.drained()
        kind = event["type"]
        is_start = kind == "http.response.start"  # also another one, until the first has left
        has_start = self.is_started or (not is_start and self._start is not None)
        if self.is_complete or is_start is has_start:
            if self.request.is_disconnected:
                return
            raise RuntimeError(f"the ASGI event {kind!r} is not expected now")
        if is_start:
            headers = event.get("headers", ())
            for name, value in headers:
                if not is_valid_header(name, value):
                    raise RuntimeError(f"the response has the invalid header {name!r}")
            self._start = event["status"], headers
        elif kind == "http.response.body":
            self._send_body(event.get("body", b""), more=event.get("more_body", False))
        else:
            raise RuntimeError(f"the ASGI event {kind!r} is none of a response's")

    def reply(self, reply: Reply) -> None:
        """Send a response that is whole; its headers are in lower case, and have its length."""
        assert isinstance(reply.body, bytes)
        self.request.status, self.request.bytes_out = reply.status, len(reply.body)
        if not self.request.is_disconnected:
            self.is_started = True
            self._protocol.write(self._head(reply.status, reply.headers), reply.body)
            self._protocol.completed(self)

    def _send_body(self, body: bytes, *, more: bool) -> None:
        request = self.request
        start, self._start = self._start, None
        head = b"" if start is None else self._begin(*start)
        tail = b""
        if request.head.method == "HEAD":
            body = b""
        size = memoryview(body).nbytes  # raises for what cannot be written, before any of it is
        if self._is_chunked:
            if size:
                head += b"%x\r\n" % size
                tail = b"\r\n"
            if not more:
                tail += b"0\r\n\r\n"
        elif self._left is not None:
            self._count(size, more=more)
        self.is_started = True
        if start is not None:
            request.status = start[0]
        request.bytes_out += size
        if self.request.is_disconnected:
            return
        if head or body or tail:
            self._protocol.write(head, body, tail)
        if not more:
            self._protocol.completed(self)

    def _count(self, size: int, *, more: bool) -> None:
        assert self._left is not None
        left = self._left - size
        if left < 0 or (left and not more):
            raise RuntimeError("the response is not as long as its Content-Length")
        self._left = left  # not before: an app that catches the error may send on

    def _begin(self, status: int, given: Headers) -> bytes:
        request = self.request
        self._left, self._is_chunked = None, False  # another head may have failed before
        headers: Headers = []
        for name, value in given:
            lowered = name.lower()
            if lowered == b"content-length":
                self._left = int(value)
            elif lowered == b"transfer-encoding":
                continue  # it is ours to choose
            elif lowered == b"connection" and b"close" in value.lower():
                self.keep_alive = False
                continue  # it comes last
            headers.append((lowered, value))
        if request.head.method == "HEAD" or status in {204, 304}:
            self._left = 0
        elif self._left is None and request.head.http_version == "1.1":
            self._is_chunked = True
            headers.append((b"transfer-encoding", b"chunked"))
        return self._head(status, headers)

    def _head(self, status: int, headers: Headers) -> bytes:
        """Return the head of the response, with the headers that every one has."""
        request = self.request
        if request.id:
            headers = [*headers, (b"x-request-id", request.id.encode("ascii"))]
        if request.requests is not None and request.requests.are_last:
            self.keep_alive = False
        if request.expects_continue and self.coming is not None:  # no 100 was sent: it may not come
            self.keep_alive = False
        if not self.keep_alive and status != SWITCHING:
            headers = [*headers, CLOSE]
        return response_head(status, headers, self._protocol.shared.default_head)


@dataclass(slots=True, eq=False)
class Opening(Cycle):
    """A WebSocket's opening: a request until the app accepts it, and then the WebSocket."""

    accepting: Headers = field(default_factory=list)
    socket: FrontSocket | None = None

    async def _answer(self, app: App) -> None:
        await Cycle._answer(self, app)
        if self.socket is not None:
            self.socket.ended()

    async def receive(self) -> Event:
        """Return the next event; the opening itself is a request without a body."""
        if self.socket is None and (await Cycle.receive(self))["type"] == "http.request":
            return {"type": "websocket.connect"}
        return disconnect() if self.socket is None else await self.socket.receive()

    async def send(self, event: Event) -> None:
        """Take an event: that accepts, is a response, or is for the WebSocket."""
        kind = event["type"]
        if self.socket is None:
            await self._protocol.drained()
        if self.socket is not None:
            await self.socket.send(event)
        elif self.request.is_disconnected:
            raise ClientGoneError
        elif kind == "websocket.accept":
            self._accept(event)
        elif kind == "websocket.close":
            self.reply(Reply(403, [(b"content-length", b"0")], b""))
        else:
            await Cycle.send(self, {**event, "type": kind.removeprefix("websocket.")})

    def _accept(self, event: Event) -> None:
        headers = [*self.accepting, *event.get("headers", ())]
        if event.get("subprotocol"):
            headers.append((SUBPROTOCOL, event["subprotocol"].encode("latin-1")))
        self.request.status = SWITCHING
        self.is_started = self.is_complete = True
        self._protocol.write(self._head(SWITCHING, headers))
        self.socket = self._protocol.become_socket(self.request)
        self.wake()


Begin = Callable[[Cycle, bytes], bool]


class FrontProtocol(ClientConnection):
    """One connection that speaks HTTP.

    ``begin`` is the short way: it answers a request whose body is here, or returns False.
    ``for_pages`` marks a connection for our own pages alone.
    """

    def __init__(
        self, shared: Connections, begin: Begin | None = None, *, for_pages: bool = False
    ) -> None:
        super().__init__(shared)
        self._begin_shortly = begin
        self._for_pages = for_pages
        self._idle_since = shared.loop.time()
        self._was_served = False
        self._cycle: Cycle | None = None  # until its body is read and its response is sent
        self._is_begun = False  # an app or the short way answers it
        self._server: tuple[str, int] | None = None
        self._scheme = "http"
        self._heads = HeadReader(shared.options)
        self._head_begun_at: float | None = None  # while a head is not here in full

    # --- The connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._server = peer_of(transport.get_extra_info("sockname"))
        if transport.get_extra_info("sslcontext"):
            self._scheme = "https"

    def eof_received(self) -> None:
        """See asyncio: the client has left, though what it never takes may keep the transport."""
        self._drop_cycle()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio; the response is not wanted any more."""
        self.shared.remove(self)
        self._is_closing = True
        self.resume_writing()
        self._drop_cycle()
        self._heads.close()

    def write(self, head: bytes, body: bytes = b"", tail: bytes = b"") -> None:
        """Write several parts by one system call, unless the body is large."""
        if len(body) <= LARGE:
            self.transport.write(b"".join((head, body, tail)))
            return
        for part in (head, body, tail):  # a system call more costs less than a copy
            if part:
                self.transport.write(part)

    def close(self) -> None:
        """Close; what was written still leaves."""
        self._is_closing = True
        self.transport.close()

    def evict(self) -> None:
        """See :class:`.connections.ClientConnection`."""
        if self._is_answering:
            text = "this server has no room for a request that comes so slowly"
            self._refuse(RefusedRequestError(503, text, ((b"retry-after", b"1"),)))
        self.close()

    @property
    def waiting_since(self) -> float | None:
        """See :class:`.connections.ClientConnection`."""
        if self._is_closing:
            return 0.0
        if self._ahead:
            return None
        if self._cycle is not None and self._is_answering:
            body = self._cycle.body
            return None if body is None else body.pace.since
        return self._head_begun_at or self._idle_since

    @property
    def _is_answering(self) -> bool:
        return self._cycle is not None and not self._cycle.is_complete

    def close_idle(self, now: float, within_s: float | None) -> None:
        """See :class:`.connections.ClientConnection`."""
        options = self.shared.options
        if self._is_paused and has_left(self.fileno()):
            self.transport.abort()
            return
        if self._is_closing or (since := self.waiting_since) is None:
            return
        if self._cycle is not None and self._is_answering:
            if self._cycle.body is not None and now - since > options.body_timeout_s:
                self._cycle.body.is_late = True
                self._cycle.wake()
        elif self._head_begun_at is not None:
            if now - self._head_begun_at > options.header_timeout_s:
                self._refuse(RefusedRequestError(408, "the headers did not arrive in time"))
        else:
            least_s = options.keep_alive_timeout_s if self._was_served else options.header_timeout_s
            is_late = now - self._idle_since > (least_s if within_s is None else within_s)
            # Where this process was held up, the request may be here: a close would reset it.
            if is_late and not has_unread(self.fileno()):
                self.close()

    @property
    def _must_wait(self) -> bool:
        if self._cycle is not None and (body := self._cycle.coming) is not None:
            return len(body.held) > AHEAD
        return self._writable is not None

    # --- Reading --------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read one request, or many chunks of its body."""
        self._ahead = self._take(self._ahead)
        # A request is begun when all of it is read that is here.
        self._begin()
        if self._is_closing:
            self._ahead = b""

    @property
    def _may_read(self) -> bool:
        is_next = self._cycle is None or self._cycle.coming is not None
        return self._is_closing or (is_next and not self._must_wait)

    def _take(self, data: bytes) -> bytes:
        """Take up to the end of one request; return what lies behind it."""
        try:
            while data and not self._is_closing:
                if self._cycle is None:
                    if self._writable is not None:
                        return data
                    head, data = self._heads.take(data)
                    if head is not None:
                        self._take_request(head)
                    elif not self._heads.is_amid:  # empty lines make no request
                        self._head_begun_at = None
                    elif self._head_begun_at is None:
                        self._head_begun_at = self.shared.loop.time()
                elif (body := self._cycle.coming) is not None:
                    data = self._take_body(self._cycle, body, data)
                    if not body.is_complete:
                        return data
                else:
                    return data
        except RefusedRequestError as refusal:
            self._refuse(refusal)
        return b""

    def _take_request(self, head: Head) -> None:
        self._head_begun_at = None
        if head.query is None:  # else it is here again
            self._locate(head)
        request = Request(head, head.expects_continue)
        if head.is_socket:  # one that is refused is its connection's last
            self._cycle = Opening(self, request, False, accepting=handshake(head))
        else:
            self._cycle = Cycle(self, request, head.keep_alive)
        if head.has_body:
            length = None if head.is_chunked else head.length
            self._cycle.body = IncomingBody(self.shared, length, MAX_HEAD_BYTES)
        self._is_begun = False

    def _locate(self, head: Head) -> None:
        """Add to a head what the connection knows."""
        head.server, head.client, head.scheme = self._server, self.peer, self._scheme
        head.for_pages = self._for_pages
        head.locate(self.shared.root_path)
        if b"x-forwarded-for" in head.named or b"x-forwarded-proto" in head.named:
            found = self.shared.proxies.client_behind(head.client, head.headers)
            head.client, head.scheme = found[0], found[1] or head.scheme
        if head.is_socket:
            head.scheme = {"http": "ws", "https": "wss"}.get(head.scheme, head.scheme)

    def become_socket(self, request: Request) -> FrontSocket:
        """Become a WebSocket: it takes over from here, with what lies behind its opening."""
        ahead, self._ahead = self._ahead, b""
        self._cycle = None
        self._is_closing = True
        self._heads.close()
        self.throttle()
        self.shared.remove(self)
        socket = FrontSocket(self.shared, request)
        self.transport.set_protocol(socket)
        socket.connection_made(self.transport)
        if ahead:
            socket.data_received(ahead)
        return socket

    # --- Bodies ---------------------------------------------------------------------------------

    def _take_body(self, cycle: Cycle, body: IncomingBody, data: bytes) -> bytes:
        """Take what is of the body; return what lies behind it."""
        was_empty = not body.held
        data = body.take(data, may_refuse=not cycle.is_started)
        # More at once from now on, where the transport is asyncio's own.
        if hasattr(self.transport, "max_size"):
            if body.is_complete:
                self.transport.max_size = READ
            elif body.rest >= LARGE and was_empty and self._is_begun:
                self.transport.max_size = MOST_READ
        if cycle.is_complete and body.is_complete:
            self._cycle = None
        cycle.wake()
        return data

    # --- Answering ------------------------------------------------------------------------------

    def _begin(self) -> None:
        cycle = self._cycle
        if cycle is None or self._is_begun or self._is_closing:
            return
        self._is_begun = True
        is_whole = cycle.coming is None and not cycle.request.head.is_socket
        begin = self._begin_shortly if is_whole else None
        body = cycle.body
        if begin is not None and begin(cycle, b"" if body is None else bytes(body.held)):
            if body is not None:
                body.held = b""  # the query has it
        else:
            cycle.go_on(self.shared.app)

    def completed(self, cycle: Cycle) -> None:
        """Go on with the next request, if it is here and the connection goes on."""
        cycle.is_complete = True
        cycle.wake()
        if cycle.body is not None:
            cycle.body.release()
        self._was_served = True
        self._idle_since = self.shared.loop.time()
        if not cycle.keep_alive:
            if cycle.coming is not None or self._ahead:
                self.hang_up()
            else:
                self.close()
            return
        if cycle.coming is None:
            self._cycle = None
        if self._ahead or self._is_paused:
            self.go_on()

    def cut(self, cycle: Cycle) -> None:
        """End the connection: a response was not given, or not to its end."""
        if cycle.is_complete or cycle.request.is_disconnected or self.transport.is_closing():
            return
        if cycle.ends_with_connection:  # a close would look like its end
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        else:
            self.close()

    def _drop_cycle(self) -> None:
        """End what answers the request: its client has left."""
        cycle = self._cycle
        if cycle is not None and not (cycle.is_complete or cycle.request.is_disconnected):
            cycle.request.is_disconnected = True
            cycle.wake()
            if cycle.body is not None:
                cycle.body.release()
            request = cycle.request
            if self._is_begun and (request.head.is_socket or _STAYS not in request.head.headers):
                cycle.leave()

    # --- Refusals -------------------------------------------------------------------------------

    def _refuse(self, refusal: RefusedRequestError) -> None:
        """Refuse what cannot be read, and read no more."""
        cycle = self._cycle
        if cycle is not None and cycle.is_started:
            self.close()  # amid a response, or behind one
            return
        self._drop_cycle()
        text = str(refusal).encode("latin-1", "replace")
        about = (b"content-type", TEXT), (b"content-length", b"%d" % len(text))
        headers = [*refusal.headers, *about, CLOSE]
        self.write(response_head(refusal.status, headers, self.shared.default_head), text)
        self.hang_up()

    def hang_up(self) -> None:
        """See :class:`.connections.ClientConnection`; nothing more is read."""
        self._ahead = b""
        self._heads.close()
        super().hang_up()
