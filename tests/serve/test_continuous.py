"""serve.continuous_batch: streams that join and leave between steps."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import time
import weakref
from contextlib import aclosing
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.replica import context as user_context
from greenroom.actors.replica.context import RunningQuery
from greenroom.serve.decorators.continuous import Stream
from greenroom.serve.exceptions import BackPressureError, GreenroomError, QueryTimeoutError

pytestmark = pytest.mark.anyio


class Counter:
    """Counts to the number asked for; remembers what each step had."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.threads: set[Any] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    @serve.continuous_batch(max_size=2, max_waiting=2)
    async def count(self, streams: list[Stream[int, int]]) -> None:
        await self.gate.wait()
        self.advance(streams)

    @serve.continuous_batch(max_size=2)
    def on_thread(self, streams: list[Stream[int, int]]) -> None:
        self.threads.add(threading.current_thread())
        self.advance(streams)

    def advance(self, streams: list[Stream[int, int]]) -> None:
        self.steps.append([stream.item for stream in streams])
        for stream in streams:
            if stream.item == -1:
                stream.fail(LookupError("no such number"))
            if stream.item == -2:
                raise RuntimeError("the model is broken")
            stream.state = (stream.state or 0) + 1
            stream.put(stream.state)
            if stream.state == stream.item:
                stream.end()

    @serve.continuous_batch
    async def popping(self, streams: list[Stream[int, int]]) -> None:
        while streams:
            stream = streams.pop()
            stream.put(stream.item)
            stream.end()

    @serve.continuous_batch
    async def wrong(self, streams: list[Stream[int, int]]) -> Any:
        return [stream.item for stream in streams]


async def read(stream: Any) -> list[int]:
    return [value async for value in stream]


async def test_streams_join_between_steps_and_leave_when_they_end():
    counter = Counter()
    results = await asyncio.gather(*(read(counter.count(n)) for n in (3, 1, 2)))
    assert results == [[1, 2, 3], [1], [1, 2]]
    assert counter.steps == [[3, 1], [3, 2], [3, 2]]


async def test_a_sync_step_runs_on_a_thread():
    counter = Counter()
    assert await read(counter.on_thread(2)) == [1, 2]
    assert threading.current_thread() not in counter.threads


async def test_a_step_may_change_the_list_that_it_is_given():
    counter = Counter()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*(read(counter.popping(n)) for n in (1, 2))) == [[1], [2]]


async def test_errors_of_one_stream_are_its_own():
    counter = Counter()
    bad, good = await asyncio.gather(
        read(counter.count(-1)), read(counter.count(2)), return_exceptions=True
    )
    assert isinstance(bad, LookupError)
    assert good == [1, 2]


async def test_an_error_of_the_step_is_raised_for_its_streams_alone():
    counter = Counter()
    results = await asyncio.gather(
        *(read(counter.count(n)) for n in (1, -2, 2)), return_exceptions=True
    )
    assert isinstance(results[0], RuntimeError)
    assert isinstance(results[1], RuntimeError)
    assert results[2] == [1, 2]
    with pytest.raises(GreenroomError, match=r"wrong returned a list: a step puts values"):
        await read(counter.wrong(1))


async def test_too_many_that_wait_are_refused():
    counter = Counter()
    counter.gate.clear()
    reads = [asyncio.create_task(read(counter.count(1))) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(BackPressureError, match="2 streams wait for a place"):
        await read(counter.count(1))
    counter.gate.set()
    assert await asyncio.gather(*reads) == [[1]] * 4


async def test_a_stream_that_is_left_gives_its_place_away():
    counter = Counter()
    async with aclosing(counter.count(10**9)) as endless:
        assert await anext(endless) == 1
        waiting = asyncio.create_task(read(counter.count(10**9)))
        third = asyncio.create_task(read(counter.count(3)))
        await asyncio.sleep(0.01)
        assert not third.done()
        waiting.cancel()
        assert await third == [1, 2, 3]
    assert len(counter.steps) < 2000
    steps = len(counter.steps)
    await asyncio.sleep(0.01)
    assert len(counter.steps) <= steps + 1


async def test_a_slow_reader_is_not_stepped_further_and_holds_up_no_other():
    counter = Counter()
    async with aclosing(counter.count(2000)) as slow:
        assert await anext(slow) == 1
        assert await read(counter.count(1000)) == list(range(1, 1001))
        assert sum(2000 in step for step in counter.steps) < 300
        assert await read(slow) == list(range(2, 2001))


async def test_a_stream_ends_at_its_querys_deadline_waiting_or_live():
    async def read_until(counter: Counter, number: int, deadline_at: float) -> list[int]:
        user_context.running.set(RunningQuery(None, deadline_at))
        return await read(counter.count(number))

    counter, now = Counter(), time.monotonic()
    endless = [asyncio.create_task(read_until(counter, 10**9, now + 0.2)) for _ in range(3)]
    assert [type(each) for each in await asyncio.gather(*endless, return_exceptions=True)] == [
        QueryTimeoutError
    ] * 3
    assert await read(counter.count(2)) == [1, 2]


async def test_functions_are_decorated_too_and_instances_pickle():
    @serve.continuous_batch(max_size=3)
    def echo(streams: list[Stream[str, str]]) -> None:
        for stream in streams:
            stream.put(stream.item)
            stream.put(stream.item)
            stream.end()

    assert await read(echo("a")) == ["a", "a"]
    with pytest.raises(TypeError, match="too many positional arguments"):
        await read(echo("a", "b"))
    counter = Doubling()
    assert await read(counter.step(3)) == [6]
    copy = pickle.loads(pickle.dumps(counter))
    assert await read(copy.step(4)) == [8]


class Doubling:
    @serve.continuous_batch
    def step(self, streams: list[Stream[int, int]]) -> None:
        for stream in streams:
            stream.put(2 * stream.item)
            stream.end()


async def test_nothing_is_kept_of_ended_streams_and_instances():
    async def used() -> weakref.ref[Doubling]:
        doubling = Doubling()
        await read(doubling.step(1))
        return weakref.ref(doubling)

    gone = await asyncio.create_task(used())
    gc.collect()
    assert gone() is None
