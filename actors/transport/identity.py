"""Who a process is, and how that is written in a hello."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_FIXED = struct.Struct(">8sIHH")  # incarnation, pid, length of address, length of host name
MAX_TEXT = 200
MAX_IDENTITY = _FIXED.size + 2 * MAX_TEXT
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
    are for logs.
    """

    address: str
    incarnation: str
    pid: int
    host: str

    def __post_init__(self) -> None:
        if len(self.incarnation) != 16 or not _HEX.issuperset(self.incarnation):
            raise ValueError(
                f"incarnation {self.incarnation!r} is not 16 lower-case hexadecimal characters"
            )
        if not 0 <= self.pid < 2**32:
            raise ValueError(f"pid {self.pid} is not between 0 and 2**32 - 1")
        for field, text in (("address", self.address), ("host", self.host)):
            # Printable ASCII only: these go into log lines.
            if not (text.isascii() and text.isprintable()) or not 0 < len(text) <= MAX_TEXT:
                raise ValueError(
                    f"{field} {text!r} is not 1 to {MAX_TEXT} printable ASCII characters"
                )

    def __str__(self) -> str:
        return f"{self.address} (pid {self.pid} on {self.host}, incarnation {self.incarnation})"


def encode_identity(identity: Identity) -> bytes:
    """Write ``identity`` for a hello or a proof."""
    address, host = identity.address.encode(), identity.host.encode()
    return (
        _FIXED.pack(bytes.fromhex(identity.incarnation), identity.pid, len(address), len(host))
        + address
        + host
    )


def decode_identity(block: bytes) -> Identity:
    """Read what ``encode_identity`` wrote; RefusedError when it is anything else."""
    if len(block) < _FIXED.size:
        raise RefusedError(f"an identity of {len(block)} bytes, shorter than its fixed part")
    incarnation, pid, address_size, host_size = _FIXED.unpack_from(block)
    texts = block[_FIXED.size :]
    if len(texts) != address_size + host_size:
        raise RefusedError("an identity whose lengths do not add up")
    try:
        address, host = texts[:address_size].decode("ascii"), texts[address_size:].decode("ascii")
        return Identity(address, incarnation.hex(), pid, host)
    except ValueError:
        raise RefusedError("an identity with text that is not printable ASCII") from None
