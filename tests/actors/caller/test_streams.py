"""Both ends of a stream, joined without a transport between them."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from greenroom.actors.caller.streams import (
    JOINED_COST,
    MAX_JOINED,
    MAX_PART,
    MOST_JOINED,
    PART_COST,
    WINDOW,
    YIELD_AFTER_S,
    NobodyListensError,
    Sender,
    Stream,
    StreamFailedError,
    cost,
)
from greenroom.actors.messages.queries import (
    BINARY,
    END,
    MORE,
    FailedAnswer,
    Process,
    StreamBegun,
    StreamEnded,
    StreamPart,
)

pytestmark = pytest.mark.anyio

ENDED = StreamEnded(1, 200)
SIZES = st.one_of(
    st.integers(0, 300), st.sampled_from([MAX_JOINED, MAX_PART, MAX_PART + 1, 3 * WINDOW])
)


class Joined:
    """A sender and a stream; what is sent arrives when it is carried."""

    def __init__(self) -> None:
        self.on_the_way: list[StreamPart] = []
        self.at_turn_end: list[Any] = []
        self.reported: list[int] = []  # to the sender
        self.stops = 0
        self.sender = Sender(1, self.on_the_way.append, self.at_turn_end.append)
        self.stream = Stream(StreamBegun(1, 200, (), Process(1, 1, "x")), self)

    def taken(self, size: int) -> None:
        self.reported.append(size)
        self.sender.taken(size)

    def stop(self) -> None:
        self.stops += 1

    def carry(self) -> None:
        while self.at_turn_end:
            self.at_turn_end.pop()()
        parts, self.on_the_way[:] = self.on_the_way[:], []
        for part in parts:
            self.stream.arrived(part)

    def value(self) -> Any:
        pickled = self.stream.take_value(lambda: None)
        return None if pickled is None else pickle.loads(pickled)


async def keep_carrying(joined: Joined, laziness: int) -> None:
    while True:
        for _ in range(laziness):
            await asyncio.sleep(0)
        assert sum(map(cost, joined.on_the_way)) < 2 * WINDOW, "a sender waits for its receiver"
        joined.carry()


@settings(max_examples=50)
@given(st.lists(SIZES, max_size=60), st.integers(1, 5), st.booleans())
async def test_any_bytes_arrive_whole_and_in_order_and_any_values_one_by_one(
    sizes, laziness, are_values
):
    parts = [bytes([number % 256]) * size for number, size in enumerate(sizes)]

    joined = Joined()

    async def make() -> None:
        for part in parts:
            if are_values:
                await joined.sender.send(pickle.dumps(part), BINARY)
            else:
                await joined.sender.send(part)
        joined.carry()
        joined.stream.ended(ENDED)

    async def values() -> None:
        while len(got) < len(parts):
            if (value := joined.value()) is None:
                await asyncio.sleep(0)
            else:
                got.append(value)

    async def data() -> None:
        while (part := await joined.stream.next_bytes()) is not None:
            got.append(part)

    got: list[bytes] = []
    carrying = asyncio.create_task(keep_carrying(joined, laziness))
    making = asyncio.create_task(make())
    await asyncio.wait_for(values() if are_values else data(), 10)
    await making
    carrying.cancel()
    assert got == parts if are_values else b"".join(got) == b"".join(parts)


def test_a_receiver_that_takes_nothing_holds_a_window_and_small_parts_count_too():
    async def held(size: int) -> int:
        joined = Joined()

        async def make() -> None:
            while True:
                await joined.sender.send(b"x" * size)

        making = asyncio.create_task(make())
        for _ in range(WINDOW // JOINED_COST):
            await asyncio.sleep(0)
        for callback in joined.at_turn_end:
            callback()
        making.cancel()
        assert not joined.reported
        return sum(map(cost, joined.on_the_way))

    assert WINDOW <= asyncio.run(held(1)) < WINDOW + PART_COST + 1
    assert WINDOW <= asyncio.run(held(100_000)) < WINDOW + MAX_PART


async def test_few_messages_go_back():
    joined = Joined()
    for number in range(5000):
        await joined.sender.send(pickle.dumps(number), BINARY)
        joined.carry()
        assert joined.value() == number
    assert len(joined.reported) <= 5000 * 300 // (WINDOW // 2) + 1


async def test_the_end_comes_after_the_parts():
    joined = Joined()
    joined.stream.arrived(StreamPart(1, b"a", BINARY))
    joined.stream.ended(FailedAnswer(1, "ReplicaUnavailableError", "it died"))
    assert joined.stream.end is None
    assert await joined.stream.next_bytes() == b"a"
    for _ in range(2):
        with pytest.raises(StreamFailedError, match="it died"):
            await joined.stream.next()
    assert joined.stream.end is not None
    joined.stream.close()
    assert not joined.stops, "there is nothing to stop"


async def test_an_answer_in_place_of_the_end_is_a_failure():
    joined = Joined()
    joined.stream.ended(Any)  # type: ignore[arg-type]
    with pytest.raises(StreamFailedError, match="answered anew"):
        await joined.stream.next()


def test_closing_drops_what_is_here_and_stops_the_replica_once():
    joined = Joined()
    overs: list[int] = []
    joined.stream.when_over(lambda: overs.append(1))
    joined.stream.arrived(StreamPart(1, b"a", BINARY))
    joined.stream.close()
    joined.stream.close()
    joined.stream.arrived(StreamPart(1, b"b", BINARY))
    joined.stream.ended(ENDED)
    assert joined.stream.take_value(lambda: None) is None
    assert isinstance(joined.stream.end, FailedAnswer)
    assert joined.stream.end.kind == "RequestCancelledError"
    joined.stream.when_over(lambda: overs.append(2))
    assert (joined.stops, overs) == (1, [1, 2])


def test_a_stream_that_was_left_is_stopped_by_more_of_it_and_not_by_being_closed():
    joined = Joined()
    joined.stream.leave()
    joined.stream.close()
    assert not joined.stops
    joined.stream.arrived(StreamPart(1, b"more"))
    joined.stream.arrived(StreamPart(1, b"and more"))
    assert joined.stops == 1


@pytest.mark.parametrize("what", ["value", "end", "close"])
def test_a_reader_that_waits_is_woken_once(what):
    joined = Joined()
    woken: list[str] = []
    assert joined.stream.take_value(lambda: woken.append(what)) is None
    if what == "value":
        joined.stream.arrived(StreamPart(1, b"a", BINARY))
        joined.stream.arrived(StreamPart(1, b"b", BINARY))
    elif what == "close":
        joined.stream.close()
    joined.stream.ended(ENDED)
    assert woken == [what]


def test_a_thread_may_take_values_while_others_arrive():
    joined = Joined()
    got: list[int] = []

    def take() -> None:
        while joined.stream.end is None:
            woken = threading.Event()
            pickled = joined.stream.take_value(woken.set)
            if pickled is not None:
                got.append(pickle.loads(pickled))
            elif joined.stream.end is None:
                woken.wait(10)

    thread = threading.Thread(target=take)
    thread.start()
    for number in range(2000):
        joined.stream.arrived(StreamPart(1, pickle.dumps(number), BINARY))
    joined.stream.ended(ENDED)
    thread.join(20)
    assert got == list(range(2000))


class LateParts(deque[StreamPart]):
    """No parts yet; who finds that goes on late, when all has come."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream: Stream | None = stream

    def __bool__(self) -> bool:
        found = len(self) > 0
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.arrived(StreamPart(1, pickle.dumps("the last"), BINARY))
            stream.ended(ENDED)
        return found


