"""What all connections of a worker share: how they are accepted, counted, timed out and evicted.

Nothing waits without a limit. One check of all connections a second, instead of a timer for each,
ends those that send no request in time, or have left while nothing was read of them
(:meth:`Connections.close_idle`). The kernel ends those that do not take what was sent to them.
There are no more connections than descriptors allow, and of one address no more than its share.
When there are as many, those make room that have waited longest for a request, or for the rest of
one: there, the slowest have waited longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import ssl
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from functools import partial
from heapq import nsmallest
from itertools import islice
from typing import Any

from greenroom.actors.runtime.http_port import UNAVAILABLE
from greenroom.core.config import HTTPOptions
from greenroom.http_front.asgi import App
from greenroom.http_front.clients import ClientCounts, TrustedProxies, peer_of

_logger = logging.getLogger(__name__)

MIN_RATE = 500  # bytes per second that a client must send of a body or a message
PAGES_ROOM = 32  # connections to the pages' own port that requests cannot take
SHARE = 4  # one address has at most this part of a worker's connections
LOG_EVERY_S = 60.0
LINGER_S = 2.0
EVICTED = 16  # connections that are closed at once to make room
ACCEPT_AGAIN_S = 1.0
NO_ROOM = "the bodies that wait in this worker have no room for another"
MOST_MS = 2**31 - 1  # that a socket option can say


class ClientConnection(asyncio.Protocol):
    """What each connection of a client is, for HTTP or as a WebSocket.

    While what was written is not taken, nothing is read, and senders wait in :meth:`drained`.
    """

    transport: asyncio.Transport

    def __init__(self, shared: Connections) -> None:
        self.shared = shared
        self.peer: tuple[str, int] | None = None
        self.opening: asyncio.Future[Any] | None = None  # until it is open: TLS takes a while
        self._is_closing = False  # what comes is not for us any more
        self._is_paused = False
        self._ahead = b""  # what came and is not read yet
        self._is_due = False  # it is read in the loop's next pass
        self._writable: asyncio.Event | None = None  # while nothing can be written

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        self.transport = transport
        self.peer = peer_of(transport.get_extra_info("peername"))
        self.shared.add(self, self.peer)

    def pause_writing(self) -> None:
        """See asyncio."""
        self._writable = asyncio.Event()
        self.throttle()

    def resume_writing(self) -> None:
        """See asyncio."""
        if self._writable is not None:
            self._writable.set()
            self._writable = None
            self.go_on()

    async def drained(self) -> None:
        """Return when something can be written, or the client is gone."""
        while self._writable is not None:
            await self._writable.wait()

    def throttle(self) -> None:
        """Read, or read no more, as what is here demands."""
        pause = bool(self._ahead) or (self._must_wait and not self._is_closing)
        if pause is self._is_paused or self.transport.is_closing():
            return
        self._is_paused = pause
        if pause:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
        self._throttled()

    def hang_up(self) -> None:
        """Close, but not before the client has had time to read what was written.

        Closing a socket with unread bytes resets it, and a reset can overtake the response: the
        client would see a broken pipe instead of a 413.
        """
        self._is_closing = True
        self.go_on()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.shared.loop.call_later(LINGER_S, self._hung_up)

    def _hung_up(self) -> None:
        self.transport.close()

    def fileno(self) -> int:
        """Return the connection's file descriptor."""
        return int(self.transport.get_extra_info("socket").fileno())

    def close_idle(self, now: float, within_s: float | None) -> None:
        """Close it if its client has left, or is late; see :meth:`Connections.close_idle`."""
        raise NotImplementedError

    def evict(self) -> None:
        """Close it, to make room for another."""
        self.transport.close()

    @property
    def waiting_since(self) -> float | None:
        """Since when its client is waited for, see :class:`Pace`; None while it is answered.

        0 for one that was refused, and is open only so that its client reads why.
        """
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._ahead += data
        if not self._is_due:
            self._take_turn()

    def go_on(self) -> None:
        """Read on, if nothing holds that up, after all other connections have had their turn."""
        if self._ahead and not self._is_due and self._may_read:
            self._is_due = True
            self.shared.loop.call_soon(self._take_turn)
        self.throttle()

    def _take_turn(self) -> None:
        self._is_due = False
        if self._ahead and self._may_read:
            try:
                self._read()
            except BaseException:
                self.transport.abort()  # as asyncio does where data_received raises
                raise
        self.go_on()

    def _read(self) -> None:
        """Read of what is here as much as others can wait for."""
        raise NotImplementedError

    @property
    def _may_read(self) -> bool:
        """Whether what is here is next; also where it is dropped."""
        raise NotImplementedError

    @property
    def _must_wait(self) -> bool:
        """Whether nothing is to be read now."""
        raise NotImplementedError

    def _throttled(self) -> None:
        """Record that reading was paused, or goes on."""


