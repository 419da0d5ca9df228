"""Both ends of a stream, joined without a transport between them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.actors.messages.queries import (
    BINARY,
    MORE,
    FailedAnswer,
    Process,
    StreamBegun,
    StreamEnded,
    StreamPart,
)
from greenroom.actors.runtime.streams import (
    COME_ROUND_S,
    JOINED_COST,
    MAX_JOINED,
    MAX_PART,
    MOST_JOINED,
    PART_COST,
    WINDOW,
    Sender,
    Stream,
    StreamFailedError,
    cost,
)

BEGUN = StreamBegun(1, 200, (), Process(1, 1, "x"))


class Joined:
    """A sender and a stream; a turn ends, and what is put travels, when it is carried."""

    def __init__(self) -> None:
        self.on_the_way: list[Any] = []
        self.at_turn_end: list[Any] = []
        self.most = 0
        self.stopped = 0
        self.sender = Sender(1, self.on_the_way.append, self.at_turn_end.append)
        self.taken = self.sender.taken
        self.stream = Stream(BEGUN, self)

    def stop(self) -> None:
        self.stopped += 1

    def end_turn(self) -> None:
        while self.at_turn_end:
            self.at_turn_end.pop()()

    def carry(self) -> None:
        self.end_turn()
        self.most = max(self.most, sum(len(part.data) for part in self.on_the_way))
        for part in self.on_the_way:
            self.stream.arrived(part)
        self.on_the_way.clear()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, 300), st.sampled_from([MAX_PART, MAX_PART + 1, 3 * WINDOW])),
        max_size=60,
    ),
    st.integers(1, 5),
)
def test_any_parts_arrive_whole_in_order_and_within_the_window(
    sizes: list[int], laziness: int
) -> None:
    parts = [bytes([number % 256]) * size for number, size in enumerate(sizes)]

    async def run() -> tuple[bytes, int]:
        joined = Joined()

        async def make() -> None:
            for part in parts:
                await joined.sender.send(part)
            joined.carry()
            joined.stream.ended(StreamEnded(1, 200))

        async def carry() -> None:
            while True:
                for _ in range(laziness):
                    await asyncio.sleep(0)
                joined.carry()

        carrying = asyncio.create_task(carry())
        making = asyncio.create_task(make())
        got = b""
        while (data := await asyncio.wait_for(joined.stream.next(), 10)) is not None:
            got += data
        await making
        carrying.cancel()
        return got, joined.most

    got, most = asyncio.run(run())
    assert got == b"".join(parts)
    assert most <= WINDOW + MAX_PART


def test_many_empty_looking_parts_are_bounded_too() -> None:
    async def run() -> int:
        joined = Joined()

        async def make() -> None:
            while True:
                await joined.sender.send(b".")

        making = asyncio.create_task(make())
        for _ in range(WINDOW // JOINED_COST):  # it lets the loop come round now and then
            await asyncio.sleep(0)
        joined.end_turn()
        making.cancel()
        assert WINDOW <= sum(map(cost, joined.on_the_way)) < WINDOW + PART_COST + 1
        return sum(part.parts for part in joined.on_the_way)

    assert asyncio.run(run()) <= WINDOW // JOINED_COST


def test_what_arrived_before_a_failure_is_given_first() -> None:
    async def run() -> None:
        joined = Joined()
        joined.stream.arrived(StreamPart(1, b"a"))
        joined.stream.ended(FailedAnswer(1, "ReplicaUnavailableError", "it died"))
        assert await joined.stream.next() == b"a"
        for _ in range(2):
            with pytest.raises(StreamFailedError, match="it died"):
                await joined.stream.next()
        joined.stream.close()
        assert not joined.stopped, "there is nobody to stop"

    asyncio.run(run())


def test_closing_stops_the_replica_once() -> None:
    joined = Joined()
    joined.stream.close()
    joined.stream.close()
    joined.stream.ended(StreamEnded(1, 200))
    assert joined.stopped == 1


def test_a_stream_that_was_left_is_stopped_by_more_of_it_and_not_by_being_closed() -> None:
    joined = Joined()
    joined.stream.leave()
    joined.stream.close()
    assert not joined.stopped
    joined.stream.arrived(StreamPart(1, b"more"))
    joined.stream.arrived(StreamPart(1, b"and more"))
    assert joined.stopped == 1


def test_an_answer_in_place_of_the_end_is_a_failure() -> None:
    async def run() -> None:
        joined = Joined()
        joined.stream.ended(Any)  # type: ignore[arg-type]
        with pytest.raises(StreamFailedError, match="answered anew"):
            await joined.stream.next()

    asyncio.run(run())


def test_small_parts_of_a_turn_travel_as_one_before_whatever_follows_them() -> None:
    async def run() -> list[StreamPart]:
        joined = Joined()
        for data, ends in ((b"a", MORE), (b"bc", MORE), (b"d", BINARY), (b"e", MORE)):
            await joined.sender.send(data, ends)
        await joined.sender.send(b"f" * MAX_PART)
        await joined.sender.send(b"g")
        joined.end_turn()
        await joined.sender.send(b"h")
        joined.sender.flush()
        joined.end_turn()
        assert sum(map(cost, joined.on_the_way)) == joined.sender._window._ahead
        return joined.on_the_way

    found = asyncio.run(run())
    assert [part.data for part in found] == [b"abc", b"d", b"e", b"f" * MAX_PART, b"g", b"h"]
    assert found[:2] == [StreamPart(1, b"abc", parts=2), StreamPart(1, b"d", BINARY)]


def test_joined_parts_are_bounded_in_number_and_size() -> None:
    async def run() -> list[StreamPart]:
        joined = Joined()
        for data in (*[b"a"] * (MOST_JOINED + 1), *[b"b" * (MAX_JOINED // 2)] * 3):
            await joined.sender.send(data)
        joined.end_turn()
        return joined.on_the_way

    found = asyncio.run(run())
    assert [part.parts for part in found] == [MOST_JOINED, 2, 2]
    assert max(len(part.data) for part in found) <= MAX_JOINED


def test_a_generator_that_computes_and_awaits_nothing_lets_its_parts_leave() -> None:
    async def run() -> list[int]:
        sent: list[StreamPart] = []
        seen: list[int] = []
        sender = Sender(1, sent.append, lambda callback: callback())

        async def watch() -> None:
            while len(sent) < 5:
                seen.append(len(sent))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        for _ in range(5):
            time.sleep(2 * COME_ROUND_S)
            await sender.send(b"x")
        await watching
        return seen

    assert set(asyncio.run(run())) >= {1, 2, 3, 4}