def test_a_reader_that_comes_late_to_the_end_misses_no_value():
    joined = Joined()
    assert joined.value() is None
    joined.stream._parts = LateParts(joined.stream)
    assert joined.stream.end is None
    assert joined.value() == "the last"
    assert joined.stream.end == ENDED


async def test_small_parts_of_a_turn_travel_as_one_before_whatever_follows_them():
    joined = Joined()
    for data, ends in ((b"a", MORE), (b"bc", MORE), (b"d", BINARY), (b"e", MORE)):
        await joined.sender.send(data, ends)
    await joined.sender.send(b"f" * MAX_PART)
    await joined.sender.send(b"g")
    joined.at_turn_end.pop()()
    await joined.sender.send(b"h")
    joined.sender.flush()
    found = joined.on_the_way
    assert [part.data for part in found] == [b"abc", b"d", b"e", b"f" * MAX_PART, b"g", b"h"]
    assert found[:2] == [StreamPart(1, b"abc", parts=2), StreamPart(1, b"d", BINARY)]


@pytest.mark.parametrize("ends", [MORE, BINARY])
async def test_what_is_cancelled_midway_leaves_whole_before_what_comes_next(ends):
    """Of a message the rest would else be joined to the next one, and of a body be missing."""
    joined, got = Joined(), []
    parts = [bytes(3 * WINDOW), b"next", bytes(3 * WINDOW)]

    async def read() -> None:
        stream = joined.stream
        while (part := await (stream.next_message if ends else stream.next)()) is not None:
            got.append(part.data)

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(joined.sender.send(parts[0], ends), 0.01)
    tasks = [asyncio.create_task(each) for each in (read(), keep_carrying(joined, 1))]
    await joined.sender.send(parts[1], ends)
    tasks.pop().cancel()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(joined.sender.send(parts[2], ends), 0.01)
    joined.sender.finish()
    joined.carry()
    joined.stream.ended(ENDED)
    await tasks[0]
    assert b"".join(got) == b"".join(parts)
    assert not ends or got == parts


