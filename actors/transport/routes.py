"""The first words on a TCP connection: which process of a host the dialer wants, with proof.

Theory of operation. A host has one TCP port, its admin's, and many processes. The admin is its
*gate*: it reads who is wanted, answers, and hands the connection itself, the descriptor, over to
that process. No byte of what follows passes through the gate.

    dialer -> gate   ROUTE   magic, version, kind, number u64, nonce, HMAC(route key, all before it)
    gate -> dialer   ROUTED  magic, version, kind, found u8, HMAC(routed key, ROUTE + all before it)

    PRK = HKDF-Extract(salt = "", K)      key = HKDF-Expand(PRK, label)      K the cluster key

Only who holds K can write a ROUTE that the gate takes, so that a stranger gets no further than to
these 83 bytes of the gate's attention, and reaches no other process at all. A ROUTE that was
recorded can be replayed: it leads to the handshake (handshake.py), which refuses its replay, and
in whose transcript the ROUTE is. ROUTED is about a fresh nonce: that nobody has the number, which
makes the wanted process count as dead, only a holder of K can say.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence

from greenroom.actors.transport.greeting import (
    BEGINNING,
    LABEL,
    ROUTE,
    ROUTED,
    beginning,
    check_beginning,
)
from greenroom.actors.transport.identity import RefusedError
from greenroom.actors.transport.keys import hkdf_expand, hkdf_extract

NONCE_SIZE = MAC_SIZE = 32
_NUMBER = struct.Struct(">Q")
_NONCE_AT = BEGINNING.size + _NUMBER.size
_MAC_AT = _NONCE_AT + NONCE_SIZE
ROUTE_SIZE = _MAC_AT + MAC_SIZE
ROUTED_SIZE = BEGINNING.size + 1 + MAC_SIZE
_FOUND = {b"\0": False, b"\1": True}


def write_route(number: int, key: bytes, nonce: bytes) -> bytes:
    """Return the ROUTE to the process of that number; the nonce must never have been used."""
    route = beginning(ROUTE) + _NUMBER.pack(number) + nonce
    return route + _mac(key, b"route", route)


def read_route(received: bytes | bytearray, keys: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return which number is wanted, and which of the keys made the ROUTE.

    None while bytes are missing. RefusedError when wrong.
    """
    check_beginning(received, ROUTE, answers=True)
    if len(received) < ROUTE_SIZE:
        return None
    route, mac = received[:_MAC_AT], received[_MAC_AT:ROUTE_SIZE]
    for key in keys:
        if hmac.compare_digest(_mac(key, b"route", route), mac):
            return int(_NUMBER.unpack_from(route, BEGINNING.size)[0]), key
    raise RefusedError("it does not hold this cluster's key")


def write_routed(route: bytes, key: bytes, *, found: bool) -> bytes:
    """Return the answer to ``route``."""
    routed = beginning(ROUTED) + bytes([found])
    return routed + _mac(key, b"routed", route + routed)


def read_routed(received: bytes | bytearray, route: bytes, key: bytes) -> bool | None:
    """Return whether the process was found; None while bytes are missing. RefusedError if wrong."""
    check_beginning(received, ROUTED, answers=False)
    if len(received) < ROUTED_SIZE:
        return None
    routed, mac = received[:-MAC_SIZE], received[-MAC_SIZE:]
    if not hmac.compare_digest(_mac(key, b"routed", route + routed), mac):
        raise RefusedError("it does not hold this cluster's key")
    return _FOUND[bytes(routed[-1:])]


def _mac(key: bytes, label: bytes, message: bytes | bytearray) -> bytes:
    derived = hkdf_expand(hkdf_extract(b"", key), LABEL + label)
    return hmac.digest(derived, message, "sha256")
