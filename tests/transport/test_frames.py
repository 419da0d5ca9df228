from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.actors.transport.connection import (
    WELCOME_BODY,
    Acknowledged,
    Closed,
    Connection,
    Limits,
    MessageReceived,
    Refused,
)
from greenroom.actors.transport.frames import (
    HEADER,
    MAX_BUFFERS,
    SMALL_MESSAGE,
    FrameKind,
    Sealer,
)
from greenroom.actors.transport.handshake import Role
from tests.transport.pairs import KEY, Link, Process, joined, nonce, only_refusal, pieces, session

LARGE = bytes(range(256)) * 1100  # two chunks
SAMPLES = [
    [b""],
    [b"small"],
    [b"pickle", b"", b"out of band"],
    [b"p" * (SMALL_MESSAGE - 8)],
    [b"p" * (SMALL_MESSAGE - 7)],
    [b"pickle", LARGE, b"", b"tail", LARGE],
    [b"after"],
]

both_kinds = pytest.mark.parametrize("remote", [False, True])


def sent_stream(samples: list[list[bytes]], *, remote: bool) -> tuple[Process, Link, bytes]:
    """Return a joined receiver, its link, and the bytes of ``samples`` on their way to it."""
    left, right, link = joined(remote=remote)
    for sample in samples:
        session(left, right).send(sample)
    link.collect()
    stream = bytes(link.transit[0])
    link.transit[0].clear()
    right.events.clear()
    return right, link, stream


@both_kinds
@pytest.mark.parametrize("size", [None, 1000, 65536])
def test_messages_arrive_in_order_and_whole(remote: bool, size: int | None) -> None:
    left, right, link = joined(remote=remote)
    for sample in SAMPLES:
        session(left, right).send(sample)
        session(right, left).send(sample)
    link.run(size)
    assert left.messages() == right.messages() == SAMPLES


@both_kinds
def test_out_of_band_buffers_arrive_writable_and_leave_uncopied(remote: bool) -> None:
    left, right, link = joined(remote=remote)
    large = bytearray(LARGE)
    session(left, right).send([b"pickle", memoryview(large), memoryview(b"small")])
    out = link.ends[0].data_to_send()
    assert any(isinstance(each, memoryview) and each.obj is large for each in out)
    events = link.ends[1].receive_data(b"".join(out))
    (message,) = [each for each in events if isinstance(each, MessageReceived)]
    for buffer in message.buffers[1:]:
        memoryview(buffer)[0] = 1
    session(left, right).send([b"pickle", b"oob"])
    (event,) = link.ends[1].receive_data(b"".join(link.ends[0].data_to_send()))
    assert isinstance(event, MessageReceived)
    memoryview(event.buffers[1])[0] = 1


@settings(deadline=None)
@given(st.lists(st.integers(700, 300_000), min_size=1, max_size=12))
def test_large_messages_read_to_their_place_arrive_as_any(sizes: list[int]) -> None:
    right, link, stream = sent_stream(SAMPLES, remote=False)
    connection, read, placed = link.ends[1], 0, 0
    while read < len(stream):
        size = sizes[read % len(sizes)]
        rooms = connection.rooms()
        if rooms:
            piece = stream[read : read + min(size, sum(map(len, rooms)))]
            left = memoryview(piece)
            for room in rooms:
                part, left = left[: len(room)], left[len(room) :]
                room[: len(part)] = part
            connection.filled(len(piece))
            placed += len(piece)
        else:
            piece = stream[read : read + (25 if connection.is_between_chunks else size)]
            right.events += connection.receive_data(piece)
        read += len(piece)
    assert right.messages() == SAMPLES
    assert placed > 0


