"""The one TCP port of a host: who is let in, and to which of the host's processes.

Theory of operation. A host has one TCP port, its admin's, and many processes. The admin is its
*gate*. A dialer and the gate shake hands by TLS (tls.py), so that nothing of a stranger is read but
by OpenSSL. Inside, the dialer sends the number of the process that it wants, 8 bytes, and the gate
answers one byte: whether there is such a process. If there is, the gate hands the connection, the
descriptor itself, over to that process through its *door*, a Unix socket. The dialer and that
process begin a TLS session of their own on it; the gate relays nothing.

Neither end sends a byte between the gate's answer and the second handshake but the dialer, so the
gate never holds bytes that are for the process.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable

from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.actors.transport.admission import Admission, Listener, TokenBucket
from greenroom.actors.transport.cluster_key import KeyFiles
from greenroom.actors.transport.sockets import (
    credentials_of,
    local_socket,
    prepare_tcp,
    tcp_listener,
)
from greenroom.actors.transport.tls import Securing, TlsStream, describe, is_refusal

_NUMBER = struct.Struct(">Q")
_ANSWER_SIZE = 1024  # more than its record; nothing follows it
ACCEPTS_PER_PASS = 32
# Half a processor at most, whoever comes: a TLS handshake costs some 300 us. But a burst is not
# made to wait, for an honest peer may be the last in it.
ACCEPTS_AT_ONCE, ACCEPTS_PER_S = 512, 1_500.0


class Gate:
    """Listens at its process's own host and port; ``take`` gets the connections for that one."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own: ProcessAddress,
        keys: KeyFiles,
        admission: Admission,
        take: Callable[[socket.socket], None],
        listener: socket.socket | None = None,
    ) -> None:
        self._loop = loop
        self._keys = keys
        self._admission = admission
        self._own = own
        self._take = take
        self._callers: dict[Securing | TlsStream, str] = {}  # with their addresses
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
            if isinstance(caller, Securing):
                caller.cancel()
            else:
                self._leave(caller)
                caller.close()

    def _accept(self, sock: socket.socket, name: object) -> bool:
        try:
            prepare_tcp(sock)
        except OSError:  # gone already
            sock.close()
            return True
        assert isinstance(name, tuple), name
        source = f"{name[0]}:{name[1]}"
        stream = TlsStream(sock, self._keys.tls(), accepts=True)

        def leave() -> None:
            del self._callers[securing]
            self._admission.left(securing)

        def secured() -> None:
            leave()
            self._callers[stream] = source
            self._admission.came(stream, source, lambda reason: self._turn_away(stream, reason))
            self._loop.add_reader(stream.fileno(), self._readable, stream)
            self._readable(stream)  # the number may have come with the end of the handshake

        def failed(reason: str, _is_refusal: bool) -> None:
            leave()
            self._admission.refused(source, reason)

        securing = Securing(self._loop, stream, on_secured=secured, on_failed=failed)
        self._callers[securing] = source
        self._admission.came(securing, source, securing.turn_away)
        return True

    def _leave(self, stream: TlsStream) -> str:
        self._loop.remove_reader(stream.fileno())
        self._admission.left(stream)
        return self._callers.pop(stream)

    def _turn_away(self, stream: TlsStream, reason: str) -> None:
        self._admission.refused(self._leave(stream), reason)
        stream.close()

    def _readable(self, stream: TlsStream) -> None:
        if stream not in self._callers:
            return
        try:
            wanted = stream.recv(_ANSWER_SIZE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._turn_away(stream, describe(error))
            return
        if len(wanted) != _NUMBER.size:
            self._turn_away(stream, f"it said {len(wanted)} bytes instead of a process's number")
            return
        (number,) = _NUMBER.unpack(wanted)
        try:
            self._hand_over(stream, number)
        except OSError as error:
            reason = f"it could not be handed over to process {number}: {error.strerror}"
            self._turn_away(stream, reason)
        else:
            self._leave(stream)
            stream.close()

    def _hand_over(self, stream: TlsStream, number: int) -> None:
        """Give the connection to the process of that number.

        OSError when that process exists and cannot take it now, or the caller is gone.
        """
        target = ProcessAddress(self._own.host, number)
        if target == self._own:
            stream.send(b"\1")
            self._take(stream.detach().dup())
            return
        with local_socket(socket.SOCK_SEQPACKET) as door:
            try:
                door.connect(target.door_name)
                found = credentials_of(door).is_ours
            except ConnectionRefusedError:
                found = False
            stream.send(bytes([found]))
            if found:
                socket.send_fds(door, [b"\0"], [stream.fileno()])


# A lost SYN is sent again after a second; together with SILENCE_S this is how long it takes until a
# host that vanished counts as dead.
DIAL_TIMEOUT_S = 1.5


class Dialing:
    """One attempt to reach a process; one callback is called, once and not at once.

    ``on_secured(stream)`` when the process has the connection, and has proven itself, at last; a
    process that is busy may take its time. ``on_dead(reason, is_certain)`` when the host says that
    it has no such process (then without a reason), its kernel that nothing listens at the port, or
    nothing answers in time, which may be the network's fault. ``on_failed(reason, is_refusal)``
    otherwise.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        target: ProcessAddress,
        keys: KeyFiles,
        *,
        on_secured: Callable[[TlsStream], None],
        on_dead: Callable[[str, bool], None],
        on_failed: Callable[[str, bool], None],
    ) -> None:
        self._loop = loop
        self._keys = keys
        self._number = target.number
        self._on_secured, self._on_dead, self._on_failed = on_secured, on_dead, on_failed
        self._socket: socket.socket | None = sock
        self._securing: Securing | None = None
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
        if self._securing is not None:
            self._securing.cancel()
        if self._socket is not None and self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket.fileno())
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        self._socket = None

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
        self._secure(self._at_gate)

    def _secure(self, on_secured: Callable[[TlsStream], None]) -> None:
        assert self._socket is not None
        stream = TlsStream(self._socket, self._keys.tls(), accepts=False)
        self._securing = Securing(
            self._loop,
            stream,
            on_secured=lambda: on_secured(stream),
            on_failed=lambda reason, is_refusal: self._fail(reason, is_refusal=is_refusal),
        )

    def _at_gate(self, stream: TlsStream) -> None:
        self._securing = None
        try:
            stream.send(_NUMBER.pack(self._number))  # a new connection has room for it
        except OSError as error:
            self._fail(describe(error))
            return
        self._loop.add_reader(stream.fileno(), self._answered, stream)
        self._answered(stream)

    def _answered(self, stream: TlsStream) -> None:
        try:
            answer = stream.recv(_ANSWER_SIZE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:  # such as an alert: the gate does not take this certificate
            self._fail(describe(error), is_refusal=is_refusal(error))
            return
        self._loop.remove_reader(stream.fileno())
        if answer == b"\1":
            self._timer.cancel()
            self._secure(self._reached)
        elif answer == b"\0":
            self.cancel()
            self._on_dead("", True)  # there is no such process, which is nothing to be told of
        else:
            self._fail("it closed the connection")

    def _reached(self, stream: TlsStream) -> None:
        self._socket = None
        self._on_secured(stream)
