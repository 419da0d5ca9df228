"""Takes connections from a listening socket, a bounded number per pass of the loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from greenroom.actors.transport.admission import Admission
from greenroom.actors.transport.descriptors import Shortage
from greenroom.actors.transport.sockets import credentials_of
from greenroom.actors.transport.strangers import Allowance

logger = logging.getLogger(__name__)

ACCEPTS_PER_PASS = 64
_PAUSE_S = 1.0
# Another user's process that connects here is turned away, which takes some 20 us: so no more than
# a tenth of a processor. While there is a rest its connections fill the backlog, and nobody else's
# fit in; so the backlog is emptied at once, and what is refused meanwhile is soon tried again.
STRANGERS_AT_ONCE, STRANGERS_PER_S, STRANGERS_REST_S = 1024, 4_000.0, 0.1


class Listener:
    """Calls ``on_accept(sock, name)`` for each connection, with a socket that never blocks.

    After ``per_pass`` at once it lets the loop do other things, and rests when its ``allowance`` is
    used up, for ``rest_s`` at least: this bounds the share of a processor that those can take who
    connect. ``on_accept`` returns whether the connection counts for that.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_accept: Callable[[socket.socket, object], bool],
        *,
        per_pass: int = ACCEPTS_PER_PASS,
        allowance: Allowance,
        rest_s: float = 0.0,
        shortage: Shortage | None = None,
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._on_accept = on_accept
        self._per_pass, self._allowance, self._rest_s = per_pass, allowance, rest_s
        self._shortage = Shortage() if shortage is None else shortage
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
        counted = 0
        for _ in range(self._per_pass):
            try:
                sock, name = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:  # out of descriptors: let others end first
                logger.warning("cannot accept a connection: %s", error)
                self._shortage.failed(error, self._loop.time())
                self._rest(_PAUSE_S)
                return
            self._shortage.over()
            sock.setblocking(False)
            counted += self._on_accept(sock, name)
        rest_s = self._allowance.take(counted, self._loop.time())
        if rest_s:
            self._rest(max(rest_s, self._rest_s))

    def _rest(self, pause_s: float) -> None:
        self._loop.remove_reader(self.fileno())
        self._resume = self._loop.call_later(pause_s, self._go_on)

    def _go_on(self) -> None:
        self._loop.add_reader(self.fileno(), self._accept)


def listen_here(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    admission: Admission,
    on_accept: Callable[[socket.socket], None],
    shortage: Shortage,
) -> Listener:
    """Listen at a Unix socket; ``on_accept`` gets connections of this user's processes only."""

    def accept(sock: socket.socket, _name: object) -> bool:
        peer = credentials_of(sock)
        if peer.is_ours:
            on_accept(sock)
        else:
            sock.close()
            admission.refused_here(peer.uid, peer.pid)
        return not peer.is_ours

    allowance = Allowance(STRANGERS_AT_ONCE, STRANGERS_PER_S)
    return Listener(
        loop, sock, accept, allowance=allowance, rest_s=STRANGERS_REST_S, shortage=shortage
    )
