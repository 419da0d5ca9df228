"""Who leaves while nothing is read from him.

A connection of which nothing is read, because user code does not take what has come of a body, does
not tell its end: that lies behind the bytes which are not read. The kernel knows of it. So these
connections are put into an epoll set that waits for nothing else, and the set into the event loop,
which sees it as one more descriptor: no timer looks after them, and one that nobody leaves is free.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

GONE = select.EPOLLRDHUP  # and EPOLLHUP and EPOLLERR, which are always told of


class Departures:
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
