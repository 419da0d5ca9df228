"""The one TCP port of a host: reads who is wanted, and hands the connection over to that process.

See routes.py for what is said here. The gate lives in the admin, whose address has the port's
number. It does not relay: the descriptor itself goes to the wanted process, over a Unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.actors.transport.admission import Admission
from greenroom.actors.transport.identity import RefusedError
from greenroom.actors.transport.key_files import Keys
from greenroom.actors.transport.listener import Listener
from greenroom.actors.transport.routes import ROUTE_SIZE, read_route, write_routed
from greenroom.actors.transport.sockets import (
    credentials_of,
    local_socket,
    prepare_tcp,
    tcp_listener,
)
from greenroom.actors.transport.strangers import Allowance

ACCEPTS_PER_PASS = 32
# Half a processor at most, whoever comes: one that is accepted and turned away costs some 100 us.
# But a burst is not made to wait, for somebody honest may be the last in it: to rest for 5 ms after
# each pass had him wait for three times as long as the work takes.
ACCEPTS_AT_ONCE, ACCEPTS_PER_S = 512, 4_000.0


class Gate:
    """Listens at its process's own host and port; ``take`` gets the connections for that one."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own: ProcessAddress,
        keys: Keys,
        admission: Admission,
        take: Callable[[socket.socket, bytes], None],
        listener: socket.socket | None = None,
    ) -> None:
        self.loop = loop
        self.keys = keys
        self.admission = admission
        self._own = own
        self._take = take
        self._callers: set[Caller] = set()
        self._listener = Listener(
            loop,
            listener or tcp_listener(own.host, own.port),
            self._accept,
            per_pass=ACCEPTS_PER_PASS,
            allowance=Allowance(ACCEPTS_AT_ONCE, ACCEPTS_PER_S),
        )

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets."""
        return [self._listener.fileno(), *(caller.fileno() for caller in self._callers)]

    def close(self) -> None:
        """Listen no more, and drop everyone who has not been handed over."""
        self._listener.close()
        for caller in list(self._callers):
            caller.close()

    def _accept(self, sock: socket.socket, name: object) -> bool:
        try:
            prepare_tcp(sock)
        except OSError:  # gone already
            sock.close()
            return True
        assert isinstance(name, tuple), name
        caller = Caller(self, sock, f"{name[0]}:{name[1]}")
        self._callers.add(caller)
        self.admission.came(caller, caller.source)
        return True

    def left(self, caller: Caller) -> None:
        """Forget a caller, who is gone or handed over."""
        self._callers.discard(caller)
        self.admission.left(caller)

    def hand_over(self, sock: socket.socket, route: bytes, number: int, key: bytes) -> None:
        """Answer a right ROUTE by its key; give the connection to the process of that number.

        OSError when that process exists and cannot take it now, or the caller is gone.
        """
        target = ProcessAddress(self._own.host, number)
        if target == self._own:
            sock.send(write_routed(route, key, found=True))
            self._take(sock.dup(), route)
            return
        with local_socket(socket.SOCK_SEQPACKET) as door:
            try:
                door.connect(target.door_name)
                found = credentials_of(door).is_ours
            except ConnectionRefusedError:
                found = False
            sock.send(write_routed(route, key, found=found))
            if found:
                socket.send_fds(door, [route], [sock.fileno()])


class Caller:
    """A connection to the gate, until it has said whom it wants."""

    def __init__(self, gate: Gate, sock: socket.socket, source: str) -> None:
        self.source = source
        self._gate = gate
        self._socket = sock
        self._received = b""
        gate.loop.add_reader(sock.fileno(), self._readable)

    def fileno(self) -> int:
        """Return the socket's number."""
        return self._socket.fileno()

    def close(self) -> None:
        """Let go of the connection."""
        if self._socket.fileno() >= 0:
            self._gate.loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._gate.left(self)

    def turn_away(self, reason: str) -> None:
        """See :class:`~greenroom.actors.transport.admission.Stranger`."""
        self._gate.admission.refused(self.source, reason)
        self.close()

    def _readable(self) -> None:
        try:
            # Not one byte more: those are for the process that is wanted.
            piece = self._socket.recv(ROUTE_SIZE - len(self._received))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            piece = b""
        if not piece:
            self.turn_away(f"it ended after {len(self._received)} bytes, without a ROUTE")
            return
        self._received += piece
        try:
            wanted = read_route(self._received, self._gate.keys())
        except RefusedError as refusal:
            if refusal.farewell:
                with contextlib.suppress(OSError):
                    self._socket.send(refusal.farewell)
            self.turn_away(refusal.reason)
            return
        if wanted is not None:
            self._admit(*wanted)

    def _admit(self, number: int, key: bytes) -> None:
        try:
            self._gate.hand_over(self._socket, self._received, number, key)
        except OSError as error:
            self.turn_away(f"it could not be handed over to process {number}: {error.strerror}")
        else:
            self.close()
