"""HKDF with HMAC-SHA256: every key of the transport comes from the cluster key by it."""

from __future__ import annotations

import hmac


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