def test_bytes_that_have_a_tag_are_read_to_no_place_of_their_own() -> None:
    _, link, stream = sent_stream([[LARGE]], remote=True)
    link.ends[1].receive_data(stream[: len(stream) // 2])
    assert not link.ends[1].rooms()
    assert not link.ends[1].is_between_chunks


@given(st.lists(st.integers(0, 10**6), max_size=12), st.booleans())
def test_any_split_of_the_stream_gives_the_same_events(cuts: list[int], remote: bool) -> None:
    right, link, stream = sent_stream(SAMPLES, remote=remote)
    for piece in pieces(stream, [cut % len(stream) for cut in cuts]):
        right.events += link.ends[1].receive_data(piece)
    assert right.messages() == SAMPLES
    assert len(right.events) == len(SAMPLES)


@both_kinds
def test_single_bytes_give_the_same_events(remote: bool) -> None:
    right, link, stream = sent_stream([[b"one"], [b"p", b"two"]], remote=remote)
    for at in range(len(stream)):
        right.events += link.ends[1].receive_data(memoryview(stream)[at : at + 1])
    assert right.messages() == [[b"one"], [b"p", b"two"]]


@both_kinds
def test_a_reused_receive_buffer_does_no_harm(remote: bool) -> None:
    right, link, stream = sent_stream(SAMPLES, remote=remote)
    room = bytearray(5000)
    for at in range(0, len(stream), len(room)):
        piece = stream[at : at + len(room)]
        room[: len(piece)] = piece
        right.events += link.ends[1].receive_data(memoryview(room)[: len(piece)])
        room[:] = b"\xff" * len(room)
    assert right.messages() == SAMPLES


FEW = [[b"first"], [b"p", b"oob"], [b"x", LARGE[: SMALL_MESSAGE + 1]], [b"last"]]


@given(st.integers(0, 10**9), st.integers(0, 7), st.booleans())
def test_any_bit_flip_in_remote_frames_is_refused(
    position: int, bit: int, near_an_end: bool
) -> None:
    right, link, stream = sent_stream(FEW, remote=True)
    position %= len(stream)
    if near_an_end:  # most of the stream is one large body
        position = position % 200 if position % 2 else len(stream) - 1 - position % 200
    changed = bytearray(stream)
    changed[position] ^= 1 << bit
    right.events += link.ends[1].receive_data(bytes(changed))
    right.events += link.ends[1].receive_eof()
    *messages, end = right.events
    assert isinstance(end, (Refused, Closed))
    assert isinstance(end, Refused) or "inside" in end.reason
    assert right.messages() == FEW[: len(messages)]
    assert len(messages) < len(FEW)


@given(st.integers(0, 10**9), st.booleans())
def test_a_truncated_stream_delivers_whole_messages_only(position: int, remote: bool) -> None:
    right, link, stream = sent_stream(FEW, remote=remote)
    right.events += link.ends[1].receive_data(stream[: position % len(stream)])
    right.events += link.ends[1].receive_eof()
    *messages, end = right.events
    assert isinstance(end, Closed)
    assert right.messages() == FEW[: len(messages)]


def frames_of(stream: bytes, tag_size: int) -> list[bytes]:
    frames, at = [], 0
    while at < len(stream):
        end = at + HEADER.size + HEADER.unpack_from(stream, at)[2] + tag_size
        frames.append(stream[at:end])
        at = end
    return frames


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (1, 0)])
def test_replayed_reordered_and_missing_frames_are_refused(
    remote: bool, order: tuple[int, ...]
) -> None:
    _, link, stream = sent_stream([[b"one"], [b"two"], [b"three"]], remote=remote)
    frames = frames_of(stream, 16 if remote else 0)
    events = link.ends[1].receive_data(b"".join(frames[index] for index in order))
    assert isinstance(events[-1], Refused)
    assert sum(isinstance(event, MessageReceived) for event in events) == len(events) - 1
    assert link.ends[1].receive_data(frames[1]) == []


def test_frames_of_another_connection_are_refused() -> None:
    _, _, stream = sent_stream([[b"one"]], remote=True)
    _, link, _ = sent_stream([[b"one"]], remote=True)
    assert "tag is wrong" in only_refusal(link.ends[1].receive_data(stream))


def test_a_frame_reflected_to_its_sender_is_refused() -> None:
    _, link, stream = sent_stream([[b"one"]], remote=True)
    assert "tag is wrong" in only_refusal(link.ends[0].receive_data(stream))


def frame(kind: int, buffers: int, body: bytes, number: int, ack: int = 0) -> bytes:
    return HEADER.pack(kind, buffers, len(body), number, ack) + body


