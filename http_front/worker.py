"""A gunicorn worker that speaks HTTP by :mod:`.protocol`, on gunicorn's public ``Worker``.

- SIGTERM drains: the listening sockets stay open while requests are in flight, so that health
  checks hear 503 rather than nothing; connections without a request are closed. With nothing in
  flight the worker is gone within 0.1 s or so. SIGINT and SIGQUIT stop without draining.
- A worker whose master has died serves on, where a host process has the port, until that one has
  another master whose workers are ready, and says so by SIGTERM: then it hands over to them.
- Connections are accepted one at a time, so that workers share a burst.
- There are no more of them than descriptors allow. When there are as many, those that have waited
  longest for a request make room; TLS handshakes count, and have a time limit.

The loop is uvloop's where that is installed: 1.10 and 1.13 times the requests/s at 64 and 16
connections, for 0.94 and 0.85 of the worker's CPU time (docs/transport.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from gunicorn.workers.base import Worker

from greenroom.actors.host.http_port import bind_pages
from greenroom.actors.runtime.processes import MOST, raise_limit
from greenroom.http_front.front import Front
from greenroom.http_front.protocol import Connections
from greenroom.http_front.server import FD_VARIABLE

_new_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    import uvloop
except ImportError:
    _new_loop = asyncio.SelectorEventLoop
else:
    _new_loop = uvloop.new_event_loop

_logger = logging.getLogger(__name__)

TICK_S = 1.0
DRAIN_POLL_S = 0.05
DRAIN_MARGIN_S = 1.0  # before the master's SIGKILL, to stop the link and flush the log
HAND_OVER_S = 2.0  # what is idle for so long after the master's death is closed
FRESH_S = 0.3  # while draining, how long a new connection may take to send its request
CLEAN_UP_S = 1.0
ACCEPT_AGAIN_S = 1.0
EVICTED = 16  # TLS handshakes that are given up at once to make room
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)


def most_connections(limit: int) -> int:
    """Return how many connections a worker takes that may have so many files open."""
    files = MOST if limit < 0 else min(limit, MOST)  # the system's "no limit" is below 0
    return max(1, files - max(64, files // 8))


def new_loop() -> asyncio.AbstractEventLoop:
    """Make the event loop of a worker."""
    return _new_loop()


class Listener:
    """Accepts connections of one listening socket; the socket is its owner's to close."""

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        most: int,
        tls: ssl.SSLContext | None = None,
        *,
        for_pages: bool = False,
    ) -> None:
        self._socket = listening
        self._make = partial(connections.make, for_pages=True) if for_pages else connections.make
        self._connections = connections
        self._most = most
        self._tls = tls
        self._handshake_s = (
            {} if tls is None else {"ssl_handshake_timeout": connections.header_timeout_s}
        )
        self._loop = connections.loop
        self._opening: dict[asyncio.Task[Any], None] = {}  # the oldest first
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

    def _accept(self) -> None:
        """Accept one: the other workers get their share of a burst."""
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors, no memory, no network
            self._connections.warn(f"no connection can be accepted: {error.strerror}")
            self._loop.remove_reader(self._socket.fileno())
            self._loop.call_later(ACCEPT_AGAIN_S, self.open)
            return
        accepted.setblocking(False)
        if len(self._connections.connections) + len(self._opening) >= self._most:
            self._connections.warn(
                f"this worker has {self._most} connections, its most: those that have waited "
                "longest for a request are closed; more open files (ulimit -Hn) or more workers "
                "allow more"
            )
            if not self._make_room():
                with contextlib.suppress(OSError):
                    accepted.send(_FULL)
                accepted.close()
                return
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(
                self._make, accepted, ssl=self._tls, **self._handshake_s
            )
        )
        self._opening[opening] = None
        opening.add_done_callback(self._opened)

    def _make_room(self) -> bool:
        if self._connections.make_room():
            return True
        oldest = list(islice(self._opening, EVICTED)) if self._tls is not None else []
        for opening in oldest:
            opening.cancel()
        return bool(oldest)

    def _opened(self, opening: asyncio.Task[Any]) -> None:
        del self._opening[opening]
        if opening.cancelled():
            return
        error = opening.exception()
        if error is not None and not isinstance(error, OSError):  # a bad handshake is one
            _logger.error("a connection could not be opened", exc_info=error)


