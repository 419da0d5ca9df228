"""TLS between hosts: each end presents the cluster's certificate, and requires exactly it.

OpenSSL works on memory; :class:`TlsStream` carries its bytes. To a :class:`Connection` it is what a
socket is. Until there is one, coroutines wait for it.

Why not asyncio's own TLS: it sends no alert when a handshake fails (python/cpython#98078), so the
end whose certificate is refused would learn only that the connection was reset. It also hides how
much a slow peer owes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence

from greenroom.actors.transport.cluster_key import Tls
from greenroom.actors.transport.frames import Buffer
from greenroom.actors.transport.sockets import discard

SEAL_SIZE = 256 * 1024  # what is encrypted at once, about
_RECORD_SIZE = 16 * 1024  # the most that one read gives


class TlsStream:
    """A socket that never blocks, and the TLS session over it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, tls: Tls, *, accepts: bool
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._tls = tls
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls.accepting if accepts else tls.dialing
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_side=accepts)
        self._sealed = memoryview(b"")  # encrypted and not sent
        self._sealing = 0  # bytes that are encrypted and not reported as sent

    @property
    def certificates(self) -> frozenset[bytes]:
        """Return those of both ends, as DER; after the handshake."""
        theirs = self._session.getpeercert(binary_form=True)
        return frozenset({self._tls.own, theirs or b""})

    def fileno(self) -> int:
        """Return the socket's number."""
        return self._socket.fileno()

    @property
    def is_closed(self) -> bool:
        """Return whether the socket was let go."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Let go of the socket, without a word."""
        discard(self._loop, self._socket)

    async def secure(self) -> None:
        """Shake hands. OSError, of which SSLError is one, when that fails."""
        while not self._handshake():
            await self._readable()

    async def receive(self, size: int) -> bytes:
        """Wait for what :meth:`recv` returns."""
        while True:
            try:
                return self.recv(size)
            except BlockingIOError:
                await self._readable()

    async def _readable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self.fileno(), _set_done, ready)
        try:
            await ready
        finally:
            if not self.is_closed:
                self._loop.remove_reader(self.fileno())

    def _handshake(self) -> bool:
        """Go on with the handshake; return whether it is over.

        What OpenSSL has verified is compared once more: the certificate is one of the cluster's
        own, and not one that a cluster's key has signed.
        """
        received = self._receive(_RECORD_SIZE)
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            if received == b"":
                raise ConnectionResetError("it closed the connection") from None
            return False
        finally:
            self._flush()
        if self._session.getpeercert(binary_form=True) not in self._tls.taken:
            raise ssl.SSLError("its certificate is not this cluster's")
        return True

    def recv(self, size: int) -> bytes:
        """Return what the next ``size`` bytes of the stream or so say; b"" at its end."""
        received = self._receive(size)
        pieces = []
        try:
            while piece := self._session.read(_RECORD_SIZE):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            received = b""
        plain = b"".join(pieces)
        if not plain and received != b"":
            raise BlockingIOError
        return plain

    def send(self, buffer: Buffer) -> int:
        """See :meth:`sendmsg`."""
        return self.sendmsg([buffer])

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Encrypt some bytes; return how many, once they are sent.

        After a BlockingIOError the same buffers must come again, as OpenSSL demands too.
        """
        if not self._sealing:
            for buffer in buffers:
                part = memoryview(buffer)[: SEAL_SIZE - self._sealing]
                if part:
                    self._sealing += self._session.write(part)
                if self._sealing >= SEAL_SIZE:
                    break
        self._flush()
        if self._sealed:
            raise BlockingIOError
        sent, self._sealing = self._sealing, 0
        return sent

    def _receive(self, size: int) -> bytes | None:
        """Take bytes off the socket; None when there are none now, b"" at the end."""
        try:
            received = self._socket.recv(size)
        except (BlockingIOError, InterruptedError):
            return None
        if received:
            self._incoming.write(received)
        else:
            self._incoming.write_eof()
        return received

    def _flush(self) -> None:
        """Send what is encrypted, as far as the socket takes it."""
        while self._sealed or self._outgoing.pending:
            if not self._sealed:
                self._sealed = memoryview(self._outgoing.read())
            try:
                written = self._socket.send(self._sealed)
            except (BlockingIOError, InterruptedError):
                return
            self._sealed = self._sealed[written:]


def _set_done(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


ANOTHER_CLUSTER = (
    "it has another cluster's file, or a newer one since `greenroom rotate-key`: then copy the one "
    "in its state directory over this host's"
)


def describe(error: OSError) -> str:
    """Return one line about a handshake that failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if "expired" in error.verify_message:
            return f"its certificate is refused: {error.verify_message}"
        return f"its certificate is not this cluster's ({error.verify_message}): {ANOTHER_CLUSTER}"
    if isinstance(error, ssl.SSLEOFError):
        return "it ended the connection"
    if isinstance(error, ssl.SSLError) and error.reason:
        _, is_alert, alert = error.reason.partition("_ALERT_")
        if is_alert and ("CERTIFICATE" in alert or alert in {"UNKNOWN_CA", "DECRYPT_ERROR"}):
            meaning = alert.replace("_", " ").lower()
            return f"it refuses this host's certificate ({meaning}): {ANOTHER_CLUSTER}"
        return f"TLS failed: {error.reason.replace('_', ' ').lower()}"
    return str(error.strerror or error)


def is_refusal(error: OSError) -> bool:
    """Return whether an end refuses the other one, rather than that the connection ended."""
    return isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)
