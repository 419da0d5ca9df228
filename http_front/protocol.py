"""HTTP/1.1 on a connection of the worker, on httptools' parser (llhttp).

One request at a time: its head, its body, its answer, then the next one. What the client sends
ahead waits as the bytes it is, and meanwhile the connection is not read.

llhttp reads heads, and nothing else. It is fed up to the empty line that ends a head, so where each
message begins and ends is decided here, by one Content-Length or by chunks (:mod:`.chunks`):

- an ``Upgrade`` changes nothing about that. A WebSocket's opening (:mod:`.websocket`) has no body;
  any other request that would upgrade is served as the plain request that it is, with its body;
- trailers never meet the headers;
- what llhttp lets pass and other servers may read differently is refused, and the connection is
  closed: a request line that is not exactly ``METHOD target HTTP/1.x``, several Host headers,
  chunks in HTTP/1.0, lines without limits (:mod:`.malformed` has what is clear where it ends).

A request that has come in whole is offered to ``begin`` first, which needs no task for it
(:mod:`.whole`); any other is an ASGI scope with a task. A request whose client leaves is cancelled,
wherever it waits, also while its body is not read. A client that still sends when it is refused
gets to read why.

Nothing waits without a limit. One look at all connections a second, instead of timers, ends those
that send no request in time, or do not take what was sent to them (:meth:`FrontProtocol.give_up`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import select
import socket
import struct
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import lru_cache
from heapq import nsmallest
from typing import Any
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from greenroom.actors.runtime.loop import nothing
from greenroom.http_front.exchange import (
    CLOSE,
    PAGES_KEY,
    STATUS_LINES,
    WHOLE,
    App,
    Event,
    Headers,
    Scope,
    whole_target,
)
from greenroom.http_front.sending import Sending
from greenroom.http_front.websocket import FrontSocket, is_opening
from greenroom.http_front.whole import Turn

# Chunked bodies, read strictly (RFC 9112, section 7.1), and where they end.
#
# llhttp reads chunks too, but does not say where the body ends, reports trailers as headers, and
# bounds neither trailers nor chunk extensions. Here both are dropped, and have a bound.

MAX_CHUNK_LINE_BYTES = 1024  # the size and its extensions; 16 digits are more than any body has

_chunk_line = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?").fullmatch
_framing_line = re.compile(rb"(content-length|transfer-encoding):", re.IGNORECASE).match
_trailer_line = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*").fullmatch

_SIZE, _DATA, _DATA_END, _TRAILERS, _DONE = range(5)


class BadChunksError(Exception):
    """What came is no chunked body; the text says why."""


class Trailers(Exception):  # noqa: N818 - what is over is a limit
    """The trailers are over their limit of bytes."""


class ChunkedBody:
    """Takes a chunked body out of the bytes of a connection, however they are cut."""

    __slots__ = ("_line", "_max_trailer_bytes", "_rest", "_state", "_trailer_bytes")

    def __init__(self, max_trailer_bytes: int) -> None:
        self._state = _SIZE
        self._rest = 0  # of the chunk
        self._line = b""  # the beginning of a line whose end has not come
        self._trailer_bytes = 0
        self._max_trailer_bytes = max_trailer_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the end of the body, with its trailers, has been taken."""
        return self._state == _DONE

    def take(self, data: bytes, onto: list[bytes]) -> int:
        """Put what is of the body onto a list; return how many bytes of ``data`` were taken.

        Raises BadChunksError, or Trailers.
        """
        at, size = 0, len(data)
        while at < size and self._state != _DONE:
            if self._state == _DATA:
                piece = data[at : at + self._rest] if at or self._rest < size else data
                onto.append(piece)
                at += len(piece)
                self._rest -= len(piece)
                if not self._rest:
                    self._state = _DATA_END
                continue
            end = data.find(b"\n", at)
            line = self._line + (data[at:] if end < 0 else data[at:end])
            self._check_size(line)
            if end < 0:
                self._line = line
                return size
            self._line, at = b"", end + 1
            if line[-1:] != b"\r":
                raise BadChunksError("a line of a chunked body ends without a carriage return")
            self._take_line(line[:-1])
        return at

    def _check_size(self, line: bytes) -> None:
        if self._state == _TRAILERS:
            if self._trailer_bytes + len(line) > self._max_trailer_bytes:
                raise Trailers
        elif len(line) > (MAX_CHUNK_LINE_BYTES if self._state == _SIZE else 1):
            raise BadChunksError(
                "a chunk is longer than its size says"
                if self._state == _DATA_END
                else f"a chunk's size and extensions have over {MAX_CHUNK_LINE_BYTES} bytes"
            )

    def _take_line(self, line: bytes) -> None:
        if self._state == _DATA_END:
            if line:
                raise BadChunksError("a chunk is longer than its size says")
            self._state = _SIZE
        elif self._state == _SIZE:
            matched = _chunk_line(line)
            if matched is None:
                raise BadChunksError("a chunk's size is not a hexadecimal number")
            self._rest = int(matched[1], 16)
            self._state = _DATA if self._rest else _TRAILERS
        elif not line:
            self._state = _DONE
        elif _framing_line(line):
            raise BadChunksError("a trailer says how long the body is, which is too late")
        elif _trailer_line(line):
            self._trailer_bytes += len(line) + 2
        else:
            raise BadChunksError("a trailer is not a header line")


