"""How two processes come to know each other, before anything else is read.

Theory of operation. The dialer speaks first. On the *local* kind (a Unix socket, where the kernel
has already told the shell the peer's uid) each side's hello carries its identity, and that is all:

    dialer -> acceptor   HELLO  magic, version, kind, identity
    acceptor -> dialer   HELLO  magic, version, kind, identity

On the *remote* kind both prove that they hold the 32-byte cluster key K, without showing it:

    dialer -> acceptor   HELLO  magic, version, kind, nonce D
    acceptor -> dialer   HELLO  magic, version, kind, nonce A
    dialer -> acceptor   PROOF  identity D, HMAC(proof key of dialers, transcript so far)
    acceptor -> dialer   PROOF  identity A, HMAC(proof key of acceptors, transcript so far)

    PRK       = HKDF-Extract(salt = nonce D + nonce A, K)                     RFC 5869, 2.2
    proof key = HKDF-Expand(PRK, label of the role)                           RFC 5869, 2.3
    frame key = HKDF-Expand(PRK, label of the direction + whole transcript)
    HMAC      = HMAC-SHA256                                                   RFC 2104
    transcript = SHA-256 of the context and every byte that both sides sent so far, in order

The context is what both ends have in common before the handshake: the ROUTE by which the dialer
came (routes.py) and, with TLS, both certificates (tls.py). The nonces and proofs thus hold for this
one way between this one pair of ends.

- Replays fail because the other side's nonce is fresh in every handshake and is in every key.
- Reflections fail because the two roles prove under different keys, and because an echo of one's
  own nonce or incarnation is refused by name.
- Identities cannot be exchanged under way, because each is in the transcript that is proven.
- A stranger learns nothing but the magic, the version and a nonce: the dialer proves first.
- A relay between two honest sides can only pass bytes on: it has no frame key.

Each message is refused as soon as a byte of it is wrong, so a stray client holds nothing. All of a
handshake fits in ``MAX_HANDSHAKE`` bytes; a longer length is refused when it is read. How long a
peer may take is the shell's to say.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import Enum

from greenroom.actors.transport.greeting import (
    BEGINNING,
    LABEL,
    LOCAL,
    REMOTE,
    beginning,
    check_beginning,
)
from greenroom.actors.transport.identity import (
    MAX_IDENTITY,
    Identity,
    RefusedError,
    decode_identity,
    encode_identity,
)
from greenroom.actors.transport.keys import hkdf_expand, hkdf_extract
from greenroom.actors.transport.states import ConnectionEvent, IllegalEventError

KEY_SIZE = NONCE_SIZE = PROOF_SIZE = 32
MAX_HANDSHAKE = 1024  # more than either side's messages together

_LENGTH = struct.Struct(">H")


class Role(str, Enum):
    """Which end of the connection this is."""

    DIALER = "dialer"
    ACCEPTOR = "acceptor"

    @property
    def other(self) -> Role:
        """Return the peer's role."""
        return Role.ACCEPTOR if self is Role.DIALER else Role.DIALER


