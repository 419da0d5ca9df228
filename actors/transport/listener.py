"""Takes connections from a listening socket, a bounded number per pass of the loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from greenroom.actors.transport.strangers import Allowance

logger = logging.getLogger(__name__)

ACCEPTS_PER_PASS = 64
_PAUSE_S = 1.0


class Listener:
    """Calls ``on_accept(sock, name)`` for each connection, with a socket that never blocks.

    After ``per_pass`` at once it lets the loop do other things, and rests when its ``allowance`` is
    used up: this bounds the share of a processor that those who connect can take.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_accept: Callable[[socket.socket, object], None],
        *,
        per_pass: int = ACCEPTS_PER_PASS,
        allowance: Allowance | None = None,
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._on_accept = on_accept
        self._per_pass, self._allowance = per_pass, allowance
        self._resume: asyncio.TimerHandle | None = None
        loop.add_reader(sock.fileno(), self._accept)

    def fileno(self) -> int:
        """Return the socket's number; -1 when it is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Listen no more."""
        if self.fileno() >= 0:
            self._loop.remove_reader(self.fileno())
            self._socket.close()
        if self._resume is not None:
            self._resume.cancel()

    def _accept(self) -> None:
        taken = 0
        while taken < self._per_pass:
            try:
                sock, name = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:  # out of descriptors: let others end first
                logger.warning("cannot accept a connection: %s", error)
                self._rest(_PAUSE_S)
                return
            sock.setblocking(False)
            self._on_accept(sock, name)
            taken += 1
        if self._allowance is not None:
            rest_s = self._allowance.take(taken, self._loop.time())
            if rest_s:
                self._rest(rest_s)

    def _rest(self, pause_s: float) -> None:
        self._loop.remove_reader(self.fileno())
        self._resume = self._loop.call_later(pause_s, self._go_on)

    def _go_on(self) -> None:
        self._loop.add_reader(self.fileno(), self._accept)