# What trusted proxies say of the client: X-Forwarded-For and X-Forwarded-Proto.

FORWARDED = frozenset({b"x-forwarded-for", b"x-forwarded-proto"})
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustedProxies:
    """The peers whose word is taken: addresses, networks, or ``*`` for everybody."""

    def __init__(self, trusted: Iterable[str]) -> None:
        names = set(trusted)
        self._trusts_all = "*" in names
        self._networks: list[_Network] = [ipaddress.ip_network(name) for name in names - {"*"}]
        self.trusts = lru_cache(maxsize=1024)(self._trusts)

    def _trusts(self, host: str) -> bool:
        """Return whether a peer's word is taken."""
        if self._trusts_all:
            return True
        address = _forwarded_address(host)
        return address is not None and any(address in network for network in self._networks)

    def apply(self, scope: Scope) -> None:
        """Write into the scope what the peer says, if it is trusted and says it well."""
        client = scope["client"]
        if client is None or not self.trusts(client[0]):
            return
        hops: list[str] = []
        for name, value in scope["headers"]:
            if name == b"x-forwarded-for":
                hops += value.decode("latin-1").split(",")
            elif name == b"x-forwarded-proto":
                self._set_scheme(scope, value.decode("latin-1").strip())
        if hops:
            self._set_client(scope, [hop.strip() for hop in hops])

    @staticmethod
    def _set_scheme(scope: Scope, scheme: str) -> None:
        if scheme in _SCHEMES:
            scope["scheme"] = _SCHEMES[scheme] if scope["type"] == "websocket" else scheme

    def _set_client(self, scope: Scope, hops: list[str]) -> None:
        """Take the last hop that is not trusted itself, or the first; ignore what is no address."""
        for at, hop in enumerate(reversed(hops), 1):
            host, port = _host_and_port(hop)
            if _forwarded_address(host) is None:
                return
            if at == len(hops) or not self.trusts(host):
                scope["client"] = (host, port)
                return


