"""How everything that one end says before it is authenticated begins: magic, version, kind.

The magic and the version stay where they are in all versions to come, so that either side can name
both versions: an acceptor answers a wrong version with its own magic and version before it closes.
"""

from __future__ import annotations

import struct

from greenroom.actors.transport.identity import RefusedError

VERSION = 2
MAGIC = b"\x89USTDY\r\n"  # as PNG's: not text, and broken by whatever rewrites line ends
LABEL = b"greenroom transport 2 "  # of every key that is derived
LOCAL, REMOTE, ROUTE, ROUTED = range(4)
KINDS = {LOCAL: "local", REMOTE: "remote", ROUTE: "route", ROUTED: "routed"}
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
