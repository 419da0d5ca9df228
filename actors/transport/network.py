"""The settings for talking to processes of other hosts, read from the environment."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from greenroom.actors.transport.addresses import LOOPBACK, ProcessAddress
from greenroom.actors.transport.cluster_key import ClusterKeyError, KeyFiles, Keys
from greenroom.actors.transport.frames import Buffer
from greenroom.actors.transport.handshake import Role

# --- TLS between processes of different hosts -----------------------------------------------------
#
# Theory of operation. The ROUTE (gate.py) is sent first and in the clear, because the gate cannot
# hand over a TLS session. The wanted process then does the TLS 1.3 handshake with the dialer. Each
# end shows a certificate, which the CA of the other end must have signed. Everything that follows
# is inside of TLS: the handshake with the cluster key, and the frames.
#
# A certificate need not name its host, because the cluster key proves the identity of a peer. That
# proof includes both certificates (``binding``, as in RFC 5929, section 4). So the holder of
# another certificate of the same CA cannot sit between two ends and relay their proofs.
#
# OpenSSL works on memory. :class:`TlsSocket` moves its bytes, and a channel uses it like a socket.

SEAL_SIZE = 256 * 1024  # what is encrypted at once, about
_RECORD_SIZE = 16 * 1024  # the most that one read gives


class TlsError(ValueError):
    """The TLS files cannot be used; the text says which, and why."""


@dataclass(frozen=True)
class Tls:
    """The TLS contexts of a host: its certificate, and the CA that it trusts."""

    dialing: ssl.SSLContext
    accepting: ssl.SSLContext
    own_certificate: bytes  # DER

    @classmethod
    def load(cls, certificate: Path, key: Path, ca: Path) -> Tls:
        """Read PEM files; TlsError naming the one that cannot be used."""
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # see above
            context.verify_mode = ssl.CERT_REQUIRED
            contexts.append(context)
            try:
                context.load_cert_chain(certificate, key, password=_no_password)
            except (OSError, ValueError) as error:
                raise TlsError(f"--tls-cert {certificate} with --tls-key {key}: {error}") from None
            try:
                context.load_verify_locations(ca)
            except (OSError, ValueError) as error:
                raise TlsError(f"--tls-ca {ca}: {error}") from None
        contexts[1].num_tickets = 0  # nobody resumes
        first = certificate.read_text().partition(ssl.PEM_FOOTER)[0]
        own = ssl.PEM_cert_to_DER_cert(first[first.index(ssl.PEM_HEADER) :] + ssl.PEM_FOOTER)
        return cls(contexts[0], contexts[1], own)


def _no_password() -> bytes:
    raise ValueError("the key has a password, which nobody can type here")


class TlsSocket:
    """A socket that never blocks, and the TLS session over it."""

    def __init__(
        self, sock: socket.socket, tls: Tls, role: Role, on_failure: Callable[[str], None]
    ) -> None:
        self._socket = sock
        self._tls = tls
        self._role = role
        self._on_failure = on_failure
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls.dialing if role is Role.DIALER else tls.accepting
        self._session = context.wrap_bio(
            self._incoming, self._outgoing, server_side=role is Role.ACCEPTOR
        )
        self._sealed = memoryview(b"")  # encrypted, not sent
        self._sealing = 0  # how many plain bytes that is, which `send` has not told yet

    @property
    def binding(self) -> bytes:
        """Return bytes that only the two ends share, and no relay; valid after the handshake."""
        theirs = self._session.getpeercert(binary_form=True) or b""
        both = (self._tls.own_certificate, theirs)
        ordered = both if self._role is Role.DIALER else reversed(both)
        return b"tls" + b"".join(hashlib.sha256(each).digest() for each in ordered)

    def fileno(self) -> int:
        """Return the socket's number."""
        return self._socket.fileno()

    def close(self) -> None:
        """Let go of the socket, without a word: who cuts a stream off fails by the tags."""
        self._socket.close()

    def handshake(self) -> bool:
        """Go on with the handshake; return whether it is over. SSLError, or other OSErrors."""
        received = self._receive(SEAL_SIZE)
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            if received == b"":
                raise ConnectionResetError("it closed the connection") from None
            return False
        finally:
            self._flush()
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
        except ssl.SSLError as error:  # an alert, or something that is no TLS
            self._on_failure(describe(error))
            raise ConnectionAbortedError(str(error)) from None
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
        told, self._sealing = self._sealing, 0
        return told

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