def _forwarded_address(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _host_and_port(hop: str) -> tuple[str, int]:
    """Split ``1.2.3.4:5``, ``[::1]:5`` or either without a port, which is 0 then."""
    if hop[:1] == "[":
        host, _, port = hop[1:].partition("]")
        port = port[1:]
    elif hop.count(":") == 1:
        host, _, port = hop.partition(":")
    else:
        host, port = hop, ""
    return host, int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0


# Who leaves while nothing is read from him.
#
# A connection of which nothing is read, because user code does not take what has come of a body,
# does not tell its end: that lies behind the bytes which are not read. The kernel knows of it. So
# these connections are put into an epoll set that waits for nothing else, and the set into the
# event loop, which sees it as one more descriptor: no timer looks after them, and one that nobody
# leaves is free.

GONE = select.EPOLLRDHUP  # and EPOLLHUP and EPOLLERR, which are always told of


class DisconnectWatcher:
    """Tells once of each descriptor in it whose other end has closed; for one event loop."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None  # most workers never need it
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callbacks: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, on_gone: Callable[[], None]) -> None:
        """Call ``on_gone`` on the running loop when the other end closes, or has closed."""
        if self._epoll is None:
            self._epoll = select.epoll()
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._epoll.fileno(), self._look)
        self._epoll.register(fd, GONE)
        self._callbacks[fd] = on_gone

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, if it is here; call it before the descriptor is closed."""
        if self._callbacks.pop(fd, None) is not None and self._epoll is not None:
            self._epoll.unregister(fd)

    def close(self) -> None:
        """Tell of nobody any more; the loop must not be closed yet."""
        self._callbacks.clear()
        if self._epoll is not None and self._loop is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _look(self) -> None:
        for fd, _ in self._epoll.poll(0) if self._epoll is not None else ():
            on_gone = self._callbacks[fd]
            self.unwatch(fd)
            on_gone()


_logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 4094
MAX_HEADERS = 100
MAX_HEADER_BYTES = 8190  # name and value
MAX_HEAD_BYTES = 65536  # of all headers, and of all trailers
MAX_LENGTH_DIGITS = 18
LINGER_S = 2.0
AHEAD = 256 * 1024  # bytes of a body that nobody has taken
LARGE = 64 * 1024  # bytes of a part that is not copied
READ = 256 * 1024  # bytes that are read at once, as asyncio does
MOST_READ = 1024 * 1024  # of a body that is taken as fast as it comes
LOG_EVERY_S = 60.0
EVICTED = 16  # connections that are closed at once to make room

_CHECKED = FORWARDED | {b"host", b"content-length", b"transfer-encoding", b"expect", b"upgrade"}
_ASGI = {"version": "3.0", "spec_version": "2.4"}
_RESET = struct.pack("ii", 1, 0)
_other_http = re.compile(rb"[^ \r\n]+ [^ \r\n]+ HTTP/((?!1\.[01])[0-9]\.[0-9])\r\n").match
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_DISCONNECT: Event = {"type": "http.disconnect"}


Begin = Callable[[Turn], Callable[[], object] | None]


class RefusedRequestError(Exception):
    """A request that is refused before anybody looks at it, with its HTTP status."""

    def __init__(self, status: int, text: str, headers: bytes = b"") -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


def _never(_turn: Turn) -> None:
    return None


class Connections:
    """What all connections of a worker share; each adds and removes itself."""

    def __init__(
        self,
        app: App,
        begin: Begin = _never,
        *,
        keep_alive_s: float,
        header_timeout_s: float,
        send_timeout_s: float,
        opening_timeout_s: float,
        max_message_bytes: int,
        max_waiting_bytes: int,
        trusted: Iterable[str],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.departures = DisconnectWatcher()
        self.connections: set[Any] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.app = app
        self.begin = begin
        self.keep_alive_s = keep_alive_s
        self.header_timeout_s = header_timeout_s
        self.send_timeout_s = send_timeout_s
        self.opening_timeout_s = opening_timeout_s
        self.max_message_bytes = max_message_bytes
        self.max_waiting_bytes = max_waiting_bytes
        self.waiting_bytes = 0  # of the bodies of requests that are not answered
        self.default_head = b""
        self.proxies = TrustedProxies(trusted)
        self._warned_at: dict[str, float] = {}

    def make(self, *, for_pages: bool = False) -> FrontProtocol:
        """Make the protocol of a new connection, perhaps one for our own pages alone."""
        return FrontProtocol(self, for_pages=for_pages)

    def run(self, running: Any) -> asyncio.Task[None]:
        """Run what answers a request, in a task."""
        task: asyncio.Task[None] = self.loop.create_task(running)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def has_sockets(self) -> bool:
        """Return whether WebSockets are open, or are being closed."""
        return any(isinstance(each, FrontSocket) for each in self.connections)

    def tell_time(self) -> None:
        """Set the Date of answers; to be called every second."""
        self.default_head = b"date: %s\r\n" % formatdate(usegmt=True).encode()

    def give_up(self, now: float, *, served_too: bool, fresh_s: float) -> None:
        """Close connections that wait too long; see :meth:`FrontProtocol.give_up`."""
        for connection in list(self.connections):
            try:
                connection.give_up(now, served_too=served_too, fresh_s=fresh_s)
            except Exception:  # the others need their look
                _logger.exception("a connection that waits could not be closed")

    def make_room(self) -> bool:
        """Close the connections that have waited longest for a request; False if none waits.

        One whose request is here, and has only not been read yet, does not wait.
        """
        waiting = [each for each in self.connections if each.waiting_since is not None]
        longest = nsmallest(EVICTED, waiting, key=lambda each: each.waiting_since)
        unread = select.poll()
        for each in longest:
            unread.register(each.fileno(), select.POLLIN)
        ready = {fd for fd, _ in unread.poll(0)}
        idle = [each for each in longest if not each.waiting_since or each.fileno() not in ready]
        for each in idle:
            each.close()
        return bool(idle)

    def warn(self, text: str) -> None:
        """Log what goes on for as long as it does, at most once every LOG_EVERY_S seconds."""
        kind = text.partition(":")[0]
        now = self.loop.time()
        if now - self._warned_at.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._warned_at[kind] = now
            _logger.warning("%s", text)


class Request:
    """A request of a connection with its answer, to an ASGI app, or as a :class:`.whole.Turn`."""

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
        "is_started",
        "keep_alive",
        "more_body",
        "scope",
    )

    def __init__(self, protocol: FrontProtocol, scope: Scope, *, keep_alive: bool) -> None:
        self._protocol = protocol
        self.scope = scope
        self.keep_alive = keep_alive
        self.body: bytes | bytearray = b""  # what has come and nobody has taken
        self.more_body = False
        self.counted = 0  # bytes of the body, in Connections.waiting_bytes
        self.expects_continue = False
        self.is_disconnected = False
        self.is_started = False  # the answer is
        self.is_complete = False
        self._event: asyncio.Event | None = None
        self._has_given_all = False
        self._start: Event | None = None  # of the answer, until the first part of its body
        self._is_chunked = False
        self._left: int | None = None  # of a body with a length

    def wake(self) -> None:
        """Have :meth:`receive` look again."""
        if self._event is not None:
            self._event.set()

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer; its headers are valid, in lower case, and have its length."""
        if self.is_disconnected:
            return
        protocol = self._protocol
        lines = [STATUS_LINES[status], protocol.shared.default_head]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self.is_started = True
        protocol.write(lines, body)
        protocol.completed(self)

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
        """Whether the answer that has begun has no other end than the connection's."""
        return self.is_started and not self._is_chunked and self._left is None

    async def receive(self) -> Event:
        """Return the next part of the body; its end once more, when there is no more."""
        if self.expects_continue:
            self.expects_continue = False
            if not (self.is_started or self.is_disconnected):
                self._protocol.write([], _CONTINUE)
        while not (self.is_disconnected or self.is_complete):
            if self.body or not (self.more_body or self._has_given_all):
                body, self.body = self.body, b""
                self._has_given_all = not self.more_body
                self._protocol.throttle()
                return {"type": "http.request", "body": bytes(body), "more_body": self.more_body}
            if self._event is None:
                self._event = asyncio.Event()
            self._event.clear()
            await self._event.wait()
        return _DISCONNECT

    async def send(self, event: Event) -> None:
        """Send an event of the answer; its head leaves with the first part of its body."""
        await self._protocol.drained()
        if self.is_disconnected:
            return
        kind = event["type"]
        if self.is_complete or (kind == "http.response.start") is (
            self.is_started or self._start is not None
        ):
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
                raise RuntimeError("the answer is not as long as its Content-Length")
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
        has_body = self.scope["method"] != "HEAD" and status not in {204, 304}
        if not has_body:
            self._left = 0
        elif self._left is None and self.scope["http_version"] == "1.1":
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")


class FrontProtocol(asyncio.Protocol):
    """One connection that speaks HTTP."""

    transport: asyncio.Transport

    def __init__(self, shared: Connections, *, for_pages: bool = False) -> None:
        self.shared = shared
        self._for_pages = for_pages
        self.accepted_at = shared.loop.time()
        self._idle_since = self.accepted_at
        self._was_served = False
        self._parser: HttpRequestParser | None = None
        self._request: Request | None = None  # until its body is read and its answer is sent
        self._is_begun = False  # by who answers it
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
        # What is read:
        self._ahead = b""  # behind the request that is being answered
        self._head = bytearray()  # of a head whose end has not come
        self._begun_at: float | None = None  # when that began
        self._rest = 0  # bytes that are to come of a body with a length
        self._chunks: ChunkedBody | None = None  # of any other body
        self._forget_head()

    def _forget_head(self) -> None:
        self._url = b""
        self._method = b""
        self._headers: Headers = []
        self._refusal: RefusedRequestError | None = None
        self._has_head = False
        self._keep_alive = False
        self._is_upgrade = False
        self._hosts = 0
        self._length: int | None = None
        self._is_chunked = False
        self._is_forwarded = False
        self._expects_continue = False
        self._upgrade = b""

    # --- The connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        self.transport = transport
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        if transport.get_extra_info("sslcontext"):
            self._scheme = "https"
        self.shared.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio; nobody wants the answer any more."""
        self.shared.connections.discard(self)
        self._is_closing = True
        self._unwatch()
        self.resume_writing()
        self._drop_request()
        self._parser = None  # it holds this object as well

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

    @property
    def waiting_since(self) -> float | None:
        """Since when the connection has waited for a request; None while one is answered."""
        if self._is_closing:
            return 0.0  # it was refused, and is read for a while so that it hears why
        if self._ahead or self._is_answering:
            return None
        return self._begun_at or self._idle_since

    @property
    def _is_answering(self) -> bool:
        return self._request is not None and not self._request.is_complete

    def give_up(self, now: float, *, served_too: bool, fresh_s: float) -> None:
        """Close the connection, if it waits for what does not come.

        One whose client does not take what is sent to it is cut. One that has sent nothing yet is
        closed after ``fresh_s``, one that was served before after the time for which connections
        are kept, or at once if ``served_too``, and one that has sent a part of its headers after
        ``header_timeout_s``.
        """
        shared = self.shared
        if self._sending.is_stuck(self.transport, now, shared.send_timeout_s):
            self.transport.abort()
        elif self._is_closing or self.waiting_since is None:
            return
        elif self._begun_at is not None:
            if now - self._begun_at > shared.header_timeout_s:
                self._refuse(RefusedRequestError(408, "the headers did not arrive in time"))
        elif not self._was_served:
            if now - self.accepted_at > fresh_s:
                self.close()
        elif served_too or now - self._idle_since > shared.keep_alive_s:
            self.close()

    def throttle(self) -> None:
        """Read, or read no more, as what is here demands."""
        request = self._request
        pause = not self._is_closing and (
            bool(self._ahead)
            or (
                len(request.body) > AHEAD
                if request is not None and request.more_body
                else self._writable is not None
            )
        )
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

    def _read_at_once(self, size: int) -> None:
        """Read up to so many bytes at once from now on, where the transport is asyncio's own."""
        if hasattr(self.transport, "max_size"):
            self.transport.max_size = size

    # --- Reading --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if not self._is_closing:
            self._read(self._ahead + data if self._ahead else data)

    def _read(self, data: bytes) -> None:
        """Read requests, and have them answered, for as long as answers come at once."""
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
                    data = self._take_head(data)
                elif self._request.more_body:
                    data = self._take_body(self._request, data)
                else:
                    return data
        except RefusedRequestError as refusal:
            self._refuse(refusal)
        if data and self._successor is not None:
            self._successor.data_received(data)
        return b""

    def _take_head(self, data: bytes) -> bytes:
        """Take a head, or a part of it; return what lies behind it."""
        if not self._head:
            self._forget_head()
        head: bytes | bytearray
        if self._head:
            before = len(self._head)
            self._head += data
            head = self._head
        else:
            before, head = 0, data
        # One empty line before a request is allowed (RFC 9112, 2.2).
        begin = 2 if head[:2] == b"\r\n" else 0
        end = head.find(b"\r\n\r\n", max(begin, before - 3)) + 4
        piece = data if end < 4 or end == len(head) else data[: end - before]
        if self._parser is None:
            self._parser = HttpRequestParser(self)
        try:
            self._parser.feed_data(piece)
        except HttpParserUpgrade:
            self._parser = None
        except HttpParserError as error:
            raise self._refusal or RefusedRequestError(400, str(error)) from None
        if end >= 4:
            self._begun_at = None
            self._take_whole_head(head, begin)
            self._head = bytearray()
            return data[len(piece) :]
        if self._has_head:
            raise RefusedRequestError(400, "the headers do not end with an empty line")
        if not before:
            self._head += data
            self._begun_at = self.shared.loop.time()
        if len(self._head) > MAX_HEAD_BYTES:
            raise RefusedRequestError(431, f"the headers have over {MAX_HEAD_BYTES} bytes")
        return b""

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's target; called by the parser."""
        self._url += url
        if len(self._url) > MAX_LINE_BYTES:
            raise self._refused(414, f"the request line has over {MAX_LINE_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, within the limits; called by the parser."""
        name, value = name.lower(), value.rstrip(b" \t")  # llhttp strips only what is in front
        self._headers.append((name, value))
        if len(name) + len(value) > MAX_HEADER_BYTES:
            raise self._refused(431, f"a header has over {MAX_HEADER_BYTES} bytes")
        if len(self._headers) > MAX_HEADERS:
            raise self._refused(431, f"there are over {MAX_HEADERS} headers")
        if name in _CHECKED:
            self._check(name, value)

    def _check(self, name: bytes, value: bytes) -> None:
        if name in FORWARDED:
            self._is_forwarded = True
        elif name == b"upgrade":
            self._upgrade = self._upgrade + b"," + value if self._upgrade else value
        elif name == b"expect":
            self._expects_continue = value.lower() == b"100-continue"
        elif name == b"host":
            self._hosts += 1
            if self._hosts > 1:
                raise self._refused(400, "there are several Host headers")
        elif name == b"content-length":
            if self._length is not None or not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
                raise self._refused(400, "the Content-Length is not one number")
            self._length = int(value)
        elif self._is_chunked:
            raise self._refused(400, "there are several Transfer-Encoding headers")
        elif value.lower() != b"chunked":
            # A coding before "chunked" would reach user code undone, as if it were the body.
            shown = value[:100].decode("latin-1")
            text = f"the Transfer-Encoding {shown!r} is not supported; use chunked alone"
            raise self._refused(501, text)
        else:
            self._is_chunked = True

    def on_headers_complete(self) -> None:
        """Note what the parser knows only now; called by it."""
        parser = self._parser
        assert parser is not None
        self._has_head = True
        self._method = parser.get_method()
        self._keep_alive = parser.should_keep_alive()
        self._is_upgrade = parser.should_upgrade()

    def _refused(self, status: int, text: str) -> RefusedRequestError:
        self._refusal = RefusedRequestError(status, text)
        return self._refusal  # httptools gives its caller another error

    def _take_whole_head(self, head: bytes | bytearray, begin: int) -> None:
        """Make a request of a head that begins there, and find out how its body ends."""
        if not self._has_head:
            raise RefusedRequestError(400, "the headers are not complete where they end")
        method, url = self._method, self._url
        version = "1.1"
        if not head.startswith(b"%b %b HTTP/1.1\r\n" % (method, url), begin):
            version = self._other_version(head, begin)
        if method == b"CONNECT":
            raise RefusedRequestError(501, "CONNECT is for proxies, which this server is not")
        has_body = self._has_body(version)
        if has_body:
            self._parser = None  # it expects the body, which goes past it
        if self._is_upgrade and is_opening(method, version, self._upgrade):
            if has_body:
                raise RefusedRequestError(400, "a WebSocket's opening has no body")
            self._open_socket()
            return
        scope = self._make_scope("http", self._scheme, version)
        request = Request(self, scope, keep_alive=self._keep_alive and version == "1.1")
        if has_body:
            self._expect_body(request)
        self._request = request
        self._is_begun = False

    def _has_body(self, version: str) -> bool:
        if not self._is_chunked:
            return bool(self._length)
        if version == "1.0":
            raise RefusedRequestError(400, "HTTP/1.0 has no Transfer-Encoding")
        if self._length is not None:
            raise RefusedRequestError(400, "there are a length and a Transfer-Encoding")
        return True

    def _other_version(self, head: bytes | bytearray, begin: int) -> str:
        if head.startswith(b"%b %b HTTP/1.0\r\n" % (self._method, self._url), begin):
            return "1.0"
        other = _other_http(head, begin)
        if other is not None:
            version = other[1].decode("ascii")
            raise RefusedRequestError(505, f"HTTP/{version} is not spoken here")
        text = "the request line is not of the form METHOD target HTTP/1.1, with single spaces"
        raise RefusedRequestError(400, text)

    def _make_scope(self, kind: str, scheme: str, version: str) -> Scope:
        url = self._url
        if b"#" in url:
            url = url.partition(b"#")[0]
        if url[:1] == b"/":
            raw_path, _, query = url.partition(b"?")
            if not raw_path.isascii():
                raise RefusedRequestError(400, "the path has bytes that are no ASCII")
            path = raw_path.decode("ascii")
            if "%" in path:
                path = unquote(path)
        else:
            path, raw_path = whole_target(url)
            query = url.partition(b"?")[2]
        scope: Scope = {
            "type": kind,
            "asgi": _ASGI,
            "http_version": version,
            "server": self._server,
            "client": self._client,
            "scheme": scheme,
            "root_path": "",
            "headers": self._headers,
            "method": self._method.decode("ascii"),
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
        }
        if self._is_forwarded:
            self.shared.proxies.apply(scope)
        if self._for_pages:
            scope[PAGES_KEY] = True
        return scope

    def _open_socket(self) -> None:
        """Become a WebSocket: it takes over from here, with what lies behind its opening."""
        scope = self._make_scope("websocket", "wss" if self._scheme == "https" else "ws", "1.1")
        del scope["method"]
        self._is_closing = True
        self._parser = None
        self._unwatch()
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()
        self.shared.connections.discard(self)
        self._successor = FrontSocket(self.shared, scope)
        self.transport.set_protocol(self._successor)
        self._successor.connection_made(self.transport)

    # --- Bodies ---------------------------------------------------------------------------------

    def _expect_body(self, request: Request) -> None:
        shared, length = self.shared, self._length or 0
        if shared.waiting_bytes + min(length, WHOLE) > shared.max_waiting_bytes:
            raise self._no_room_for_body()
        request.more_body = True
        request.expects_continue = self._expects_continue and request.scope["http_version"] == "1.1"
        self._rest = length
        self._chunks = ChunkedBody(MAX_HEAD_BYTES) if self._is_chunked else None

    def _no_room_for_body(self) -> RefusedRequestError:
        most = self.shared.max_waiting_bytes
        text = "the bodies that wait in this worker have no room for another"
        self.shared.warn(f"{text}: over {most} bytes (max_waiting_body_bytes); it is answered 503")
        return RefusedRequestError(503, text, b"retry-after: 1\r\n")

    def _take_body(self, request: Request, data: bytes) -> bytes:
        """Take what is of the body; return what lies behind it."""
        if self._chunks is not None:
            pieces: list[bytes] = []
            try:
                taken = self._chunks.take(data, pieces)
            except BadChunksError as error:
                raise RefusedRequestError(400, str(error)) from None
            except Trailers:
                text = f"the trailers have over {MAX_HEAD_BYTES} bytes"
                raise RefusedRequestError(431, text) from None
            is_complete = self._chunks.is_complete
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        else:
            piece = data if len(data) <= self._rest else data[: self._rest]
            taken = len(piece)
            self._rest -= taken
            is_complete = not self._rest
            if self._rest >= LARGE and not request.body and self._is_begun:
                self._read_at_once(MOST_READ)
            elif is_complete:
                self._read_at_once(READ)
        if is_complete:
            request.more_body = False
        if request.is_complete:  # nobody wants it
            if is_complete:
                self._request = None
        elif piece or is_complete:
            self._keep(request, piece)
        return data[taken:] if taken < len(data) else b""

    def _keep(self, request: Request, piece: bytes) -> None:
        uncounted = min(len(piece), WHOLE - request.counted)
        if uncounted > 0:  # a body that follows its query takes no more room than that
            request.counted += uncounted
            self.shared.waiting_bytes += uncounted
            too_much = self.shared.waiting_bytes > self.shared.max_waiting_bytes
            if too_much and not request.is_started:
                raise self._no_room_for_body()
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
        if not request.more_body:
            request.body = bytes(request.body)
            leave = self.shared.begin(request)  # type: ignore[arg-type]  # its body is bytes now
        if request.is_complete:
            return
        if leave is not None:
            request.body = b""  # the query has it
        self._leave = leave or request.go_on(self.shared.app).cancel

    def completed(self, request: Request) -> None:
        """Go on with the next request, if it is here and the connection goes on."""
        request.is_complete = True
        request.wake()
        self._let_go(request)
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
        """End the connection: an answer was not given, or not to its end."""
        if request.is_complete or request.is_disconnected or self.transport.is_closing():
            return
        if request.ends_with_connection:  # a close would look like its end
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        else:
            self.close()

    def _let_go(self, request: Request) -> None:
        """Count the body no more, and keep nothing of it."""
        self.shared.waiting_bytes -= request.counted
        request.counted = 0
        request.body = b""

    def _drop_request(self) -> None:
        """End what answers the request: nobody wants the answer."""
        request = self._request
        if request is not None and not (request.is_complete or request.is_disconnected):
            request.is_disconnected = True
            request.wake()
            self._let_go(request)
            if self._is_begun:
                self._leave()

    # --- Refusals -------------------------------------------------------------------------------

    def _refuse(self, refusal: RefusedRequestError) -> None:
        """Refuse what cannot be read, and read no more."""
        request = self._request
        if request is not None and request.is_started:
            self.close()  # amid an answer, or behind one
            return
        self._drop_request()
        text = str(refusal).encode("latin-1", "replace")
        self.transport.write(
            b"%b%b%bcontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b"
            % (
                STATUS_LINES[refusal.status],
                self.shared.default_head,
                refusal.headers,
                len(text),
                text,
            )
        )
        self._linger()

    def _linger(self) -> None:
        """Close, but not before the client has had time to read the answer.

        Closing a socket with unread bytes resets it, and a reset can overtake the answer: the
        client would see a broken pipe instead of a 413.
        """
        self._is_closing = True
        self._ahead = b""
        self._head = bytearray()
        self.throttle()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.shared.loop.call_later(LINGER_S, self.transport.close)


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