async def test_nothing_comes_after_the_part_that_ends_everything():
    joined = Joined()
    for part in [StreamPart(1, b"code", END), StreamPart(1, b"late", BINARY)]:
        joined.stream.arrived(part)
    assert joined.stream.is_complete
    end = await joined.stream.next()
    assert end is not None
    assert end.data == b"code"
    assert joined.stream.take_value(lambda: None) is None


@pytest.mark.parametrize("size", [MAX_JOINED // 2, 2 * WINDOW])
async def test_tasks_that_send_at_once_all_go_on_and_what_each_sends_stays_whole(size):
    joined, got, marks = Joined(), bytearray(), [b"a", b"b", b"c"]

    async def make(mark: bytes) -> None:
        for _ in range(3 * WINDOW // MAX_JOINED):
            await joined.sender.send(mark * size)

    async def take() -> None:
        while (data := await joined.stream.next_bytes()) is not None:
            got.extend(data)

    async with asyncio.timeout(10):
        taking = asyncio.create_task(take())
        carrying = asyncio.create_task(keep_carrying(joined, 3))
        await asyncio.gather(*map(make, marks))
        carrying.cancel()
        joined.sender.finish()
        joined.carry()
        joined.stream.ended(ENDED)
        await taking
    blocks = [bytes(got[start : start + size]) for start in range(0, len(got), size)]
    assert len(blocks) == 3 * len(marks) * WINDOW // MAX_JOINED
    assert all(block in {mark * size for mark in marks} for block in blocks)


async def test_joined_parts_are_bounded_in_number_and_size():
    joined = Joined()
    for data in (*[b"a"] * (MOST_JOINED + 1), *[b"b" * (MAX_JOINED // 2)] * 3):
        await joined.sender.send(data)
    joined.at_turn_end.pop()()
    found = joined.on_the_way
    assert [part.parts for part in found] == [MOST_JOINED, 2, 2]
    assert max(len(part.data) for part in found) <= MAX_JOINED


async def test_a_generator_that_awaits_nothing_lets_its_parts_leave():
    sent: list[StreamPart] = []
    seen: set[int] = set()
    sender = Sender(1, sent.append, lambda callback: callback())

    async def watch() -> None:
        while len(sent) < 5:
            seen.add(len(sent))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    for _ in range(5):
        time.sleep(2 * YIELD_AFTER_S)  # it computes
        await sender.send(b"x")
    await watching
    assert seen >= {1, 2, 3, 4}


async def test_a_sender_whose_receiver_has_gone_fails():
    joined = Joined()
    making = asyncio.create_task(joined.sender.send(b"x" * 3 * WINDOW))
    await asyncio.sleep(0)
    joined.sender.close()
    with pytest.raises(NobodyListensError):
        await making
    sent = len(joined.on_the_way)
    joined.sender.finish()
    assert len(joined.on_the_way) == sent, "what is left would go past the window"
