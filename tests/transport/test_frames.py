"""Frames: written by one end, cut anywhere on the way, read by the other."""

from __future__ import annotations

import contextlib
import os
import struct

import pytest
from hypothesis import given, settings, strategies as st

from greenroom.actors.transport import frames
from greenroom.actors.transport.frames import (
    ACK,
    CHUNK,
    DATA,
    HEADER,
    HELLO,
    MAX_BUFFERS,
    MAX_FRAME,
    SMALL_MESSAGE,
    START,
    FrameReader,
    FrameWriter,
    Hello,
    Outgoing,
    RefusedError,
    read_hello,
)

OWN = Hello("127.0.0.1:70000", "greenroom 1, Python 3.11", 5, 7, 9, 11)


def written(*messages: list[bytes]) -> bytes:
    """Return the frames of these messages, numbered from 1."""
    writer, out = FrameWriter(), []
    for number, buffers in enumerate(messages, 1):
        size = sum(map(len, buffers))
        joined = [writer.begin(Outgoing(buffers, size, None, delays_ack=False), number, 0)]
        while writer.chunks is not None:
            writer.chunk(0, joined, out)
        out.extend(joined)
    return b"".join(out)


def read(stream: bytes, cuts: list[int], *, in_place: bool = False) -> list[list[bytes]]:
    """Return the messages in a stream that arrives in these pieces."""
    reader, messages, at = FrameReader(), [], 0
    for cut in [*sorted(cuts), len(stream)]:
        piece, at = memoryview(stream)[at:cut], cut
        while in_place and piece and (rooms := reader.rooms()):
            room = rooms[0][: len(piece)]
            room[:] = piece[: len(room)]
            reader.filled(len(room))
            piece = piece[len(room) :]
        for kind, buffers, number, _, body in reader.frames(piece):
            if parts := reader.message(kind, buffers, number, body):
                messages.append([bytes(each) for each in parts])
    return messages


MESSAGES = [
    [b"small"],
    [b"pickle", b"buffer", b"", b"another"],
    [os.urandom(SMALL_MESSAGE), b"x" * 10],
    [b""],
    [b"p", os.urandom(MAX_FRAME), b"", os.urandom(3 * MAX_FRAME + 5)],
    [b"behind it"],
]


@settings(max_examples=60)
@given(st.data(), st.booleans())
def test_messages_arrive_whole_however_the_stream_is_cut(data, in_place):
    stream = written(*MESSAGES)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    assert read(stream, cuts, in_place=in_place) == MESSAGES


def test_small_messages_arrive_byte_by_byte():
    stream = written(*MESSAGES[:2], *MESSAGES[3:4])
    assert read(stream, list(range(len(stream)))) == [*MESSAGES[:2], *MESSAGES[3:4]]


def test_all_but_the_first_buffer_can_be_written_to():
    reader = FrameReader()
    ((kind, buffers, number, _, body),) = reader.frames(written([b"pickle", b"buffer"]))
    first, second = reader.message(kind, buffers, number, body)
    assert (type(first), type(second)) == (bytes, bytearray)


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (HEADER.pack(DATA, 1, SMALL_MESSAGE + 1, 1, 0), "over the limit of 32768"),
        (HEADER.pack(71, 1, 2**31, 1, 0), "over the limit"),
        (HEADER.pack(CHUNK, 0, 10, 1, 0), "a chunk of 10 bytes of message 1, which has none due"),
        (HEADER.pack(CHUNK, 0, MAX_FRAME + 1, 1, 0), f"over the limit of {MAX_FRAME}"),
        (HEADER.pack(START, 0, 0, 1, 0), "the sizes of 0 buffers"),
        (HEADER.pack(START, 2, 8, 1, 0) + bytes(8), "the sizes of 2 buffers in 8 bytes"),
        (HEADER.pack(START, 1, 8, 1, 0) + bytes(8), "the start of a message of 0 bytes"),
        (HEADER.pack(START, 1, 8, 1, 0) + struct.pack(">Q", 2**40), "over the limit of 2147483648"),
        (
            HEADER.pack(START, MAX_BUFFERS + 1, SMALL_MESSAGE, 1, 0) + bytes(SMALL_MESSAGE),
            f"the sizes of {MAX_BUFFERS + 1} buffers",
        ),
        (HEADER.pack(DATA, 2, 17, 1, 0) + bytes(15) + b"\5a", "buffers of 5 bytes in a body of 1"),
    ],
)
def test_a_malformed_frame_is_refused_before_memory_is_set_aside(stream, said):
    with pytest.raises(RefusedError, match=said):
        read(stream, [])


@settings(max_examples=300)
@given(st.data())
def test_a_stream_with_changed_bytes_is_read_or_refused_and_nothing_else(data):
    stream = bytearray(written([b"a" * 50], [b"b", b"c" * 30], [b"d" * (SMALL_MESSAGE + 9)]))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, 200))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RefusedError):
        read(bytes(stream), data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))


def test_a_hello_is_read_as_it_was_written():
    ((kind, _, session, received, body),) = FrameReader().frames(OWN.frame())
    assert kind == HELLO
    assert read_hello(session, received, body) == OWN


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not our protocol"),
        (b"\x89USTDY\r\n" + bytes(60), "not our protocol"),
        (frames.MAGIC, "not our protocol"),
        (OWN.frame()[HEADER.size :] + b"\nmore", "short, printable ASCII"),
        (OWN.frame()[HEADER.size :] + b"\x1b[31m", "short, printable ASCII"),
        (OWN.frame()[HEADER.size :] + b"x" * 200, "short, printable ASCII"),
        (OWN.frame()[HEADER.size :] + b"\xff", "short, printable ASCII"),
    ],
)
def test_a_hello_that_is_none_is_refused(body, said):
    with pytest.raises(RefusedError, match=said):
        read_hello(1, 0, body)
    with pytest.raises(RefusedError, match="session 0"):
        read_hello(0, 0, OWN.frame()[HEADER.size :])


def test_an_acknowledgement_is_a_header():
    ((kind, buffers, number, acknowledged, body),) = FrameReader().frames(FrameWriter().ack(17))
    assert (kind, buffers, number, acknowledged, body) == (ACK, 0, 0, 17, b"")
