"""A gunicorn worker that speaks HTTP by :mod:`.protocol`, on gunicorn's public ``Worker``.

- SIGTERM drains: the listening sockets stay open while requests are in flight, so that health
  checks hear 503 rather than nothing; connections without a request for FRESH_S are closed. With
  nothing in flight and no connection in use the worker is gone within 0.1 s or so, else FRESH_S
  later. SIGINT and SIGQUIT stop without draining.
- A worker whose master has died serves on, where a host process has the port, until that one has
  another master whose workers are ready, and says so by SIGTERM: then it hands over to them.
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
from typing import Any

from gunicorn.sock import ssl_context
from gunicorn.workers.base import Worker

from greenroom.actors.runtime import draining
from greenroom.actors.runtime.loop import new_event_loop
from greenroom.actors.runtime.processes import MOST, raise_limit
from greenroom.actors.transport.sockets import tcp_listener
from greenroom.http_front.app import Front
from greenroom.http_front.connections import Connections, Listener
from greenroom.http_front.protocol import FrontProtocol
from greenroom.http_front.server import FD_VARIABLE

_logger = logging.getLogger(__name__)

TICK_S = 1.0
DRAIN_POLL_S = 0.05
HAND_OVER_S = 2.0  # what is idle for so long after the master's death is closed
# While draining, how long a connection may take to send its request, a new one or one that was
# served: what is closed with a request on its way is reset, and a POST not repeated.
FRESH_S = 0.3
CLEAN_UP_S = 1.0
BIND_AGAIN_S = 1.0


def most_connections(limit: int) -> int:
    """Return how many connections a worker takes that may have so many files open."""
    files = MOST if limit < 0 else min(limit, MOST)  # the system's "no limit" is below 0
    return max(1, files - max(64, files // 8))


class FrontWorker(Worker):  # type: ignore[misc]  # gunicorn ships no types
    """The worker process; its app is a :class:`.app.Front`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_quick = False  # nothing is waited for at the end
        self._listeners: list[Listener] = []
        self._pages_socket: socket.socket | None = None
        # These are made after the fork, in the order of gunicorn's calls.
        self.loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        self._handlers: dict[int, Callable[[], None]]
        self._connections: Connections

    def init_process(self) -> None:
        """Begin; returns when the worker ends."""
        self.loop = new_event_loop()
        self._stopping = asyncio.Event()
        asyncio.set_event_loop(self.loop)
        super().init_process()

    @property
    def _front(self) -> Front:
        front: Front = self.wsgi
        return front

    def init_signals(self) -> None:
        """Handle signals: at once until the loop runs, as uvloop forgets what came before."""
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        self._handlers = {
            signal.SIGTERM: self._drain_and_stop,
            signal.SIGINT: self._stop_now,
            signal.SIGQUIT: self._stop_now,
            signal.SIGABRT: self._abort,
            signal.SIGUSR1: self.log.reopen_files,
            signal.SIGWINCH: lambda: None,  # a terminal's, not for us
        }
        for number in self._handlers:
            signal.signal(number, lambda number, _frame: self._handlers[number]())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)  # see FrontArbiter

    def _drain_and_stop(self) -> None:
        self.alive = False
        self._stopping.set()

    def _stop_now(self) -> None:
        self._is_quick = True
        self._drain_and_stop()

    def _abort(self) -> None:
        self.alive = False
        sys.exit(1)

    def run(self) -> None:
        """Serve until a signal ends it."""
        try:
            self.loop.run_until_complete(self._serve())
        finally:
            self._clean_up()

    async def _serve(self) -> None:
        for number, handler in self._handlers.items():  # from now on between two steps of it
            self.loop.add_signal_handler(number, handler)
        front = self._front
        most = most_connections(raise_limit())
        connections = self._connections = Connections(front, front.options, most)
        await front.start()
        tls = ssl_context(self.cfg) if self.cfg.is_ssl else None
        make = partial(FrontProtocol, connections, front.begin)
        self._listeners = [Listener(each.sock, connections, make, tls) for each in self.sockets]
        for listener in self._listeners:
            listener.open()
        self._open_pages(tls)
        ticking = asyncio.create_task(self._tick())
        try:
            await self._until_stopping()
            await self._shut_down()
        finally:
            ticking.cancel()

    def _open_pages(self, tls: ssl.SSLContext | None) -> None:
        """Listen where our own pages are alone, now or later: all else does not wait for it."""
        address = self._front.options.pages_address
        if address is None or not self.alive:
            return
        try:
            # Shared with the workers of a dead master, which are still there for a while.
            listening = tcp_listener(*address, shares=True)
        except OSError as error:
            self._connections.warn(
                f"the pages under /-/ cannot be served: port {address[1]} on {address[0]} cannot "
                f"be had: {error.strerror}"
            )
            self.loop.call_later(BIND_AGAIN_S, self._open_pages, tls)
            return
        self._pages_socket = listening
        make = partial(FrontProtocol, self._connections, for_pages=True)
        listener = Listener(listening, self._connections, make, tls, for_pages=True)
        self._listeners.append(listener)
        listener.open()

    async def _until_stopping(self) -> None:
        """Return when it is time to stop; notifies the master meanwhile that the worker lives."""
        outlives_master = FD_VARIABLE in os.environ
        while self.alive and (outlives_master or self.ppid == os.getppid()):
            self.notify()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_S)

    async def _tick(self) -> None:
        options = self._front.options
        limits_s = (options.header_timeout_s, options.body_timeout_s)
        while True:
            await asyncio.sleep(min(TICK_S, *(limit_s / 4 for limit_s in limits_s)))
            self._connections.set_date()
            self._connections.close_idle(self.loop.time())

    async def _shut_down(self) -> None:
        """Finish what is in flight, then stop."""
        front = self._front
        if self.ppid != os.getppid():
            await self._hand_over()
        else:
            front.drain()
        front.conversations.close_all()
        deadline = self.loop.time() + draining.drain_s(front.settings)
        await self._drain_while(lambda: front.requests.in_flight > 0, deadline)
        for listener in self._listeners:
            listener.accept_waiting()
            listener.close()
        await self._drain_while(lambda: bool(self._connections.all), deadline)
        if not self._is_quick:
            await front.stop()

    async def _drain_while(self, condition: Callable[[], bool], deadline: float) -> None:
        """Close what is idle until the condition is False, it is late or it is to be quick."""
        while condition() and self.loop.time() < deadline and not self._is_quick:
            self.notify()
            self._connections.close_idle(self.loop.time(), FRESH_S)
            await asyncio.sleep(DRAIN_POLL_S)

    async def _hand_over(self) -> None:
        """Leave new connections to the next master's workers, and serve those that are here.

        Each one's next response asks the client to close it; those that stay idle are closed.
        """
        self._front.leave()
        for listener in self._listeners:
            listener.close()
        deadline = self.loop.time() + HAND_OVER_S
        while self._connections.all and self.loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)

    def _clean_up(self) -> None:
        with contextlib.suppress(AttributeError):  # stopped before the app was loaded
            self._front.access_log.flush()  # once more: SIGINT and SIGQUIT skip Front.stop()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=CLEAN_UP_S))
        self.loop.close()
        for each in self.sockets:
            each.close()
        if self._pages_socket is not None:
            self._pages_socket.close()
