"""Who a process is, and how that is written in a hello."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_FIXED = struct.Struct(">8sIHHH")  # incarnation, pid, lengths of address, host name and release
MAX_TEXT = 200
MAX_IDENTITY = _FIXED.size + 3 * MAX_TEXT
_HEX = frozenset("0123456789abcdef")


class RefusedError(Exception):
    """The peer broke the rules; the text says how. ``farewell`` may still be sent to it."""

    def __init__(self, reason: str, farewell: bytes = b"") -> None:
        super().__init__(reason)
        self.reason = reason
        self.farewell = farewell


@dataclass(frozen=True)
class Identity:
    """One run of one process: its address, and the incarnation that no later process shares.

    ``incarnation`` is 16 hexadecimal characters drawn at the process's start. ``pid`` and ``host``
    are for logs. ``release`` names the versions that must be the same on all hosts.
    """

    address: str
    incarnation: str
    pid: int
    host: str
    release: str = "unknown"

    def __post_init__(self) -> None:
        if len(self.incarnation) != 16 or not _HEX.issuperset(self.incarnation):
            raise ValueError(
                f"incarnation {self.incarnation!r} is not 16 lower-case hexadecimal characters"
            )
        if not 0 <= self.pid < 2**32:
            raise ValueError(f"pid {self.pid} is not between 0 and 2**32 - 1")
        texts = ("address", self.address), ("host", self.host), ("release", self.release)
        for field, text in texts:
            # Printable ASCII only: these go into log lines.
            if not (text.isascii() and text.isprintable()) or not 0 < len(text) <= MAX_TEXT:
                raise ValueError(
                    f"{field} {text!r} is not 1 to {MAX_TEXT} printable ASCII characters"
                )

    def __str__(self) -> str:
        return f"{self.address} (pid {self.pid} on {self.host}, incarnation {self.incarnation})"


def encode_identity(identity: Identity) -> bytes:
    """Write ``identity`` for a hello or a proof."""
    texts = [each.encode() for each in (identity.address, identity.host, identity.release)]
    incarnation = bytes.fromhex(identity.incarnation)
    return _FIXED.pack(incarnation, identity.pid, *map(len, texts)) + b"".join(texts)


def decode_identity(block: bytes) -> Identity:
    """Read what ``encode_identity`` wrote; RefusedError when it is anything else."""
    if len(block) < _FIXED.size:
        raise RefusedError(f"an identity of {len(block)} bytes, shorter than its fixed part")
    incarnation, pid, address_size, host_size, release_size = _FIXED.unpack_from(block)
    texts = block[_FIXED.size :]
    release_at = address_size + host_size
    if len(texts) != release_at + release_size:
        raise RefusedError("an identity whose lengths do not add up")
    pieces = texts[:address_size], texts[address_size:release_at], texts[release_at:]
    try:
        address, host, release = (piece.decode("ascii") for piece in pieces)
        return Identity(address, incarnation.hex(), pid, host, release)
    except ValueError:
        raise RefusedError("an identity with text that is not printable ASCII") from None
