"""gunicorn's asgi worker, made to stop at once, to share connections, and to read them faster.

All that reaches into gunicorn's and asyncio's inside is in this module. It was written against
gunicorn 27.0 (``gunicorn/workers/gasgi.py``):

- The stock worker looks for SIGTERM once a second, closes its listener first, and waits for idle
  keep-alive connections until it is killed. Here SIGTERM interrupts the wait; the listener stays
  open while requests are in flight, so that health checks hear 503 rather than nothing; connections
  without a request are closed. With nothing in flight the worker is gone within 0.1 s or so.
- asyncio accepts up to ``backlog`` connections at one wake-up, so the first worker to wake gets
  nearly all of a burst. Here it accepts one, and the kernel's queue stays deep all the same.
- gunicorn never gives up on a new connection that sends no request, or half of its headers. Here
  it is closed after the HTTP options' ``header_timeout_s``.
- Connections speak HTTP by :mod:`.protocol` instead of gunicorn's own.

The loop is uvloop's where that is installed: 1.10 and 1.13 times the requests/s at 64 and 16
connections, for 0.94 and 0.85 of the worker's CPU time (docs/transport.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import Any

from gunicorn.workers.gasgi import ASGIWorker

from greenroom.http_front.front import Front
from greenroom.http_front.protocol import Connections

_Loop: Any
try:
    import uvloop
except ImportError:
    _Loop = asyncio.SelectorEventLoop
else:
    _Loop = uvloop.Loop

_logger = logging.getLogger(__name__)

TICK_S = 1.0
DRAIN_POLL_S = 0.05
DRAIN_MARGIN_S = 1.0  # before the master's SIGKILL, to stop the link and flush the log
HAND_OVER_S = 2.0  # what is idle for so long after the master's death is closed
FRESH_S = 0.3  # while draining, how long a new connection may take to send its request
BACKLOG = 2048


class DeepSocket(socket.socket):
    """A listening socket whose queue stays BACKLOG deep, whatever it is told.

    asyncio passes one number to listen() and to its loop around accept().
    """

    def listen(self, backlog: int = BACKLOG, /) -> None:
        """Listen with BACKLOG."""
        super().listen(max(backlog, BACKLOG))


class FrontLoop(_Loop):  # type: ignore[misc]  # known when it runs
    """An event loop whose servers' connections are ours, accepted one at a time with asyncio."""

    connections: Connections

    async def create_server(  # gunicorn's one way of calling it
        self, _protocol_factory: Any, *, sock: socket.socket, **options: Any
    ) -> asyncio.Server:
        """Serve on a duplicate of ``sock``; the original stays gunicorn's to close."""
        fileno = os.dup(sock.fileno())
        deep = DeepSocket(sock.family, sock.type, sock.proto, fileno=fileno)
        # uvloop calls listen() from C, and accepts as many as libuv does.
        backlog = 1 if _Loop is asyncio.SelectorEventLoop else BACKLOG
        server: asyncio.Server = await super().create_server(
            self.connections.make, sock=deep, backlog=backlog, **options
        )
        return server


class FrontWorker(ASGIWorker):  # type: ignore[misc]  # gunicorn ships no types
    """The worker process; its app is a :class:`Front`."""

    loop: FrontLoop
    asgi: Front
    alive: bool
    _serving: asyncio.Task[None] | None = None

    def _setup_event_loop(self) -> None:
        self.loop = FrontLoop()
        asyncio.set_event_loop(self.loop)

    @property
    def nr_conns(self) -> int:
        """How many connections there are, for gunicorn, which would count them."""
        return len(self.loop.connections.connections) if self.loop is not None else 0

    @nr_conns.setter
    def nr_conns(self, _count: int) -> None:
        """Be told 0 by gunicorn, at the start."""

    async def _serve(self) -> None:
        self._serving = asyncio.current_task()
        self.loop.connections = Connections(
            self.asgi,
            self.asgi.begin,
            keep_alive_s=self.cfg.keepalive,
            header_timeout_s=self.asgi.header_timeout_s,
            max_message_bytes=self.asgi.max_message_bytes,
            trusted=self.cfg.forwarded_allow_ips,
        )
        ticking = asyncio.create_task(self._tick())
        try:
            await super()._serve()
        finally:
            ticking.cancel()
            self.loop.connections.departures.close()

    def handle_exit_signal(self) -> None:
        """Begin to drain (SIGTERM), at once if it serves already."""
        serving, self.alive = self.alive, False
        self._interrupt_if(serving)

    def handle_quit_signal(self) -> None:
        """Begin to stop without draining (SIGINT, SIGQUIT)."""
        serving = self.alive
        super().handle_quit_signal()
        self._interrupt_if(serving)

    def _interrupt_if(self, serving: bool) -> None:
        if serving and self.servers and self._serving is not None:
            self._serving.cancel()  # out of its sleep; gunicorn takes it for the order to stop

    async def _tick(self) -> None:
        timeout_s = self.asgi.header_timeout_s
        while True:
            self.loop.connections.tell_time()
            await asyncio.sleep(min(TICK_S, timeout_s / 4))
            try:
                self._close_waiting(served_too=False, fresh_s=timeout_s)
            except Exception:  # of one connection: the others, and the Date, need the next look
                _logger.exception("not all idle connections were looked at")

    def _close_waiting(self, *, served_too: bool, fresh_s: float) -> None:
        now = self.loop.time()
        self.loop.connections.give_up(now, served_too=served_too, fresh_s=fresh_s)

    async def _shutdown(self) -> None:
        """Finish what is in flight, then stop as gunicorn does."""
        if self.ppid != os.getppid():
            await self._hand_over()
        else:
            self.asgi.draining = self.asgi.leaving = True
        self.asgi.close_sockets()
        closing = asyncio.create_task(self._keep_closing_waiting())
        if not self._quick_shutdown:
            await self._drain()
        await super()._shutdown()
        closing.cancel()

    async def _hand_over(self) -> None:
        """Leave new connections to the next master's workers, and serve those that are here.

        Each one's next answer asks the client to close it; those that stay idle are closed.
        """
        self.asgi.leaving = True
        for server in self.servers:
            server.close()
        deadline = self.loop.time() + HAND_OVER_S
        while self.nr_conns and self.loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)

    async def _drain(self) -> None:
        deadline = self.loop.time() + max(0.0, self.cfg.graceful_timeout - DRAIN_MARGIN_S)
        while self._is_busy() and self.loop.time() < deadline and not self._quick_shutdown:
            self.notify()
            await asyncio.sleep(DRAIN_POLL_S)

    def _is_busy(self) -> bool:
        return self.asgi.in_flight > 0 or self.loop.connections.has_sockets()

    async def _keep_closing_waiting(self) -> None:
        while True:
            self._close_waiting(served_too=True, fresh_s=FRESH_S)
            await asyncio.sleep(DRAIN_POLL_S)

    def _cleanup(self) -> None:
        with contextlib.suppress(AttributeError):  # stopped before the app was loaded
            self.asgi.access_log.close()  # once more: SIGINT and SIGQUIT skip the lifespan's end
        super()._cleanup()
