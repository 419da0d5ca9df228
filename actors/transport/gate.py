"""The one TCP port of a host: reads which process is wanted, and hands the connection over to it.

The gate is in the admin, whose address has the port's number. It does not relay: the descriptor
itself goes to the wanted process, over a Unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence

from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.actors.transport.admission import Admission, Listener, TokenBucket
from greenroom.actors.transport.cluster_key import Keys
from greenroom.actors.transport.frames import RefusedError
from greenroom.actors.transport.handshake import (
    BEGINNING,
    LABEL,
    ROUTE,
    ROUTED,
    beginning,
    check_beginning,
    hkdf_expand,
    hkdf_extract,
)
from greenroom.actors.transport.sockets import (
    credentials_of,
    local_socket,
    prepare_tcp,
    tcp_listener,
)

# --- The first messages on a TCP connection -------------------------------------------------------
#
# Theory of operation. A host has many processes but only one TCP port, that of its admin. The admin
# is the host's *gate*: it reads which process the dialer wants, answers, and hands the connection's
# descriptor over to that process. Nothing that follows passes through the gate.
#
#     dialer -> gate   ROUTE   magic, version, kind, number u64, nonce, MAC
#     gate -> dialer   ROUTED  magic, version, kind, found u8, MAC
#
#     MAC of ROUTE = HMAC(route key, all before it)
#     MAC of ROUTED = HMAC(routed key, ROUTE + all before it)
#
#     PRK = HKDF-Extract(salt = "", K)      key = HKDF-Expand(PRK, label)      K the cluster key
#
# Only a holder of K can write a ROUTE that the gate accepts. The gate reads at most these 83 bytes
# from a stranger, who reaches no other process. A recorded ROUTE can be replayed, but it only leads
# to the handshake (handshake.py), which has the ROUTE in its transcript and refuses replays.
#
# A ROUTED that says "not found" makes the wanted process count as dead. Only a holder of K can
# write one, and it cannot be replayed, because its MAC includes the fresh nonce of the ROUTE.

NONCE_SIZE = MAC_SIZE = 32
_NUMBER = struct.Struct(">Q")
_NONCE_AT = BEGINNING.size + _NUMBER.size
_MAC_AT = _NONCE_AT + NONCE_SIZE
ROUTE_SIZE = _MAC_AT + MAC_SIZE
ROUTED_SIZE = BEGINNING.size + 1 + MAC_SIZE
_FOUND = {b"\0": False, b"\1": True}


def write_route(number: int, key: bytes, nonce: bytes) -> bytes:
    """Return the ROUTE to the process of that number; the nonce must never have been used."""
    route = beginning(ROUTE) + _NUMBER.pack(number) + nonce
    return route + _mac(key, b"route", route)


def read_route(received: bytes | bytearray, keys: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return which number is wanted, and which of the keys made the ROUTE.

    None while bytes are missing. RefusedError when wrong.
    """
    check_beginning(received, ROUTE, answers=True)
    if len(received) < ROUTE_SIZE:
        return None
    route, mac = received[:_MAC_AT], received[_MAC_AT:ROUTE_SIZE]
    for key in keys:
        if hmac.compare_digest(_mac(key, b"route", route), mac):
            return int(_NUMBER.unpack_from(route, BEGINNING.size)[0]), key
    raise RefusedError("it does not hold this cluster's key")


def write_routed(route: bytes, key: bytes, *, found: bool) -> bytes:
    """Return the answer to ``route``."""
    routed = beginning(ROUTED) + bytes([found])
    return routed + _mac(key, b"routed", route + routed)


def read_routed(received: bytes | bytearray, route: bytes, key: bytes) -> bool | None:
    """Return whether the process was found; None while bytes are missing. RefusedError if wrong."""
    check_beginning(received, ROUTED, answers=False)
    if len(received) < ROUTED_SIZE:
        return None
    routed, mac = received[:-MAC_SIZE], received[-MAC_SIZE:]
    if not hmac.compare_digest(_mac(key, b"routed", route + routed), mac):
        raise RefusedError("it does not hold this cluster's key")
    return _FOUND[bytes(routed[-1:])]


def _mac(key: bytes, label: bytes, message: bytes | bytearray) -> bytes:
    derived = hkdf_expand(hkdf_extract(b"", key), LABEL + label)
    return hmac.digest(derived, message, "sha256")


ACCEPTS_PER_PASS = 32
# Half a processor at most: a connection that is accepted and then closed costs some 100 us. But a
# burst is taken without pauses, because an honest peer may be the last in it: with a rest of 5 ms
# after each pass, that peer waited three times as long as the work takes.
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
            allowance=TokenBucket(ACCEPTS_AT_ONCE, ACCEPTS_PER_S),
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
        self.admission.came(caller, caller.source, caller.turn_away)
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
    """A connection to the gate, until it has said which process it wants."""

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
            self.turn_away(str(refusal))
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


# --- Dialing a process of another host ------------------------------------------------------------

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
            self._fail(str(refusal), is_refusal=True)
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