class Handshake:
    """One side of one handshake: whole messages in, answers out.

    ``key`` and ``nonce`` are 32 bytes each on the remote kind and None on the local one; the nonce
    must never have been used before. ``context`` is what the transcript begins with.
    """

    def __init__(
        self,
        role: Role,
        identity: Identity,
        *,
        key: bytes | None,
        nonce: bytes | None,
        context: bytes = b"",
    ) -> None:
        if (key is None) != (nonce is None):
            raise ValueError("a remote handshake needs a key and a nonce, a local one neither")
        if key is not None and nonce is not None and not len(key) == len(nonce) == KEY_SIZE:
            raise ValueError(f"key and nonce are {len(key)} and {len(nonce)} bytes, not {KEY_SIZE}")
        self.peer: Identity | None = None
        self.frame_keys: tuple[bytes, bytes] | None = None  # to send with, to receive with
        self._role, self._identity = role, identity
        self._key, self._nonce = key, nonce or b""
        self._kind = LOCAL if key is None else REMOTE
        self._prk: bytes | None = None
        body = encode_identity(identity) if key is None else self._nonce
        self._hello = beginning(self._kind) + _LENGTH.pack(len(body)) + body
        self._transcript = hashlib.sha256(context)
        self._transcript.update(self.start())

    @property
    def known_peer(self) -> Identity:
        """Return who the peer is; only after IDENTITY."""
        if self.peer is None:
            raise IllegalEventError("the peer's identity asked for before it was read")
        return self.peer

    def start(self) -> bytes:
        """Return what to send before anything was received."""
        return self._hello if self._role is Role.DIALER else b""

    def step(self, received: bytearray) -> tuple[ConnectionEvent, bytes, int] | None:
        """Read one message: what it was, the answer, its length; None while it is incomplete.

        Raises RefusedError as soon as the bytes cannot become a right message.
        """
        return self._read_hello(received) if self._prk is None else self._read_proof(received)

    def _read_hello(self, received: bytearray) -> tuple[ConnectionEvent, bytes, int] | None:
        check_beginning(received, self._kind, answers=self._role is Role.ACCEPTOR)
        body_at = BEGINNING.size + _LENGTH.size
        if len(received) < body_at:
            return None
        size = _LENGTH.unpack_from(received, BEGINNING.size)[0]
        self._check_size(size, NONCE_SIZE if self._kind == REMOTE else MAX_IDENTITY)
        end = body_at + size
        if len(received) < end:
            return None
        body = bytes(received[body_at:end])
        answer = self._hello if self._role is Role.ACCEPTOR else b""
        if self._kind == LOCAL:
            self._accept(decode_identity(body))
            return ConnectionEvent.IDENTITY, answer, end
        if size != NONCE_SIZE:
            raise RefusedError(f"a nonce of {size} bytes, not {NONCE_SIZE}")
        if hmac.compare_digest(body, self._nonce):
            raise RefusedError("the peer echoes this end's own nonce")
        self._transcript.update(received[:end] + answer)
        self._derive(body)
        if self._role is Role.DIALER:
            answer = self._proof()
        return ConnectionEvent.NONCE, answer, end

    def _check_size(self, size: int, limit: int) -> None:
        if size > limit:
            raise RefusedError(f"a handshake message of {size} bytes, over the limit of {limit}")

    def _derive(self, peer_nonce: bytes) -> None:
        nonces = (self._nonce, peer_nonce)
        salt = b"".join(nonces if self._role is Role.DIALER else reversed(nonces))
        self._prk = hkdf_extract(salt, self._key or b"")

    def _expand(self, label: bytes, context: bytes = b"") -> bytes:
        return hkdf_expand(self._prk or b"", LABEL + label + context)

    def _mac(self, role: Role) -> bytes:
        """Return what ``role`` must answer to the transcript so far."""
        proof_key = self._expand(b"proof of the " + role.value.encode())
        return hmac.digest(proof_key, self._transcript.digest(), "sha256")

    def _proof(self) -> bytes:
        """Write this end's proof, into the transcript too."""
        block = encode_identity(self._identity)
        head = _LENGTH.pack(len(block) + PROOF_SIZE) + block
        self._transcript.update(head)
        mac = self._mac(self._role)
        self._transcript.update(mac)
        return head + mac

    def _read_proof(self, received: bytearray) -> tuple[ConnectionEvent, bytes, int] | None:
        if len(received) < _LENGTH.size:
            return None
        size = _LENGTH.unpack_from(received)[0]
        self._check_size(size, MAX_IDENTITY + PROOF_SIZE)
        end = _LENGTH.size + size
        if size < PROOF_SIZE:
            raise RefusedError(f"a proof of {size} bytes, shorter than {PROOF_SIZE}")
        if len(received) < end:
            return None
        mac_at = end - PROOF_SIZE
        self._transcript.update(received[:mac_at])
        if not hmac.compare_digest(self._mac(self._role.other), bytes(received[mac_at:end])):
            raise RefusedError("the peer's proof is wrong: it does not hold this cluster's key")
        self._transcript.update(received[mac_at:end])
        self._accept(decode_identity(bytes(received[_LENGTH.size : mac_at])))
        answer = self._proof() if self._role is Role.ACCEPTOR else b""
        self._check_release(answer)
        self._derive_frame_keys()
        return ConnectionEvent.IDENTITY, answer, end

    def _check_release(self, farewell: bytes) -> None:
        """Refuse another release; the proof goes all the same, so that the dialer can name both."""
        theirs, ours = self.known_peer.release, self._identity.release
        if theirs != ours:
            raise RefusedError(
                f"the peer runs {theirs}, this end {ours}; all hosts must run the same", farewell
            )

    def _derive_frame_keys(self) -> None:
        transcript = self._transcript.digest()
        own, other = (
            self._expand(b"frames of the " + role.value.encode(), transcript)
            for role in (self._role, self._role.other)
        )
        self.frame_keys = (own, other)

    def _accept(self, peer: Identity) -> None:
        if peer.incarnation == self._identity.incarnation:
            raise RefusedError("the peer echoes this end's own identity")
        self.peer = peer