class FrontWorker(Worker):  # type: ignore[misc]  # gunicorn ships no types
    """The worker process; its app is a :class:`Front`."""

    alive: bool

    def init_process(self) -> None:
        """Begin; returns when the worker ends."""
        self._most = most_connections(raise_limit())
        self._is_quick = False
        self._told = asyncio.Event()  # to stop
        self._pages_socket: socket.socket | None = None
        self._loop = new_loop()
        asyncio.set_event_loop(self._loop)
        super().init_process()

    @property
    def _front(self) -> Front:
        front: Front = self.wsgi
        return front

    def init_signals(self) -> None:
        """Handle signals between two steps of the loop."""
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for number, handler in (
            (signal.SIGTERM, self._drain_and_stop),
            (signal.SIGINT, self._stop_now),
            (signal.SIGQUIT, self._stop_now),
            (signal.SIGABRT, self._abort),
            (signal.SIGUSR1, self.log.reopen_files),
            (signal.SIGWINCH, lambda: None),  # a terminal's, not for us
        ):
            self._loop.add_signal_handler(number, handler)

    def _drain_and_stop(self) -> None:
        self.alive = False
        self._told.set()

    def _stop_now(self) -> None:
        self._is_quick = True
        self._drain_and_stop()

    def _abort(self) -> None:
        self.alive = False
        sys.exit(1)

    def run(self) -> None:
        """Serve until a signal ends it."""
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._clean_up()

    async def _serve(self) -> None:
        front = self._front
        connections = self._connections = Connections(
            front,
            front.begin,
            keep_alive_s=self.cfg.keepalive,
            header_timeout_s=front.header_timeout_s,
            send_timeout_s=front.send_timeout_s,
            opening_timeout_s=front.opening_timeout_s,
            max_message_bytes=front.max_message_bytes,
            max_waiting_bytes=front.max_waiting_bytes,
            trusted=self.cfg.forwarded_allow_ips,
        )
        connections.tell_time()
        await front.start()
        tls = self._tls_context()
        self._listeners = [
            Listener(each.sock, connections, self._most, tls) for each in self.sockets
        ]
        for listener in self._listeners:
            listener.open()
        self._open_pages(tls)
        ticking = asyncio.create_task(self._tick())
        try:
            await self._until_told()
            await self._shut_down()
        finally:
            ticking.cancel()
            connections.departures.close()

    def _open_pages(self, tls: ssl.SSLContext | None) -> None:
        """Listen where our own pages are alone, now or later: all else does not wait for it."""
        if self._front.pages_address is None or not self.alive:
            return
        try:
            listening = bind_pages(*self._front.pages_address)
        except OSError as error:
            host, port = self._front.pages_address
            self._connections.warn(
                f"the pages under /-/ cannot be served: port {port} on {host} cannot be had: "
                f"{error.strerror}"
            )
            self._loop.call_later(ACCEPT_AGAIN_S, self._open_pages, tls)
            return
        self._pages_socket = listening
        listener = Listener(listening, self._connections, self._most, tls, for_pages=True)
        self._listeners.append(listener)
        listener.open()

    def _tls_context(self) -> ssl.SSLContext | None:
        if not self.cfg.certfile:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.cfg.certfile, self.cfg.keyfile)
        return context

    async def _until_told(self) -> None:
        """Return when it is time to stop; tells the master meanwhile that the worker lives."""
        outlives_master = FD_VARIABLE in os.environ
        while self.alive and (outlives_master or self.ppid == os.getppid()):
            self.notify()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._told.wait(), TICK_S)

    async def _tick(self) -> None:
        timeout_s = self._connections.header_timeout_s
        while True:
            await asyncio.sleep(min(TICK_S, timeout_s / 4))
            self._connections.tell_time()
            self._close_waiting(served_too=False, fresh_s=timeout_s)

    def _close_waiting(self, *, served_too: bool, fresh_s: float) -> None:
        self._connections.give_up(self._loop.time(), served_too=served_too, fresh_s=fresh_s)

    async def _shut_down(self) -> None:
        """Finish what is in flight, then stop."""
        front = self._front
        if self.ppid != os.getppid():
            await self._hand_over()
        else:
            front.draining = front.leaving = True
        front.close_sockets()
        deadline = self._loop.time() + max(0.0, self.cfg.graceful_timeout - DRAIN_MARGIN_S)
        while self._is_busy() and self._loop.time() < deadline and not self._is_quick:
            await self._drain_on()
        for listener in self._listeners:
            listener.close()
        while self._connections.connections and self._loop.time() < deadline and not self._is_quick:
            await self._drain_on()
        if not self._is_quick:
            await front.stop()

    def _is_busy(self) -> bool:
        return self._front.in_flight > 0 or self._connections.has_sockets()

    async def _drain_on(self) -> None:
        self.notify()
        self._close_waiting(served_too=True, fresh_s=FRESH_S)
        await asyncio.sleep(DRAIN_POLL_S)

    async def _hand_over(self) -> None:
        """Leave new connections to the next master's workers, and serve those that are here.

        Each one's next answer asks the client to close it; those that stay idle are closed.
        """
        self._front.leaving = True
        for listener in self._listeners:
            listener.close()
        deadline = self._loop.time() + HAND_OVER_S
        while self._connections.connections and self._loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)

    def _clean_up(self) -> None:
        with contextlib.suppress(AttributeError):  # stopped before the app was loaded
            self._front.access_log.close()  # once more: SIGINT and SIGQUIT skip Front.stop()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=CLEAN_UP_S))
        self._loop.close()
        for each in self.sockets:
            each.close()
        if self._pages_socket is not None:
            self._pages_socket.close()
