"""On the way to a process of another host: until the host's gate has led to it."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from collections.abc import Callable

from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.actors.transport.identity import RefusedError
from greenroom.actors.transport.routes import (
    NONCE_SIZE,
    ROUTED_SIZE,
    read_routed,
    write_route,
)

# A lost SYN is sent again after a second; together with SILENCE_S this is how long it takes until a
# host that vanished counts as dead.
DIAL_TIMEOUT_S = 1.5


class Dialing:
    """One attempt; one callback is called, once and not at once, unless it is cancelled.

    ``on_found(sock, route)`` when the process has the connection; ``on_dead(reason, is_certain)``
    when the host says that it has no such process (then without a reason), its kernel that nothing
    listens at the port, or nobody says anything in time, which may be the network's fault;
    ``on_failed(reason, is_refusal)`` otherwise.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        target: ProcessAddress,
        key: bytes,
        *,
        on_found: Callable[[socket.socket, bytes], None],
        on_dead: Callable[[str, bool], None],
        on_failed: Callable[[str, bool], None],
    ) -> None:
        self._loop = loop
        self._key = key
        self._route = write_route(target.number, key, secrets.token_bytes(NONCE_SIZE))
        self._received = b""
        self._on_found, self._on_dead, self._on_failed = on_found, on_dead, on_failed
        self._socket: socket.socket | None = sock
        failure = sock.connect_ex((target.host, target.port))
        if failure in (0, errno.EINPROGRESS):
            self._timer = loop.call_later(DIAL_TIMEOUT_S, self._timed_out)
            loop.add_writer(sock.fileno(), self._connected)
        else:
            self._timer = loop.call_later(0, self._unconnected, failure)

    def fileno(self) -> int:
        """Return the socket's number; -1 without one."""
        return -1 if self._socket is None else self._socket.fileno()

    def cancel(self) -> None:
        """Give the attempt up."""
        self._timer.cancel()
        sock = self._leave()
        if sock is not None:
            sock.close()

    def _leave(self) -> socket.socket | None:
        sock, self._socket = self._socket, None
        if sock is not None:
            self._loop.remove_writer(sock.fileno())
            self._loop.remove_reader(sock.fileno())
        return sock

    def _timed_out(self) -> None:
        self.cancel()
        self._on_dead(f"no answer within {DIAL_TIMEOUT_S:g} s", False)

    def _unconnected(self, failure: int) -> None:
        if failure == errno.ECONNREFUSED:
            self.cancel()
            self._on_dead("nothing listens at its port", True)
        else:
            self._fail(os.strerror(failure))

    def _fail(self, reason: str, *, is_refusal: bool = False) -> None:
        self.cancel()
        self._on_failed(reason, is_refusal)

    def _connected(self) -> None:
        assert self._socket is not None
        failure = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            self._unconnected(failure)
            return
        self._loop.remove_writer(self._socket.fileno())
        try:
            self._socket.send(self._route)  # a new connection has room for it
        except OSError as error:
            self._fail(str(error))
        else:
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            # Not one byte more: those are of the process behind the gate.
            piece = self._socket.recv(ROUTED_SIZE - len(self._received))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:  # such as a reset, from a host whose system is ending
            self._fail(str(error))
            return
        if not piece:
            self._fail(
                "it closed the connection; it may hold another cluster's key, or a newer one since "
                "`greenroom rotate-key`: then copy its cluster.key over this host's",
                is_refusal=True,
            )
            return
        self._received += piece
        try:
            found = read_routed(self._received, self._route, self._key)
        except RefusedError as refusal:
            self._fail(refusal.reason, is_refusal=True)
            return
        if found is not None:
            self._routed(found=found)

    def _routed(self, *, found: bool) -> None:
        self._timer.cancel()
        sock = self._leave()
        assert sock is not None
        if found:
            self._on_found(sock, self._route)
        else:
            sock.close()
            self._on_dead("", True)  # its host has no such process, which is nothing to be told of
