"""The one TCP port of a host: who is let in, and to which of the host's processes.

Theory of operation. A host has one TCP port, its admin's, and many processes. The admin is its
*gate*. A dialer and the gate shake hands by TLS (tls.py), so nothing but OpenSSL reads what a
stranger sends. Inside, the dialer says which process it wants and what for, and the gate answers
with one byte: whether there is such a process. If there is, the gate hands the connection, the
descriptor itself, over to that process through a Unix socket for that. The dialer and that
process begin a TLS session of their own on it; the gate relays nothing.

Between the gate's answer and the second handshake only the dialer sends, so the gate never holds
bytes that are for the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from greenroom.actors.transport.addresses import ProcessAddress, bound_host
from greenroom.actors.transport.admission import Admission, Listener, TokenBucket
from greenroom.actors.transport.cluster_key import KeyFiles
from greenroom.actors.transport.sockets import (
    credentials_of,
    discard,
    local_socket,
    prepare_tcp,
    tcp_listener,
)
from greenroom.actors.transport.tls import TlsStream, describe

T = TypeVar("T")

MESSAGES, BEATS = 1, 2  # what a connection is for
_WANTED = struct.Struct(">QB")  # number of the process, what for
_READ_SIZE = 1024  # more than the record of either; nothing follows it
ACCEPTS_PER_PASS = 32
# Half a processor at most, however many connect: a TLS handshake costs some 300 us. But a burst is
# taken without pauses, because an honest peer may be the last in it.
ACCEPTS_AT_ONCE, ACCEPTS_PER_S = 512, 1_500.0

# Together with SILENCE_S this is how long it takes until a host that vanished counts as dead.
DIAL_TIMEOUT_S = 1.5
# The kernel sends a lost SYN again after a second: on a bad link two of them are too few.
DIAL_AGAIN_S = 0.4
# A process that is busy may take its time, and one that stands still is ended by its host.
SECURE_TIMEOUT_S = 30.0


class Arrivals:
    """Connections from other hosts that have not shown the cluster's certificate yet."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, keys: KeyFiles, admission: Admission
    ) -> None:
        self._loop = loop
        self._keys = keys
        self._admission = admission
        self._tasks: dict[TlsStream, asyncio.Task[None]] = {}

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets."""
        return [stream.fileno() for stream in self._tasks]

    def close(self) -> None:
        """Drop all of them."""
        for stream in list(self._tasks):
            self._drop(stream)

    def take(
        self, sock: socket.socket, source: str, welcome: Callable[[TlsStream, str], Awaitable[None]]
    ) -> None:
        """Shake hands; then ``welcome(stream, source)``, within the time of a stranger.

        What raises OSError is refused.
        """
        stream = TlsStream(self._loop, sock, self._keys.tls(), accepts=True)
        self._tasks[stream] = self._loop.create_task(self._let_in(stream, source, welcome))
        self._admission.came(stream, source, lambda reason: self._turn_away(stream, source, reason))

    async def _let_in(
        self, stream: TlsStream, source: str, welcome: Callable[[TlsStream, str], Awaitable[None]]
    ) -> None:
        try:
            await stream.secure()
            await welcome(stream, source)
        except (ssl.SSLEOFError, ConnectionError) as error:  # as of a process that is ended
            self._drop(stream)
            self._admission.disconnected(source, describe(error))
        except OSError as error:
            self._turn_away(stream, source, describe(error))
        else:
            self._left(stream)

    def _turn_away(self, stream: TlsStream, source: str, reason: str) -> None:
        self._drop(stream)
        self._admission.refused(source, reason)

    def _drop(self, stream: TlsStream) -> None:
        self._left(stream).cancel()  # nothing, where it is the present task's last act
        stream.close()

    def _left(self, stream: TlsStream) -> asyncio.Task[None]:
        self._admission.left(stream)
        return self._tasks.pop(stream)


class Gate:
    """Listens at its process's own host and port; ``take(sock, purpose)`` gets what is for it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own: ProcessAddress,
        keys: KeyFiles,
        admission: Admission,
        take: Callable[[socket.socket, int], None],
        listener: socket.socket | None = None,
    ) -> None:
        self._own = own
        self._take = take
        self._arrivals = Arrivals(loop, keys, admission)
        self._listener = Listener(
            loop,
            listener or tcp_listener(bound_host(own), own.port),
            self._accept,
            per_pass=ACCEPTS_PER_PASS,
            allowance=TokenBucket(ACCEPTS_AT_ONCE, ACCEPTS_PER_S),
        )

    def descriptors(self) -> list[int]:
        """Return the numbers of all sockets."""
        return [self._listener.fileno(), *self._arrivals.descriptors()]

    def close(self) -> None:
        """Listen no more, and drop every connection that has not been handed over."""
        self._listener.close()
        self._arrivals.close()

    def _accept(self, sock: socket.socket, name: object) -> bool:
        assert isinstance(name, tuple), name
        try:
            prepare_tcp(sock)
        except OSError:  # gone already
            sock.close()
        else:
            self._arrivals.take(sock, f"{name[0]}:{name[1]}", self._ask)
        return True

    async def _ask(self, stream: TlsStream, _source: str) -> None:
        said = await stream.receive(_READ_SIZE)
        if not said:
            raise ConnectionResetError("it ended the connection")
        if len(said) != _WANTED.size:
            raise OSError(f"it said {len(said)} bytes instead of which process it wants")
        self._hand_over(stream, *_WANTED.unpack(said))
        stream.close()

    def _hand_over(self, stream: TlsStream, number: int, purpose: int) -> None:
        """Give the connection to the process of that number.

        OSError when that process exists and cannot take it now, or the dialer is gone. What the
        dialer's stream raises is passed on as it is, since its end is no refusal.
        """
        target = ProcessAddress(self._own.host, number)
        if target == self._own:
            stream.send(b"\1")
            self._take(socket.socket(fileno=os.dup(stream.fileno())), purpose)
            return
        with local_socket(socket.SOCK_SEQPACKET) as passing:
            with _handing_over_to(number):
                try:
                    passing.connect(target.fd_socket_name)
                    found = credentials_of(passing).is_ours
                except ConnectionRefusedError:
                    found = False
            stream.send(bytes([found]))
            if found:
                with _handing_over_to(number):
                    socket.send_fds(passing, [bytes([purpose])], [stream.fileno()])


