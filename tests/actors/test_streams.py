"""Both ends of a stream, joined without a transport between them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.actors.messages import (
    END,
    FailedAnswer,
    Process,
    StreamBegun,
    StreamEnded,
    StreamPart,
)
from understudy.actors.streams import (
    COME_ROUND_S,
    MAX_PART,
    PART_COST,
    WINDOW,
    Sender,
    Stream,
    StreamFailedError,
    cost,
    joined,
)

BEGUN = StreamBegun(1, 200, (), Process(1, 1, "x"))


class Joined:
    """A sender and a stream; what is put travels when it is carried."""

    def __init__(self) -> None:
        self.on_the_way: list[Any] = []
        self.most = 0
        self.stopped = 0
        self.sender = Sender(1, self.on_the_way.append)
        self.taken = self.sender.taken
        self.stream = Stream(BEGUN, self)

    def stop(self) -> None:
        self.stopped += 1

    def carry(self) -> None:
        self.most = max(self.most, sum(len(part.data) for part in self.on_the_way))
        for part in joined(self.on_the_way):
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
        for _ in range(WINDOW // PART_COST):  # it lets the loop come round now and then
            await asyncio.sleep(0)
        making.cancel()
        return len(joined.on_the_way)

    assert asyncio.run(run()) == -(-WINDOW // (PART_COST + 1))


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


def test_an_answer_in_place_of_the_end_is_a_failure() -> None:
    async def run() -> None:
        joined = Joined()
        joined.stream.ended(Any)  # type: ignore[arg-type]
        with pytest.raises(StreamFailedError, match="answered anew"):
            await joined.stream.next()

    asyncio.run(run())


def test_small_parts_that_follow_each_other_travel_as_one_and_count_as_all() -> None:
    one, two = StreamPart(1, b"a"), StreamPart(1, b"bc")
    other, end, large = StreamPart(2, b"d"), StreamPart(2, b"", END), StreamPart(1, b"x" * MAX_PART)
    found = joined([one, two, other, end, one, large, two])
    assert [part.data for part in found] == [b"abc", b"d", b"", b"a", large.data, b"bc"]
    assert [part.query_id for part in found] == [1, 2, 2, 1, 1, 1]
    assert cost(found[0]) == cost(one) + cost(two)
    assert found[2] is end


def test_what_is_not_a_part_stays_where_it_is_between_them() -> None:
    part, ended = StreamPart(1, b"a"), StreamEnded(1, 200)
    assert joined([BEGUN, part, part, ended]) == [BEGUN, StreamPart(1, b"aa", parts=2), ended]
    assert joined([]) == []


def test_a_generator_that_computes_and_awaits_nothing_lets_its_parts_leave() -> None:
    async def run() -> list[int]:
        sent: list[StreamPart] = []
        seen: list[int] = []
        sender = Sender(1, sent.append)

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
