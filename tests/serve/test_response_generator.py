"""Streams of values through handles, in one process; over a system see tests/actors."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from typing import Any

import pytest

from greenroom import serve
from greenroom.serve.exceptions import (
    GreenroomError,
    InvalidRequestError,
    RequestCancelledError,
    UnsupportedResultError,
    UserCodeError,
)
from greenroom.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from tests.support.systems import wait_until


class OddError(Exception):
    pass


class Fragile:
    def __reduce__(self) -> Any:
        return _break, ()


def _break() -> None:
    raise ValueError("broken on purpose")


class Streams:
    def __init__(self) -> None:
        self.made = self.ended = 0

    def state(self) -> tuple[int, int]:
        return self.made, self.ended

    def count(self, upto: int) -> Iterator[int]:
        yield from range(upto)

    async def count_async(self, upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            yield number

    async def things(self) -> Any:
        return iter([None, {"a": [1]}, OddError("one"), b"x" * 1_000_000])

    async def endless(self) -> AsyncIterator[int]:
        try:
            while True:
                self.made += 1
                yield self.made - 1
                await asyncio.sleep(0)
        finally:
            self.ended += 1

    async def slow(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            self.ended += 1

    def breaks(self, after: int) -> Iterator[int]:
        yield from range(after)
        raise OddError("odd")

    def unpicklable(self) -> Iterator[Any]:
        yield 1
        yield threading.Lock()

    def fragile(self) -> Iterator[Any]:
        yield 1
        yield Fragile()
        yield 2

    def whole(self) -> int:
        return 1

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=1)
    async def batched(self, upto: list[int]) -> AsyncIterator[list[Any]]:
        for number in range(max(upto)):
            yield [number if number < last else StopIteration for last in upto]


@serve.deployment
class Passes:
    def __init__(self, streams: Any) -> None:
        self.streams = streams.options(stream=True)

    async def doubled(self, upto: int) -> AsyncIterator[int]:
        async for number in self.streams.count.remote(upto):
            yield 2 * number

    def tripled(self, upto: int) -> Iterator[int]:
        for number in self.streams.count_async.remote(upto):
            yield 3 * number


@pytest.fixture(autouse=True)
def _clean():
    yield
    serve.shutdown()


@pytest.fixture
def handle():
    made = serve.run(serve.deployment(Streams).bind(), _local_testing_mode=True)
    return made.options(stream=True)


def state(handle: Any) -> tuple[int, int]:
    """Return how many values ``endless`` has made, and how many generators have ended."""
    made, ended = handle.options(stream=False).state.remote().result(timeout_s=10)
    return made, ended


def wait_ended(handle: Any, count: int = 1) -> None:
    wait_until(lambda: state(handle)[1] == count, 10, "the generator ends")


def test_values_come_in_their_order_to_a_for_loop(handle):
    for method in (handle.count, handle.count_async):
        response = method.remote(1000)
        assert isinstance(response, DeploymentResponseGenerator)
        assert list(response) == list(range(1000))
        assert list(response) == [], "it is over"
    assert list(handle.count.remote(0)) == []


def test_values_may_be_anything_that_can_be_pickled(handle):
    nothing, some, error, large = handle.things.remote()
    assert (nothing, some, large) == (None, {"a": [1]}, b"x" * 1_000_000)
    assert isinstance(error, OddError), "as a value"


@pytest.mark.parametrize("after", [0, 1, 700])
def test_what_the_generator_raises_is_raised_after_the_values_before(handle, after):
    response = handle.breaks.remote(after)
    assert [next(response) for _ in range(after)] == list(range(after))
    with pytest.raises(OddError, match="odd") as caught:
        next(response)
    assert 'raise OddError("odd")' in caught.value.__notes__[0]
    assert list(response) == []


def test_a_value_that_cannot_be_pickled_ends_the_stream(handle):
    response = handle.unpicklable.remote()
    assert next(response) == 1
    with pytest.raises(UnsupportedResultError, match="yielded a lock, which cannot be pickled"):
        next(response)


def test_a_value_that_cannot_be_unpickled_here_ends_the_stream(handle):
    response = handle.fragile.remote()
    assert next(response) == 1
    with pytest.raises(UserCodeError, match="cannot be unpickled here: ValueError: broken"):
        next(response)
    assert list(response) == []


def test_streams_and_whole_values_are_not_taken_for_each_other(handle):
    with pytest.raises(UnsupportedResultError, match="whole returned a int; a call with stream"):
        list(handle.whole.remote())
    whole = handle.options(stream=False)
    for method in (whole.count, whole.count_async):
        with pytest.raises(UnsupportedResultError, match=r"call it with handle.options\(stream"):
            method.remote(3).result(timeout_s=10)


@pytest.mark.anyio
async def test_streaming_batches_stream_through_handles(handle):
    async def all_of(upto: int) -> list[int]:
        return [each async for each in handle.batched.remote(upto)]

    assert await asyncio.gather(all_of(3), all_of(5)) == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_a_reader_that_rests_stops_the_generator(handle):
    response = handle.endless.remote()
    assert next(response) == 0

    def stands_still() -> bool:
        before = state(handle)
        threading.Event().wait(0.1)
        return state(handle) == before

    wait_until(stands_still, 10, "the generator waits")
    assert 10 < state(handle)[0] < 2000, "of 256 bytes each and more, in 256 KiB"
    assert [next(response) for _ in range(5000)] == list(range(1, 5001))
    response.close()
    wait_ended(handle)


def test_closing_ends_the_generator_and_the_iteration(handle):
    with closing(handle.endless.remote()) as response:
        assert next(response) == 0
    wait_ended(handle)
    assert list(response) == []

    async def main() -> None:
        async with aclosing(handle.slow.remote()) as response:
            async for _ in response:
                break
        assert [each async for each in response] == []

    asyncio.run(main())
    wait_ended(handle, 2)


def test_a_stream_that_is_dropped_ends_its_generator(handle):
    for _ in handle.endless.remote():
        break
    gc.collect()
    wait_ended(handle)


def test_cancelling_wakes_who_waits(handle):
    response = handle.slow.remote()
    assert next(response) == 1
    assert not response.cancelled()
    threading.Timer(0.05, response.cancel).start()
    with pytest.raises(RequestCancelledError, match=response.request_id):
        next(response)
    assert response.cancelled()
    wait_ended(handle)
    assert list(response) == []


def test_a_stream_cancelled_before_it_begins_raises_too(handle):
    response = handle.slow.remote()
    response.cancel()
    with pytest.raises(RequestCancelledError):
        next(response)


def test_cancelling_the_task_that_iterates_ends_the_generator(handle):
    async def main() -> None:
        response = handle.slow.remote()
        assert await response.__anext__() == 1
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(response.__anext__(), 0.01)

    asyncio.run(main())
    wait_ended(handle)


def test_streams_pass_through_deployments(handle):
    del handle
    app = Passes.bind(serve.deployment(Streams).bind())
    passes = serve.run(app, _local_testing_mode=True).options(stream=True)
    assert list(passes.doubled.remote(300)) == [2 * number for number in range(300)]
    assert list(passes.tripled.remote(300)) == [3 * number for number in range(300)]


def test_misuse_is_reported(handle):
    response = handle.count.remote(1)
    with pytest.raises(InvalidRequestError, match="is a stream, which cannot be passed on"):
        handle.count.remote(response)

    async def wait() -> None:
        await response

    async def block() -> None:
        next(response)

    with pytest.raises(TypeError, match=r"is a stream; use async for"):
        asyncio.run(wait())
    with pytest.raises(RuntimeError, match=r"would block the running event loop; use async for"):
        asyncio.run(block())
    assert "pending" in repr(response)
    assert list(response) == [0]
    assert "over" in repr(response)


def test_an_unknown_deployment_is_reported_by_the_first_value(handle):
    del handle
    other = DeploymentHandle("Other").options(stream=True)
    with pytest.raises(GreenroomError, match="no endpoint"):
        next(other.remote())