@contextlib.contextmanager
def _handing_over_to(number: int) -> Iterator[None]:
    """Say of what fails here that it is this host's, not the dialer's."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"it could not be handed over to process {number}: {describe(error)}"
        ) from None


class UnreachableError(Exception):
    """A process cannot be reached.

    It is *certainly* dead when its host says that it has none of that number, for which there is no
    ``reason`` to be told, or its kernel that nothing listens at the port. When nothing answers in
    time, that may be the network's fault.
    """

    def __init__(self, reason: str, *, is_certain: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_certain = is_certain


async def connect(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    another: Callable[[], socket.socket],
    target: ProcessAddress,
) -> socket.socket:
    """Return the first socket that reaches the port: ``sock``, or ``another()`` after a while.

    The others are closed. UnreachableError; or OSError of the first that fails otherwise.
    """
    try:
        return await _within(DIAL_TIMEOUT_S, _first_to_connect(loop, sock, another, target))
    except ConnectionRefusedError:
        raise UnreachableError("nothing listens at its port", is_certain=True) from None


async def _first_to_connect(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    another: Callable[[], socket.socket],
    target: ProcessAddress,
) -> socket.socket:
    def begin(sock: socket.socket) -> None:
        task = loop.create_task(loop.sock_connect(sock, (target.host, target.port)))
        task.add_done_callback(_retrieve)
        tries[task] = sock

    tries: dict[asyncio.Task[None], socket.socket] = {}
    begin(sock)
    try:
        while True:
            done, _ = await asyncio.wait(
                tries, timeout=DIAL_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
                return tries.pop(task)
            with contextlib.suppress(OSError):  # out of descriptors: those that try go on
                begin(another())
    finally:
        for task, each in tries.items():
            task.cancel()
            discard(loop, each)


async def dial(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    target: ProcessAddress,
    purpose: int,
    keys: KeyFiles,
) -> TlsStream:
    """Reach a process behind a gate, to which ``sock`` is connected; it has then proven itself.

    UnreachableError; or OSError when what was begun has failed, also by a refusal.
    """
    try:
        answer = await _within(DIAL_TIMEOUT_S, _ask(loop, sock, target, purpose, keys))
    except UnreachableError as error:  # but it has a host: not on a link that loses much
        raise TimeoutError(error.reason) from None
    if answer == b"\0":
        raise UnreachableError("", is_certain=True)
    if answer != b"\1":
        raise ConnectionResetError("it closed the connection")
    stream = TlsStream(loop, sock, keys.tls(), accepts=False)
    await _within(SECURE_TIMEOUT_S, stream.secure())
    return stream


async def _within(limit_s: float, step: Coroutine[Any, Any, T]) -> T:
    """Return what a step of dialing returns; UnreachableError where it takes too long."""
    doing = asyncio.ensure_future(step)
    doing.add_done_callback(_retrieve)
    try:  # not by wait_for, which before Python 3.12 may take no notice of being canceled
        await asyncio.wait({doing}, timeout=limit_s)
    finally:
        doing.cancel()
    if not doing.done():
        raise UnreachableError(f"no answer within {limit_s:g} s", is_certain=False)
    return doing.result()


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Look at what it raised, which asyncio would log otherwise."""
    if not task.cancelled():
        task.exception()


async def _ask(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    target: ProcessAddress,
    purpose: int,
    keys: KeyFiles,
) -> bytes:
    """Return what the gate answers; b"" when it ends the connection instead."""
    stream = TlsStream(loop, sock, keys.tls(), accepts=False)
    await stream.secure()
    stream.send(_WANTED.pack(target.number, purpose))  # a new connection has room for it
    return await stream.receive(_READ_SIZE)
