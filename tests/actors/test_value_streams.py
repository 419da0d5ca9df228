"""Streams of values: the two ends joined, without processes."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.actors.caller.value_streams import ValueStream
from greenroom.actors.messages.queries import BINARY, FailedAnswer, StreamEnded, StreamPart
from greenroom.actors.runtime.streams import MAX_PART, WINDOW, Sender, cost

END = StreamEnded(1, 200)
KILO = 1024


def nothing() -> None:
    """Wake nobody."""


class Joined:
    """A sender and a stream, and the wire between them."""

    def __init__(self) -> None:
        self.wire: deque[StreamPart] = deque()
        self.told = 0
        self.messages = 0  # back to the sender
        self.stops = 0
        self.sender = Sender(1, self.wire.append, lambda callback: callback())
        self.stream = ValueStream(self, lambda callback: callback())

    def taken(self, size: int) -> None:
        self.told += size
        self.messages += 1
        self.sender.taken(size)

    def stop(self) -> None:
        self.stops += 1

    async def send(self, value: Any) -> None:
        await self.sender.send(pickle.dumps(value), BINARY)

    def carry(self) -> None:
        while self.wire:
            self.stream.arrived(self.wire.popleft())

    def take(self) -> Any:
        pickled = self.stream.next(nothing)
        return None if pickled is None else pickle.loads(pickled)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 200), st.sampled_from([64 * KILO, 300 * KILO, 1200 * KILO])),
        max_size=40,
    ),
    rest=st.integers(0, 5),
)
def test_every_value_arrives_in_order_and_little_is_held(sizes: list[int], rest: int) -> None:
    async def run() -> None:
        joined = Joined()
        values = [bytes([number % 256]) * size for number, size in enumerate(sizes)]

        async def make() -> None:
            for value in values:
                await joined.send(value)

        making = asyncio.create_task(make())
        got = []
        idle = 0
        while len(got) < len(values):
            for _ in range(rest + 1):
                await asyncio.sleep(0)
            assert sum(map(cost, joined.wire)) < 2 * WINDOW
            joined.carry()
            value = joined.take()
            idle = idle + 1 if value is None else 0
            assert idle < 100, "it goes on"
            if value is not None:
                got.append(value)
        await making
        assert got == values

    asyncio.run(run())


def test_a_reader_that_rests_holds_a_window_even_of_large_values() -> None:
    async def run() -> None:
        joined = Joined()

        async def make() -> None:
            while True:
                await joined.send(b"x" * 100 * KILO)

        making = asyncio.create_task(make())
        for _ in range(1000):
            await asyncio.sleep(0)
            joined.carry()
        assert joined.told == 0
        held = sum(len(value.pickled) for value in joined.stream._values)
        assert held < WINDOW + MAX_PART
        making.cancel()

    asyncio.run(run())


def test_few_messages_go_back() -> None:
    async def run() -> None:
        joined = Joined()
        for number in range(5000):
            await joined.send(number)
            joined.carry()
            assert joined.take() == number
        assert joined.messages <= 5000 * 300 // (WINDOW // 2) + 1

    asyncio.run(run())


def test_the_end_comes_after_the_values() -> None:
    async def run() -> None:
        joined = Joined()
        await joined.send("a")
        joined.carry()
        joined.stream.ended(END)
        assert joined.stream.end is None
        assert joined.take() == "a"
        assert (joined.take(), joined.stream.end) == (None, END)
        joined.stream.close()
        assert not joined.stops, "there is nobody to stop"

    asyncio.run(run())


def test_closing_drops_what_is_there_and_stops_the_replica_once() -> None:
    async def run() -> None:
        joined = Joined()
        overs: list[int] = []
        joined.stream.when_over(lambda: overs.append(1))
        await joined.send("a")
        joined.carry()
        joined.stream.close()
        joined.stream.close()
        await joined.send("b")
        joined.carry()
        joined.stream.ended(END)
        assert joined.take() is None
        end = joined.stream.end
        assert isinstance(end, FailedAnswer)
        assert end.kind == "RequestCancelledError"
        joined.stream.when_over(lambda: overs.append(2))
        assert (joined.stops, overs) == (1, [1, 2])

    asyncio.run(run())


@pytest.mark.parametrize("what", ["value", "end", "close"])
def test_who_waits_is_woken_once(what: str) -> None:
    async def run() -> None:
        joined = Joined()
        woken: list[str] = []
        assert joined.stream.next(lambda: woken.append(what)) is None
        if what == "value":
            await joined.send("a")
            await joined.send("b")
            joined.carry()
        elif what == "end":
            joined.stream.ended(END)
        else:
            joined.stream.close()
        joined.stream.ended(END)
        assert woken == [what]

    asyncio.run(run())


def test_a_thread_may_take_while_values_arrive() -> None:
    joined = Joined()
    got: list[int] = []

    def take() -> None:
        while joined.stream.end is None:
            woken = threading.Event()
            pickled = joined.stream.next(woken.set)
            if pickled is not None:
                got.append(pickle.loads(pickled))
            elif joined.stream.end is None:
                woken.wait(10)

    thread = threading.Thread(target=take)
    thread.start()
    for number in range(2000):
        joined.stream.arrived(StreamPart(1, pickle.dumps(number), BINARY))
    joined.stream.ended(END)
    thread.join(20)
    assert got == list(range(2000))