def describe(error: Exception) -> str:
    """Return one line about a failure of TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: its certificate is not one of --tls-ca: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        _, is_alert, alert = error.reason.partition("_ALERT_")
        if is_alert and ("CERTIFICATE" in alert or alert == "UNKNOWN_CA"):
            told = alert.replace("_", " ").lower()
            return f"TLS: it does not believe this host's --tls-cert: {told}"
        return f"TLS: {error.reason.replace('_', ' ').lower()}; do both hosts use TLS, by one CA?"
    return f"TLS: {error}; do both hosts use TLS, by one CA?"


class Securing:
    """A connection during the handshake of TLS; one callback is called, once and not at once.

    ``on_refused(reason)`` when it failed, and the socket is closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: TlsSocket,
        *,
        on_secured: Callable[[], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._on_secured, self._on_refused = on_secured, on_refused
        self._is_over = False
        loop.add_reader(sock.fileno(), self._advance)
        loop.call_soon(self._advance)  # the dialer speaks first

    def fileno(self) -> int:
        """Return the socket's number."""
        return self._socket.fileno()

    def cancel(self) -> None:
        """Give it up, without a word."""
        if not self._is_over:
            self._leave()
            self._socket.close()

    def turn_away(self, reason: str) -> None:
        """See :class:`~greenroom.actors.transport.admission.Stranger`."""
        self.cancel()
        self._on_refused(reason)

    def _leave(self) -> None:
        self._is_over = True
        self._loop.remove_reader(self._socket.fileno())

    def _advance(self) -> None:
        if self._is_over:
            return
        try:
            is_done = self._socket.handshake()
        except OSError as error:  # SSLError is one
            self.turn_away(describe(error))
            return
        if is_done:
            self._leave()
            self._on_secured()


TLS_FILES = ("GREENROOM_TLS_CERT", "GREENROOM_TLS_KEY", "GREENROOM_TLS_CA")


@dataclass(frozen=True, kw_only=True)
class Network:
    """The cluster's keys, and TLS where hosts use it; this host's address is the process's own."""

    keys: Keys = field(repr=False)
    tls: Tls | None = None


class Way(NamedTuple):
    """How a process that is no actor comes to a system, where its environment does not say it."""

    gates: tuple[str, ...]  # IP:PORT of hosts of another system; empty for this host's
    environ: Mapping[str, str]  # where the cluster's key and certificates are


def network_of(own: ProcessAddress, environ: Mapping[str, str]) -> Network | None:
    """Return the network of the process at ``own``; None on a host that is not bound to one.

    ClusterKeyError and TlsError when the files cannot be used. Without a key an admin raises too;
    any other process, such as a command, then reaches this host's processes only.
    """
    if own.host == LOOPBACK:
        return None
    path = environ.get("GREENROOM_KEY_FILE")
    if not path:
        if own.is_admin:
            raise ClusterKeyError(
                f"a system bound to {own.host} needs the cluster's key: name its file with "
                "GREENROOM_KEY_FILE"
            )
        return None
    return Network(keys=KeyFiles(Path(path)), tls=tls_of(environ))


def tls_of(environ: Mapping[str, str]) -> Tls | None:
    """Return what the TLS files hold; None without any, TlsError when they cannot be used."""
    files = [environ.get(name) for name in TLS_FILES]
    if not any(files):
        return None
    if not all(files):
        raise TlsError(f"{', '.join(TLS_FILES)} go together, or not at all")
    certificate, key, ca = (Path(file or "") for file in files)
    return Tls.load(certificate, key, ca)