class Connections:
    """The connections of a worker; each adds and removes itself."""

    def __init__(self, app: App, options: HTTPOptions, most: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.app = app
        self.options = options
        self.proxies = TrustedProxies(options.trusted_proxies)
        self.all: dict[ClientConnection, str | None] = {}  # with their clients' addresses
        self.tasks: set[asyncio.Task[None]] = set()
        self.waiting_bytes = 0  # of bodies of unanswered requests, and of WebSockets' messages
        self.default_head = b""
        self.root_path = options.root_path.rstrip("/")
        self.most = most
        most_each = options.max_connections_per_client or max(1, most // SHARE)
        self._clients = ClientCounts(most_each, self.proxies)
        self._warned_at: dict[str, float] = {}
        self.set_date()

    def add(self, connection: ClientConnection, peer: tuple[str, int] | None) -> None:
        """Count a connection, once."""
        if connection not in self.all:
            host = self.all[connection] = None if peer is None else peer[0]
            self._clients.add(host)

    def remove(self, connection: ClientConnection) -> None:
        """Count a connection no more."""
        if connection in self.all:
            self._clients.remove(self.all.pop(connection))

    def run(self, running: Any) -> asyncio.Task[None]:
        """Run what answers a request, in a task."""
        task: asyncio.Task[None] = self.loop.create_task(running)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def set_date(self) -> None:
        """Set the Date of responses; to be called every second."""
        self.default_head = b"date: %s\r\n" % formatdate(usegmt=True).encode()

    def close_idle(self, now: float, within_s: float | None = None) -> None:
        """Close connections that wait too long.

        A connection is cut whose client has left. It is closed when its first headers do not come
        within ``header_timeout_s``, those of its next request within ``keep_alive_timeout_s``, or
        either within ``within_s``; and when its headers have been coming for ``header_timeout_s``.
        """
        for connection in [each for each in self.all if each.opening is None]:
            try:
                connection.close_idle(now, within_s)
            except Exception:  # the others are checked all the same
                _logger.exception("a connection that waits could not be closed")

    def lacks_room(self, size: int = 0) -> bool:
        """Return whether bodies that wait, with ``size`` bytes more, are over their budget."""
        most = self.options.max_waiting_body_bytes
        if self.waiting_bytes + size <= most:
            return False
        self.warn(f"{NO_ROOM}: over {most} bytes (max_waiting_body_bytes); it is answered 503")
        return True

    def warn(self, text: str) -> None:
        """Log what goes on for as long as it does, at most once every LOG_EVERY_S seconds."""
        kind = text.partition(":")[0]
        now = self.loop.time()
        if now - self._warned_at.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._warned_at[kind] = now
            _logger.warning("%s", text)

    def has_room(self, peer: tuple[str, int] | None = None, *, for_pages: bool = False) -> bool:
        """Return whether one more may be accepted, perhaps because others were closed for it."""
        host = None if peer is None else peer[0]
        if not for_pages and not self._clients.has_room_for(host):
            self.warn(
                f"an address has {self._clients.most_each} connections to this worker, its most: "
                f"more of {host} are refused (max_connections_per_client, unless it is a trusted "
                "proxy)"
            )
            return False
        if len(self.all) < self.most + PAGES_ROOM * for_pages:
            return True
        self.warn(
            f"this worker has {self.most} connections, its most: those that have waited longest "
            "for a request are closed; more open files (ulimit -Hn) or more workers allow more"
        )
        return self._close_waiting() or self._cancel_handshakes()

    def _close_waiting(self) -> bool:
        """Close those that have waited longest; one whose bytes are here unread does not wait."""
        are_open = [each for each in self.all if each.opening is None]
        waiting = [(since, each) for each in are_open if (since := each.waiting_since) is not None]
        longest = nsmallest(EVICTED, waiting, key=lambda pair: pair[0])
        idle = [each for since, each in longest if not since or not has_unread(each.fileno())]
        for each in idle:
            each.evict()
        return bool(idle)

    def _cancel_handshakes(self) -> bool:
        is_tls = self.options.ssl_certfile is not None  # else none waits for its client
        opening = (each.opening for each in self.all if is_tls and each.opening is not None)
        oldest = list(islice(opening, EVICTED))
        for each in oldest:
            each.cancel()
        return bool(oldest)

    def open(
        self,
        connection: ClientConnection,
        connecting: Awaitable[Any],
        peer: tuple[str, int] | None = None,
    ) -> None:
        """Open an accepted connection, for which TLS may need a handshake."""
        self.add(connection, peer)
        connection.opening = asyncio.ensure_future(connecting)
        connection.opening.add_done_callback(partial(self._opened, connection))

    def _opened(self, connection: ClientConnection, opening: asyncio.Future[Any]) -> None:
        connection.opening = None
        error = None if opening.cancelled() else opening.exception()
        if opening.cancelled() or error is not None:
            self.remove(connection)
        if error is not None and not isinstance(error, OSError):  # a bad handshake is one
            _logger.error("a connection could not be opened", exc_info=error)


class Listener:
    """Accepts connections of one listening socket; the socket is its owner's to close.

    They are accepted one at a time, so that workers share a burst.
    """

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        make: Callable[[], ClientConnection],
        tls: ssl.SSLContext | None = None,
        *,
        for_pages: bool = False,
    ) -> None:
        self._socket = listening
        self._for_pages = for_pages
        self._connections = connections
        self._make = make
        self._tls: dict[str, Any] = {}
        if tls is not None:
            limit_s = connections.options.header_timeout_s
            self._tls = {"ssl": tls, "ssl_handshake_timeout": limit_s}
        self._send_timeout_ms = int(min(1000 * connections.options.send_timeout_s, MOST_MS)) or 1
        self._loop = connections.loop
        self._is_closed = False

    def open(self) -> None:
        """Accept from now on."""
        if not self._is_closed:
            self._socket.setblocking(False)
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more; what has been accepted goes on."""
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())

    def accept_waiting(self) -> None:
        """Accept what waits in the socket's queue: who closes it last would reset that."""
        for _ in range(self._connections.most):
            if not self._accept():
                break

    def _accept(self) -> bool:
        """Accept one; return whether there was any."""
        connections = self._connections
        try:
            accepted, name = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:  # no descriptors, no memory, no network
            connections.warn(f"no connection can be accepted: {error.strerror}")
            self._loop.remove_reader(self._socket.fileno())
            self._loop.call_later(ACCEPT_AGAIN_S, self.open)
            return False
        accepted.setblocking(False)
        with contextlib.suppress(OSError):  # a Unix socket knows no such limit
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._send_timeout_ms)
        peer = peer_of(name)
        if connections.has_room(peer, for_pages=self._for_pages):
            made = self._make()
            opening = self._loop.connect_accepted_socket(lambda: made, accepted, **self._tls)
            connections.open(made, opening, peer)
            return True
        with contextlib.suppress(OSError):
            accepted.send(UNAVAILABLE)
        accepted.close()
        return True


