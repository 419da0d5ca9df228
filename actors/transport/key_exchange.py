"""How a key travels to another host so that only that host can read it.

Theory of operation. Without TLS what hosts say can be read on the wire, and an evicted host holds
the very key that is being replaced: so a new one must not be in what they say. Both ends agree on a
secret by Diffie-Hellman, in the 2048-bit group of RFC 3526 (section 3) with exponents of 256 bits,
that are used for one key and forgotten. That they talk to each other, and to nobody in between, the
session proves, whose every frame is authenticated.

    PRK    = HKDF-Extract(salt = the key that both hold, secret)         HKDF as in keys.py
    sealed = key XOR HKDF-Expand(PRK, label + publics)
           + HMAC(HKDF-Expand(PRK, another label + publics), the 32 bytes before it)
    publics = of the end that asks + of the end that gives
"""

from __future__ import annotations

import hmac
import secrets

from greenroom.actors.transport.greeting import LABEL
from greenroom.actors.transport.handshake import KEY_SIZE
from greenroom.actors.transport.keys import hkdf_expand, hkdf_extract

GENERATOR = 2
PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22"
    "514A08798E3404DDEF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6"
    "F44C42E9A637ED6B0BFF5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3D"
    "C2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB"
    "9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3BE39E772C180E8603"
    "9B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
SIZE = 256  # bytes of a public number


class SealError(ValueError):
    """What came is not what the other end can have sealed for this one."""


class Exchange:
    """One end of one exchange."""

    def __init__(self) -> None:
        self._secret = secrets.randbits(256)
        self.public = pow(GENERATOR, self._secret, PRIME).to_bytes(SIZE, "big")

    def seal(self, key: bytes, asker: bytes, held: bytes) -> bytes:
        """Return ``key`` for the end whose public number is ``asker``; ``held`` is on both."""
        stream, mac_key = self._keys(asker, asker + self.public, held)
        hidden = bytes(a ^ b for a, b in zip(key, stream, strict=True))
        return hidden + hmac.digest(mac_key, hidden, "sha256")

    def open(self, sealed: bytes, giver: bytes, held: bytes) -> bytes:
        """Return what the end whose public number is ``giver`` has sealed; SealError."""
        stream, mac_key = self._keys(giver, self.public + giver, held)
        hidden, mac = sealed[:KEY_SIZE], sealed[KEY_SIZE:]
        if not hmac.compare_digest(hmac.digest(mac_key, hidden, "sha256"), mac):
            raise SealError("a key that was not sealed for this host")
        return bytes(a ^ b for a, b in zip(hidden, stream, strict=True))

    def _keys(self, other: bytes, publics: bytes, held: bytes) -> tuple[bytes, bytes]:
        number = int.from_bytes(other, "big")
        if len(other) != SIZE or not 1 < number < PRIME - 1:
            raise SealError(f"a public number of {len(other)} bytes that is none of the group")
        prk = hkdf_extract(held, pow(number, self._secret, PRIME).to_bytes(SIZE, "big"))
        return (
            hkdf_expand(prk, LABEL + b"key under way" + publics),
            hkdf_expand(prk, LABEL + b"seal of a key" + publics),
        )
