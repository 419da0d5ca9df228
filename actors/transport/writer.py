"""Turns a session's messages into the frames of one connection; frames.py describes them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from greenroom.actors.transport.frames import (
    CHUNK,
    DATA,
    HEADER,
    PATIENT,
    SMALL_MESSAGE,
    START,
    Buffer,
    Sealer,
)
from greenroom.actors.transport.session import Outgoing, Session


class FrameWriter:
    """Writes frames; what it returns must be sent in that order, for the tags count."""

    def __init__(self, sealer: Sealer | None, max_frame: int) -> None:
        self.max_frame = max_frame
        self._sealer = sealer
        self._chunks: Iterator[list[memoryview]] | None = None  # of the message under way

    def control(self, kind: int, number: int, acknowledged: int, body: bytes = b"") -> bytes:
        """Return a frame that is no part of a message."""
        frame = HEADER.pack(kind, 0, len(body), number, acknowledged) + body
        return frame if self._sealer is None else frame + self._sealer.tag(frame)

    def write(self, session: Session, limit: int, out: list[Buffer]) -> bool:
        """Append about ``limit`` bytes of what ``session`` has; return whether there was any."""
        budget, acknowledged = limit, session.received
        joined: list[bytes] = []  # small ones leave as one buffer: a copy is cheaper than a vector
        while budget > 0:
            if self._chunks is not None:
                budget -= self._chunk(session.sent_up_to, acknowledged, joined, out)
                continue
            message = session.take()
            if message is None:
                break
            frame = self._first_frame(message, session.sent_up_to, acknowledged)
            joined.append(frame)
            budget -= len(frame)
        if joined:
            out.append(b"".join(joined))
        return budget != limit

    def _first_frame(self, message: Outgoing, number: int, acknowledged: int) -> bytes:
        buffers, size = message.buffers, message.size
        count = len(buffers)
        kind = PATIENT if message.is_patient else DATA
        if size + 8 * count > SMALL_MESSAGE:
            sizes = _sizes(buffers)
            frame = HEADER.pack(START, count, len(sizes), number, acknowledged) + sizes
            self._chunks = cut(buffers, self.max_frame)
        elif count == 1:
            frame = HEADER.pack(kind, 1, size, number, acknowledged) + buffers[0]
        else:
            sizes = _sizes(buffers)
            header = HEADER.pack(kind, count, len(sizes) + size, number, acknowledged)
            frame = b"".join((header, sizes, *buffers))
        return frame if self._sealer is None else frame + self._sealer.tag(frame)

    def _chunk(self, number: int, acknowledged: int, joined: list[bytes], out: list[Buffer]) -> int:
        pieces = next(self._chunks, None) if self._chunks is not None else None
        if pieces is None:
            self._chunks = None
            return 0
        size = sum(map(len, pieces))
        header = HEADER.pack(CHUNK, 0, size, number, acknowledged)
        out.append(b"".join((*joined, header)))
        joined.clear()
        out.extend(pieces)
        if self._sealer is not None:
            state = self._sealer.begin()
            state.update(header)
            for piece in pieces:
                state.update(piece)
            joined.append(state.digest())
        return size + HEADER.size


def cut(buffers: Sequence[Buffer], size: int) -> Iterator[list[memoryview]]:
    """Yield the bytes of ``buffers`` in runs of ``size``, the last one shorter; copy nothing."""
    pieces: list[memoryview] = []
    room = size
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            piece, rest = rest[:room], rest[room:]
            pieces.append(piece)
            room -= len(piece)
            if not room:
                yield pieces
                pieces, room = [], size
    if pieces:
        yield pieces


def _sizes(buffers: Sequence[Buffer]) -> bytes:
    return struct.pack(f">{len(buffers)}Q", *map(len, buffers))