def has_left(fd: int) -> bool:
    """Return whether the other end has closed, also where its end lies behind unread bytes."""
    return _has_news(fd, select.POLLRDHUP)


def has_unread(fd: int) -> bool:
    """Return whether there is something to be read, be it the other end's close."""
    return _has_news(fd, select.POLLIN)


def _has_news(fd: int, what: int) -> bool:
    news = select.poll()
    news.register(fd, what)  # POLLHUP and POLLERR are always reported
    return bool(news.poll(0))


class Pace:
    """How far a client lags behind MIN_RATE bytes a second while it is waited for.

    What it sends faster gains it no time for later.
    """

    __slots__ = ("_behind_s", "_waiting_at")

    def __init__(self) -> None:
        self._behind_s = 0.0
        self._waiting_at: float | None = None

    def wait(self, now: float) -> None:
        """Begin to wait for the client, if that has not begun."""
        if self._waiting_at is None:
            self._waiting_at = now

    def stop(self, now: float) -> None:
        """Wait no more, because it is our turn."""
        if self._waiting_at is not None:
            self._behind_s += now - self._waiting_at
            self._waiting_at = None

    def took(self, size: int, now: float) -> None:
        """Count bytes that have come."""
        is_waiting = self._waiting_at is not None
        self.stop(now)
        self._behind_s = max(0.0, self._behind_s - size / MIN_RATE)
        if is_waiting:
            self.wait(now)

    @property
    def since(self) -> float | None:
        """Since when the client owes what has not come; None while it is not waited for."""
        return None if self._waiting_at is None else self._waiting_at - self._behind_s
