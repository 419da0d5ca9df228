"""How processes of two hosts authenticate each other, before anything else is read.

Theory of operation. On a host there is no handshake. Between hosts both ends prove that they hold
the 32-byte cluster key K, without showing it:

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
came (gate.py) and, with TLS, both certificates (network.py). The nonces and proofs thus hold for
this one way between this one pair of ends.

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

from greenroom.actors.transport.addresses import (
    MAX_IDENTITY,
    Identity,
    decode_identity,
    encode_identity,
)
from greenroom.actors.transport.frames import RefusedError

# --- The prefix of unauthenticated messages: magic, version, kind ---------------------------------
#
# The magic and the version keep their places in all later versions, so that either side can name
# both versions. An acceptor answers a wrong version with its own magic and version before it closes
# the connection.

VERSION = 2
MAGIC = b"\x89USTDY\r\n"  # as PNG's: not text, and broken by whatever rewrites line ends
LABEL = b"greenroom transport 2 "  # of every key that is derived
_, REMOTE, ROUTE, ROUTED = range(4)
KINDS = {REMOTE: "remote", ROUTE: "route", ROUTED: "routed"}
BEGINNING = struct.Struct(">8sHB")  # magic, version, kind

_TLS = (0x15, 0x16)  # how its records begin: alerts, handshakes
_VERSION_AT, _VERSION_END = len(MAGIC), len(MAGIC) + 2


def beginning(kind: int) -> bytes:
    """Return the first bytes of a message of ``kind``."""
    return BEGINNING.pack(MAGIC, VERSION, kind)


def check_beginning(received: bytes | bytearray, kind: int, *, answers: bool) -> None:
    """Refuse at the first wrong byte, in words that depend on that byte alone.

    What is still missing is taken for right. With ``answers`` the refusal of another version has
    a farewell.
    """
    if not received.startswith(MAGIC[: len(received)]):
        at = next(i for i, byte in enumerate(received) if byte != MAGIC[i])
        byte = received[at]
        likely = " (TLS?)" if byte in _TLS else " (HTTP or other text?)" if byte > 0x1F else ""
        raise RefusedError(f"not our protocol: byte {at} is 0x{byte:02x}{likely}")
    if len(received) >= _VERSION_END:
        version = int.from_bytes(received[_VERSION_AT:_VERSION_END], "big")
        if version != VERSION:
            raise RefusedError(
                f"the peer speaks protocol version {version}, this end version {VERSION}; both "
                "must run the same release",
                beginning(kind)[:_VERSION_END] if answers else b"",
            )
    if len(received) >= BEGINNING.size and received[_VERSION_END] != kind:
        other = received[_VERSION_END]
        named = KINDS.get(other, f"unknown ({other})")
        raise RefusedError(f"the peer's kind is {named}, this end's is {KINDS[kind]}")


# --- Deriving keys from the cluster key: HKDF with HMAC-SHA256 ------------------------------------


def hkdf_extract(salt: bytes, key: bytes) -> bytes:
    """Return PRK = HMAC-SHA256(salt, key): RFC 5869, section 2.2."""
    return hmac.digest(salt, key, "sha256")


def hkdf_expand(prk: bytes, info: bytes, size: int = 32) -> bytes:
    """Return T(1) + T(2) + ... cut to ``size``: RFC 5869, section 2.3."""
    block, blocks = b"", b""
    for number in range(1, -(-size // 32) + 1):
        block = hmac.digest(prk, block + info + bytes([number]), "sha256")
        blocks += block
    return blocks[:size]


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
        key: bytes,
        nonce: bytes,
        context: bytes = b"",
    ) -> None:
        if not len(key) == len(nonce) == KEY_SIZE:
            raise ValueError(f"key and nonce are {len(key)} and {len(nonce)} bytes, not {KEY_SIZE}")
        self.peer: Identity | None = None
        self.frame_keys: tuple[bytes, bytes] | None = None  # to send with, to receive with
        self._role, self._identity = role, identity
        self._key, self._nonce = key, nonce
        self._kind = REMOTE
        self._prk: bytes | None = None
        body = self._nonce
        self._hello = beginning(self._kind) + _LENGTH.pack(len(body)) + body
        self._transcript = hashlib.sha256(context)
        self._transcript.update(self.start())

    @property
    def known_peer(self) -> Identity:
        """Return who the peer is; only after IDENTITY."""
        if self.peer is None:
            raise RuntimeError("the peer's identity asked for before it was read")
        return self.peer

    def start(self) -> bytes:
        """Return what to send before anything was received."""
        return self._hello if self._role is Role.DIALER else b""

    def step(self, received: bytearray) -> tuple[bytes, int] | None:
        """Read one message: the answer, its length; None while it is incomplete.

        Raises RefusedError as soon as the bytes cannot become a right message.
        """
        return self._read_hello(received) if self._prk is None else self._read_proof(received)

    def _read_hello(self, received: bytearray) -> tuple[bytes, int] | None:
        check_beginning(received, self._kind, answers=self._role is Role.ACCEPTOR)
        body_at = BEGINNING.size + _LENGTH.size
        if len(received) < body_at:
            return None
        size = _LENGTH.unpack_from(received, BEGINNING.size)[0]
        self._check_size(size, NONCE_SIZE)
        end = body_at + size
        if len(received) < end:
            return None
        body = bytes(received[body_at:end])
        answer = self._hello if self._role is Role.ACCEPTOR else b""
        if size != NONCE_SIZE:
            raise RefusedError(f"a nonce of {size} bytes, not {NONCE_SIZE}")
        if hmac.compare_digest(body, self._nonce):
            raise RefusedError("the peer echoes this end's own nonce")
        self._transcript.update(received[:end] + answer)
        self._derive(body)
        if self._role is Role.DIALER:
            answer = self._proof()
        return answer, end

    def _check_size(self, size: int, limit: int) -> None:
        if size > limit:
            raise RefusedError(f"a handshake message of {size} bytes, over the limit of {limit}")

    def _derive(self, peer_nonce: bytes) -> None:
        nonces = (self._nonce, peer_nonce)
        salt = b"".join(nonces if self._role is Role.DIALER else reversed(nonces))
        self._prk = hkdf_extract(salt, self._key)

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

    def _read_proof(self, received: bytearray) -> tuple[bytes, int] | None:
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
        return answer, end

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
