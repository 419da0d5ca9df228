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
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from greenroom.actors.transport.addresses import ProcessAddress, bound_host
from greenroom.actors.transport.admission import Admission, Listener, TokenBucket
from greenroom.actors.transport.cluster_key import KeyFiles
from greenroom.actors.transport.sockets import (
    credentials_of,
    local_socket,
    prepare_tcp,
    tcp_listener,
)
from greenroom.actors.transport.tls import TlsStream, describe

MESSAGES, BEATS = 1, 2  # what a connection is for
_WANTED = struct.Struct(">QB")  # number of the process, what for
_READ_SIZE = 1024  # more than the record of either; nothing follows it
MAX_STRANGERS = 256  # descriptors; a process may have 1024 as a rule
PATIENCE_S = 5.0  # from the connection to the proof
ACCEPTS_PER_PASS = 32
# Half a processor at most, however many connect: a TLS handshake costs some 300 us. But a burst is
# taken without pauses, because an honest peer may be the last in it.
ACCEPTS_AT_ONCE, ACCEPTS_PER_S = 512, 1_500.0

# Together with SILENCE_S this is how long it takes until a host that vanished counts as dead.
DIAL_TIMEOUT_S = 1.5
# A process that is busy may take its time, and one that stands still is ended by its host.
SECURE_TIMEOUT_S = 30.0


class Handshakes:
    """Connections from other hosts that have not shown the cluster's certificate yet.

    When there are too many, the *oldest* one of the busiest host is turned away. If the newest were
    refused instead, a few hundred idle connections could keep every peer out for as long as they
    are renewed. An honest handshake takes milliseconds, so the oldest connections are not honest
    ones, and a host that opens many connections closes its own first.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, keys: KeyFiles, admission: Admission
    ) -> None:
        self.limit, self.patience_s = MAX_STRANGERS, PATIENCE_S
        self._loop = loop
        self._keys = keys
        self._admission = admission
        self._tasks: dict[TlsStream, tuple[str, asyncio.Task[None]]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._tasks)

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
        """Shake hands; then ``welcome(stream, source)``, all within the time of a stranger.

        What raises OSError is refused.
        """
        if len(self._tasks) >= self.limit:
            hosts = Counter(_host_of(each) for each, _ in self._tasks.values())
            ((busiest, _),) = hosts.most_common(1)
            oldest = next(s for s, (each, _) in self._tasks.items() if _host_of(each) == busiest)
            self._admission.refused(
                self._drop(oldest),
                f"more than {self.limit} connections are not authenticated, and this is the oldest",
            )
        stream = TlsStream(self._loop, sock, self._keys.tls(), accepts=True)
        task = self._loop.create_task(self._let_in(stream, source, welcome))
        self._tasks[stream] = source, task

    async def _let_in(
        self, stream: TlsStream, source: str, welcome: Callable[[TlsStream, str], Awaitable[None]]
    ) -> None:
        try:
            async with asyncio.timeout(self.patience_s):
                await stream.secure()
                await welcome(stream, source)
        except OSError as error:
            stream.close()
            if isinstance(error, ssl.SSLEOFError | ConnectionError):  # as of a process that ended
                self._admission.disconnected(source, describe(error))
            elif isinstance(error, TimeoutError) and error.errno is None:  # not the kernel's
                reason = f"it was not authenticated within {self.patience_s:g} s"
                self._admission.refused(source, reason)
            else:
                self._admission.refused(source, describe(error))
        finally:
            self._tasks.pop(stream, None)

    def _drop(self, stream: TlsStream) -> str:
        """Abandon one; return its source."""
        source, task = self._tasks.pop(stream)
        task.cancel()
        stream.close()
        return source


def _host_of(source: str) -> str:
    return source.rpartition(":")[0]


class Gate:
    """Listens at its process's own host and port; ``take(sock, purpose)`` gets what is for it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own: ProcessAddress,
        handshakes: Handshakes,
        take: Callable[[socket.socket, int], None],
        listener: socket.socket | None = None,
    ) -> None:
        self._own = own
        self._take = take
        self._handshakes = handshakes
        self._listener = Listener(
            loop,
            listener or tcp_listener(bound_host(own), own.port),
            self._accept,
            per_pass=ACCEPTS_PER_PASS,
            allowance=TokenBucket(ACCEPTS_AT_ONCE, ACCEPTS_PER_S),
        )

    def fileno(self) -> int:
        """Return the number of the socket that it listens with."""
        return self._listener.fileno()

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    def _accept(self, sock: socket.socket, name: object) -> bool:
        assert isinstance(name, tuple), name
        try:
            prepare_tcp(sock)
        except OSError:  # gone already
            sock.close()
        else:
            self._handshakes.take(sock, f"{name[0]}:{name[1]}", self._ask)
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
    stream = TlsStream(loop, sock, keys.tls(), accepts=False)
    try:
        async with no_longer_than(DIAL_TIMEOUT_S):
            await stream.secure()
            # A new connection has room for it.
            stream.send(_WANTED.pack(target.number, purpose))
            answer = await stream.receive(_READ_SIZE)
    except UnreachableError as error:  # but it has a host: not on a link that loses much
        raise TimeoutError(error.reason) from None
    if answer == b"\0":
        raise UnreachableError("", is_certain=True)
    if answer != b"\1":
        raise ConnectionResetError("it closed the connection")
    stream = TlsStream(loop, sock, keys.tls(), accepts=False)
    async with no_longer_than(SECURE_TIMEOUT_S):
        await stream.secure()
    return stream


@contextlib.asynccontextmanager
async def no_longer_than(limit_s: float) -> AsyncIterator[None]:
    """Raise UnreachableError where a step of dialing takes longer."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():  # else it is the kernel's
            reason = f"no answer within {limit_s:g} s"
            raise UnreachableError(reason, is_certain=False) from None
        raise