SIZE = 8 * b"\0"
START, CHUNK, DATA, ACK = (
    int(kind) for kind in (FrameKind.START, FrameKind.CHUNK, FrameKind.DATA, FrameKind.ACK)
)


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (HEADER.pack(DATA, 1, 2**32 - 1, 1, 0), "a frame of 4294967295 bytes"),
        (HEADER.pack(CHUNK, 0, 2**32 - 1, 1, 0), "bytes, over the limit of 1048576"),
        (HEADER.pack(CHUNK, 0, 5, 1, 0), "which has none due"),
        (frame(START, 1, (2**40).to_bytes(8, "big"), 1), "over the limit of"),
        (frame(START, 2, b"\xff" * 16, 1), "over the limit of"),
        (frame(START, 1, SIZE, 1), "malformed"),
        (frame(START, 1, SIZE + b"x", 1), "malformed"),
        (frame(START, 0, b"", 1), "sizes of 0 buffers"),
        (frame(START, MAX_BUFFERS + 1, b"", 1), "sizes of 4097 buffers"),
        (frame(DATA, 0, b"", 1), "sizes of 0 buffers"),
        (frame(DATA, 2, SIZE, 1), "sizes of 2 buffers in 8 bytes"),
        (frame(DATA, 2, SIZE + SIZE + b"x", 1), "buffers of 0 bytes in a body of 1"),
        (frame(DATA, 1, b"", 2), "message 2 where 1 is due"),
        (frame(DATA, 1, b"", 1, 9), "acknowledges message 9"),
        (frame(ACK, 0, b"x", 0), "out of place"),
        (frame(77, 0, b"", 0), "a frame of kind 77"),
        (frame(int(FrameKind.WELCOME), 0, bytes(WELCOME_BODY.size), 1), "out of place"),
        (
            frame(START, 1, (9).to_bytes(8, "big"), 1) + frame(DATA, 1, b"", 1),
            "message 1 inside message 1",
        ),
        (
            frame(START, 1, (9).to_bytes(8, "big"), 1) + HEADER.pack(CHUNK, 0, 10, 1, 0),
            "which has none due",
        ),
        (
            frame(START, 1, (9).to_bytes(8, "big"), 1) + HEADER.pack(CHUNK, 0, 0, 1, 0),
            "which has none due",
        ),
    ],
)
def test_a_peer_that_breaks_the_rules_is_refused(stream: bytes, said: str) -> None:
    _, link, _ = sent_stream([], remote=False)
    assert said in only_refusal(link.ends[1].receive_data(stream))
    _, link, _ = sent_stream([], remote=False)
    events = [event for byte in stream for event in link.ends[1].receive_data(bytes([byte]))]
    assert said in only_refusal(events)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "a welcome of 0 bytes"),
        (WELCOME_BODY.pack(0, 0, 2**18, 1), "a welcome of life 0"),
        (WELCOME_BODY.pack(1, 0, 100, 1), "chunks of 100 bytes"),
        (WELCOME_BODY.pack(1, 5, 2**18, 1), "about life 5 in life 1"),
    ],
)
def test_a_malformed_welcome_is_refused(body: bytes, said: str) -> None:
    left, right = Process("a"), Process("b")
    link = Link(left, right, remote=False)
    link.collect()
    link.carry(0)  # the acceptor knows the dialer; the dialer's incarnation decides
    link.collect()
    link.carry(1)
    link.collect()
    link.transit[1].clear()
    assert said in only_refusal(
        link.ends[0].receive_data(frame(int(FrameKind.WELCOME), 0, body, 1))
    )


def test_data_before_the_welcome_is_refused() -> None:
    left = Process("a")
    link = Link(left, Process("b"), remote=False)
    link.collect()
    link.carry(0)
    link.collect()
    link.carry(1)
    assert "before the welcome" in only_refusal(
        link.ends[0].receive_data(frame(DATA, 1, b"early", 1))
    )


def test_a_limit_bounds_what_is_handed_out_at_once() -> None:
    left, right, link = joined(remote=True)
    session(left, right).send([bytes(3_000_000)])
    sizes = []
    while out := link.ends[0].data_to_send(100_000):
        sizes.append(sum(map(len, out)))
        link.ends[1].receive_data(b"".join(out))
    assert max(sizes) < 100_000 + Limits().max_frame + 100
    assert sum(sizes) > 3_000_000


def test_the_smaller_longest_chunk_of_both_sides_is_used() -> None:
    left, right = Process("a", limits=Limits(max_frame=2**21)), Process("b")
    link = Link(left, right, remote=True)
    link.run()
    session(left, right).send([bytes(2**21)])
    link.run()
    assert right.messages() == [[bytes(2**21)]]


@both_kinds
def test_acknowledgements_ride_on_messages_and_go_alone(remote: bool) -> None:
    left, right, link = joined(remote=remote)
    for number in range(3):
        session(left, right).send([b"x"], tag=number)
    link.run()
    assert link.ends[1].ack_due == 3
    assert len(session(left, right)) == 3
    session(right, left).send([b"reply"])
    link.run()
    assert link.ends[1].ack_due == 0
    assert left.of(Acknowledged) == [Acknowledged([0, 1, 2])]
    assert link.ends[0].ack_due == 1
    link.ends[0].acknowledge()
    link.run()
    assert len(session(right, left)) == 0
    assert right.of(Acknowledged) == []  # nothing was tagged


def test_a_tag_covers_counter_header_and_body() -> None:
    first, second = Sealer(KEY), Sealer(KEY)
    assert first.tag(b"frame") == second.tag(b"frame")
    assert first.tag(b"frame") != Sealer(KEY).tag(b"frame")
    state = second.begin()
    state.update(b"fra")
    state.update(b"me")
    first = Sealer(KEY)
    first.tag(b"")
    assert state.digest() == first.tag(b"frame")


def test_connections_of_one_kind_do_not_talk_to_the_other() -> None:
    left = Connection(Role.DIALER, Process("a").sessions)
    right = Connection(Role.ACCEPTOR, Process("b").sessions, key=KEY, nonce=nonce())
    (event,) = right.receive_data(b"".join(left.data_to_send()))
    assert event == Refused("the peer's kind is local, this end's is remote")
