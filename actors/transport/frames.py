"""Frames: how messages lie in the byte stream of a connection.

    frame   = header, body
    header  = kind u8, 0 u8, buffers u16, body size u32, number u64, acknowledged u64; big-endian

    HELLO    the first frame each way: who sends it, and which session it continues
    DATA     a whole message; body: sizes u64 of its buffers unless it has one, then the buffers
    DELAYED  the same, when the sender can wait some milliseconds for its acknowledgement
    START    a message too large for that; body: the sizes of its buffers
    CHUNK    the next bytes of the message last started; body: at most ``MAX_FRAME`` bytes
    ACK      nothing but its ``acknowledged``
    LOOSE    a whole message of one buffer that is neither numbered nor acknowledged; on a host only

``number`` counts the messages of one session in one direction from 1; chunks carry the number of
their message. ``acknowledged`` is the number up to which the sender of the frame has received.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

HEADER = struct.Struct(">BxHIQQ")
HELLO, DATA, DELAYED, START, CHUNK, ACK, LOOSE = range(1, 8)
SMALL_MESSAGE = 32 * 1024  # one DATA frame; more is copied less when cut into chunks
MAX_FRAME = 1024 * 1024  # of a chunk
MAX_MESSAGE = 2 * 1024**3
MAX_BUFFERS = 4096  # so that the sizes fit any frame
MAX_ROOMS = 256  # of a message in one read; the kernel takes 1024 at once
MAGIC = b"\x89GRNRM\r\n"  # as PNG's: not text, and broken by whatever rewrites line ends
MAX_TEXT = 200  # characters of an address or a release
_HEADER_SIZE = HEADER.size
_HELLO = struct.Struct(">8sQQ")  # magic, process, about

Buffer: TypeAlias = bytes | bytearray | memoryview


class RefusedError(Exception):
    """The peer broke the rules; the text says how."""


@dataclass(frozen=True)
class Hello:
    """The first frame of each end.

    ``process`` is drawn at the start of the sender's process. ``session`` is the sender's number
    for its session with the other end and ``about`` the other end's, as far as the sender knows it,
    else 0. ``received`` counts the messages of ``about``.
    """

    address: str
    release: str
    process: int
    session: int
    about: int
    received: int

    def frame(self) -> bytes:
        """Return the frame."""
        text = f"{self.address}\n{self.release}".encode()
        body = _HELLO.pack(MAGIC, self.process, self.about) + text
        return HEADER.pack(HELLO, 0, len(body), self.session, self.received) + body


def read_hello(session: int, received: int, body: bytes) -> Hello:
    """Read the parts of a HELLO frame; RefusedError when they are anything else."""
    if not body.startswith(MAGIC) or len(body) < _HELLO.size:
        raise RefusedError("not our protocol: the hello is another's; do both run one release?")
    _, process, about = _HELLO.unpack_from(body)
    texts = body[_HELLO.size :].decode("ascii", "replace").split("\n")
    # Printable ASCII only: these go into log lines.
    if len(texts) != 2 or not all(
        text.isascii() and text.isprintable() and 0 < len(text) <= MAX_TEXT for text in texts
    ):
        raise RefusedError("a hello whose address and release are not short, printable ASCII")
    if not session:
        raise RefusedError("a hello of session 0")
    return Hello(texts[0], texts[1], process, session, about, received)


class Assembly:
    """A large message on its way in; its buffers are allocated once and filled in place."""

    def __init__(self, number: int, sizes: Sequence[int]) -> None:
        self.number = number
        self.buffers = [bytearray(size) for size in sizes]
        self.left = sum(sizes)
        self._buffer, self._at = 0, 0

    def rooms(self, limit: int) -> list[memoryview]:
        """Return where the next bytes go, at most ``limit`` of them; while any are ``left``."""
        rooms: list[memoryview] = []
        buffer, at = self._buffer, self._at
        while limit and buffer < len(self.buffers) and len(rooms) < MAX_ROOMS:
            room = memoryview(self.buffers[buffer])[at : at + limit]
            if room:
                rooms.append(room)
                limit -= len(room)
            buffer, at = buffer + 1, 0
        return rooms

    def filled(self, size: int) -> None:
        """Note that so much of ``rooms`` has been written."""
        self.left -= size
        self._at += size
        while self._at > (length := len(self.buffers[self._buffer])):
            self._at -= length
            self._buffer += 1

    def write(self, piece: memoryview) -> None:
        """Take the next bytes, which the caller has checked against ``left``."""
        for room in self.rooms(len(piece)):
            room[:] = piece[: len(room)]
            self.filled(len(room))
            piece = piece[len(room) :]
        if piece:
            self.write(piece)


Frame = tuple[int, int, int, int, bytes]  # kind, buffers, number, acknowledged, body


class FrameReader:
    """Cuts a byte stream into frames, and makes messages of them.

    A chunk goes to ``assembly`` as its bytes arrive, and is yielded, without a body, at its end.
    """

    def __init__(self) -> None:
        self.assembly: Assembly | None = None  # the message whose chunks come
        self._rest = bytearray()  # the beginning of a frame
        self._need = _HEADER_SIZE  # how long it must be before it can be read
        self.chunk: Assembly | None = None  # where the bytes of the chunk under way go
        self._chunk_left = 0
        self._chunk_done: Frame = (CHUNK, 0, 0, 0, b"")

    def rooms(self) -> list[memoryview]:
        """Return where the next bytes of a chunk may be put, past :meth:`frames`; then ``filled``.

        Nowhere between chunks. The last byte of a chunk is for ``frames``, which does whatever
        follows from its end.
        """
        return [] if self.chunk is None else self.chunk.rooms(self._chunk_left - 1)

    def filled(self, size: int) -> None:
        """Note that so much of ``rooms`` has been written."""
        if self.chunk is not None:
            self.chunk.filled(size)
            self._chunk_left -= size

    def frames(self, received: Buffer) -> Iterator[Frame]:
        """Yield the frames that ``received`` completes; RefusedError at the first wrong one.

        The caller runs the iterator to its end, or drops the reader.
        """
        at, unpack = 0, HEADER.unpack_from
        while True:
            if self.chunk is not None:
                piece = memoryview(received)[at : at + self._chunk_left]
                self.chunk.write(piece)
                at += len(piece)
                self._chunk_left -= len(piece)
                if self._chunk_left:
                    return
                self.chunk = None
                yield self._chunk_done
            if self._rest or type(received) is not bytes:  # slices of bytes can be kept
                received, at = self._joined(memoryview(received)[at:]), 0
            size = len(received)
            while size - at >= _HEADER_SIZE:
                kind, buffers, length, number, acknowledged = unpack(received, at)
                start = at + _HEADER_SIZE
                if kind == CHUNK:
                    self._begin_chunk(length, number, acknowledged)
                    at = start
                    break
                if length > SMALL_MESSAGE:
                    raise RefusedError(
                        f"a frame of {length} bytes, over the limit of {SMALL_MESSAGE}"
                    )
                stop = start + length
                if stop > size:
                    self._need = stop - at
                    break
                yield kind, buffers, number, acknowledged, received[start:stop]
                at = stop
            if self.chunk is None:
                self._rest += received[at:]
                return

    def message(self, kind: int, buffers: int, number: int, body: bytes) -> list[Buffer] | None:
        """Return the message that a frame completes, None if it completes none.

        RefusedError where the frame is out of place, before memory is set aside for it.
        """
        assembly = self.assembly
        if kind in {DATA, DELAYED}:
            self.assembly = None  # of a message that was begun here and then sent elsewhere
            return [body] if buffers == 1 else _split(buffers, body)
        if kind == CHUNK and assembly is not None:
            if assembly.left:
                return None
            self.assembly = None
            return [*assembly.buffers]
        if kind == START:
            self.assembly = _begin(number, buffers, body)
        elif kind != ACK or body:
            raise RefusedError(f"a frame of kind {kind} with {len(body)} bytes, out of place")
        return None

    def _joined(self, received: memoryview) -> bytes:
        """Return what was left of the last bytes and these, if they make a frame; else keep all."""
        if len(self._rest) + len(received) < self._need:
            self._rest += received
            return b""
        joined = b"".join((self._rest, received))
        self._rest.clear()
        self._need = _HEADER_SIZE
        return joined

    def _begin_chunk(self, length: int, number: int, acknowledged: int) -> None:
        if length > MAX_FRAME:
            raise RefusedError(f"a chunk of {length} bytes, over the limit of {MAX_FRAME}")
        assembly = self.assembly
        if assembly is None or number != assembly.number or not 0 < length <= assembly.left:
            raise RefusedError(f"a chunk of {length} bytes of message {number}, which has none due")
        self._chunk_done = (CHUNK, 0, number, acknowledged, b"")
        self.chunk = assembly
        self._chunk_left = length


def _sizes(buffers: int, body: bytes) -> tuple[int, ...]:
    if not 0 < buffers <= MAX_BUFFERS or len(body) < 8 * buffers:
        raise RefusedError(f"the sizes of {buffers} buffers in {len(body)} bytes")
    return struct.unpack_from(f">{buffers}Q", body)


def _split(buffers: int, body: bytes) -> list[Buffer]:
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


def _begin(number: int, buffers: int, body: bytes) -> Assembly:
    """Make room for the message that a START frame announces."""
    sizes = _sizes(buffers, body)
    total = sum(sizes)
    if len(body) != 8 * buffers or not total:
        raise RefusedError(f"the start of a message of {total} bytes, malformed")
    if total > MAX_MESSAGE:
        raise RefusedError(f"a message of {total} bytes, over the limit of {MAX_MESSAGE}")
    return Assembly(number, sizes)


class Outgoing:
    """A message until it is acknowledged."""

    __slots__ = ("buffers", "delays_ack", "size", "tag")

    def __init__(self, buffers: list[Buffer], size: int, tag: object, *, delays_ack: bool) -> None:
        self.buffers = buffers
        self.size = size
        self.tag = tag
        self.delays_ack = delays_ack


class FrameWriter:
    """Turns messages into frames; what it returns must be sent in that order."""

    def __init__(self) -> None:
        self.chunks: Iterator[list[memoryview]] | None = None  # to come of the last message
        self._number = 0  # of that message

    def abandon(self) -> None:
        """Leave the message under way as it is; the next one takes its place."""
        self.chunks = None

    def ack(self, acknowledged: int) -> bytes:
        """Return an ACK frame."""
        return HEADER.pack(ACK, 0, 0, 0, acknowledged)

    def begin(self, message: Outgoing, number: int, acknowledged: int) -> bytes:
        """Return the first frame of a message; of a large one :meth:`chunk` gives the others."""
        buffers, size = message.buffers, message.size
        count = len(buffers)
        kind = DELAYED if message.delays_ack else DATA
        if size + 8 * count > SMALL_MESSAGE:
            sizes = struct.pack(f">{count}Q", *map(len, buffers))
            frame = HEADER.pack(START, count, len(sizes), number, acknowledged) + sizes
            self.chunks, self._number = _cut(buffers, MAX_FRAME), number
        elif count == 1:
            frame = HEADER.pack(kind, 1, size, number, acknowledged) + buffers[0]
        else:
            sizes = struct.pack(f">{count}Q", *map(len, buffers))
            header = HEADER.pack(kind, count, len(sizes) + size, number, acknowledged)
            frame = b"".join((header, sizes, *buffers))
        return frame

    def chunk(self, acknowledged: int, joined: list[bytes], out: list[Buffer]) -> int:
        """Append the next chunk to ``out``, behind what is ``joined``; return its size.

        0 behind the last.
        """
        pieces = next(self.chunks, None) if self.chunks is not None else None
        if pieces is None:
            self.chunks = None
            return 0
        size = sum(map(len, pieces))
        header = HEADER.pack(CHUNK, 0, size, self._number, acknowledged)
        out.append(b"".join((*joined, header)))
        joined.clear()
        out.extend(pieces)
        return size + _HEADER_SIZE


def _cut(buffers: Sequence[Buffer], size: int) -> Iterator[list[memoryview]]:
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
