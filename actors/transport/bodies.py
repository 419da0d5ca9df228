"""Checks on DATA and START frames, and what is inside; frames.py describes them."""

from __future__ import annotations

import struct

from greenroom.actors.transport.frames import MAX_BUFFERS, Assembly, Buffer
from greenroom.actors.transport.identity import RefusedError


def _sizes(buffers: int, body: bytes) -> tuple[int, ...]:
    if not 0 < buffers <= MAX_BUFFERS or len(body) < 8 * buffers:
        raise RefusedError(f"the sizes of {buffers} buffers in {len(body)} bytes")
    return struct.unpack_from(f">{buffers}Q", body)


def split_body(buffers: int, body: bytes) -> list[Buffer]:
    """Cut the body of a DATA frame; only the first buffer, the pickle, may stay read-only."""
    sizes = _sizes(buffers, body)
    at = 8 * buffers
    if sum(sizes) != len(body) - at:
        raise RefusedError(f"buffers of {sum(sizes)} bytes in a body of {len(body)}")
    view = memoryview(body)
    parts: list[Buffer] = []
    for size in sizes:
        parts.append(bytearray(view[at : at + size]) if parts else body[at : at + size])
        at += size
    return parts


def begin_assembly(number: int, buffers: int, body: bytes, limit: int) -> Assembly:
    """Make room for the message that a START frame announces."""
    sizes = _sizes(buffers, body)
    total = sum(sizes)
    if len(body) != 8 * buffers or not total:
        raise RefusedError(f"the start of a message of {total} bytes, malformed")
    if total > limit:
        raise RefusedError(f"a message of {total} bytes, over the limit of {limit}")
    return Assembly(number, sizes)


def check_order(number: int, due: int, assembly: Assembly | None) -> None:
    """Refuse a message that is not the next, or comes inside another."""
    if number != due or assembly is not None:
        inside = "" if assembly is None else f" inside message {assembly.number}"
        raise RefusedError(f"message {number}{inside} where {due} is due")
