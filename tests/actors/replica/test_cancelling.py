"""What is left of tens of thousands of cancelled calls: nothing, anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import os
import random
import signal
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.caller.client import PendingQuery
from greenroom.actors.caller.streams import Stream
from greenroom.actors.messages.queries import Assignment, Query
from greenroom.actors.replica.context import RunningQuery
from greenroom.actors.replica.data_plane import Run
from greenroom.core.routing.load import busy
from greenroom.core.routing.tickets import Ticket
from greenroom.serve.handle import DeploymentHandle
from tests.support.systems import wait_until
from tests.support.timing import until

CALLS = 30_000
KINDS = (PendingQuery, Stream, Ticket, Future, asyncio.Future, asyncio.Task)
# asyncio keeps a hundred cancelled timers, or half of all there are, with their contexts, which
# hold the queries that set them.
HELD_BY_TIMERS = (Run, RunningQuery, Query, Assignment)


class Node:
    """Waits in every way there is, for as long as nobody cancels it."""

    def __init__(self) -> None:
        self.itself = DeploymentHandle("e", None)
        self.gate = threading.Event()

    async def wait(self) -> None:
        await asyncio.sleep(3600)

    async def nested(self) -> None:
        await self.itself.wait.remote()

    async def not_awaited(self) -> None:
        waits = self.itself.wait.remote()
        await asyncio.sleep(3600)
        assert waits

    async def chained(self) -> None:
        await self.itself.of.remote(self.itself.quick.remote())

    async def of(self, _value: int) -> None:
        await asyncio.sleep(3600)

    async def quick(self) -> int:
        return 1

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.001)
    async def batched(self, numbers: list[int]) -> list[int]:
        await asyncio.sleep(3600)
        return numbers

    async def in_a_batch(self) -> int:
        return await self.batched(1)

    async def stream(self) -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await asyncio.sleep(3600)

    async def reads(self) -> None:
        async for _ in self.itself.options(stream=True).stream.remote():
            pass

    def thread(self) -> None:
        self.gate.wait(0.02)


@pytest.fixture
def of_others():
    """What earlier tests of this process have left."""
    return all_of("Batches") + all_of("Outbox")


@pytest.fixture
def one(of_others, one_process):
    del of_others
    return one_process(Node, limit=30, request_timeout_s=3600.0)


METHODS = [
    name for name in vars(Node) if name[0] != "_" and name not in {"batched", "of", "stream"}
]


async def cancel_many(handle: DeploymentHandle, count: int) -> None:
    """Make calls of every kind, and cancel each after a while: queued, running, or answered."""
    rng = random.Random(1)
    calls: deque[Any] = deque()
    for _ in range(count):
        stream = rng.random() < 0.1
        method = "stream" if stream else rng.choice(METHODS)
        calls.append(handle.options(method_name=method, stream=stream).remote())
        if len(calls) > rng.randrange(100):
            calls.rotate(rng.randrange(len(calls)))
            calls.popleft().cancel()
        if not rng.randrange(4):
            await asyncio.sleep(0)
    for call in calls:
        call.cancel()


def counted(kinds: tuple[type, ...]) -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds))


def all_of(kind: str) -> list[Any]:
    return [each for each in gc.get_objects() if type(each).__name__ == kind]


@pytest.mark.slow
@pytest.mark.timeout(400)  # it takes 15 s of computing
def test_nothing_is_left_of_thirty_thousand_cancelled_calls(one, of_others):
    router = one.proxy.dispatcher.router

    async def converge() -> None:
        by_caller = router.state.tickets.by_caller
        while any((busy(router.state), one.queries.running, one.queries.undelivered, *by_caller)):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # for what is put off, such as the news of deliveries

    async def rounds(count: int) -> None:
        await cancel_many(one.handle, count)
        await asyncio.wait_for(converge(), 200)

    one.loop.run_until_complete(rounds(1000))
    before = counted(KINDS)
    timers_before = len(all_of("TimerHandle"))  # also those of earlier tests
    one.loop.run_until_complete(rounds(CALLS))
    assert counted(KINDS) - before == Counter(), "objects that were left over"
    assert max(counted(HELD_BY_TIMERS).values(), default=0) < 300

    replica, caller = one.queries, one.caller
    assert caller.is_idle
    assert (replica.running, replica.undelivered) == (0, 0)
    assert router.next_due_at() is None
    assert len(all_of("TimerHandle")) - timers_before < 1000
    ours = [each for each in all_of("Batches") if each not in of_others]
    assert [each.is_idle for each in ours] == [True]
    assert all(outbox.is_idle for outbox in all_of("Outbox") if outbox not in of_others)


class Waits:
    """Has one slot, and says who has it."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def __call__(self, request: Any) -> str:
        mark = request.query_params["mark"]
        (self.folder / f"{mark} began").touch()
        try:
            while mark != "quick":
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            (self.folder / f"{mark} cancelled").touch()
            raise
        return mark


def test_what_ran_when_its_router_died_ends_with_its_client(own_system, tmp_path):
    own_system.deploy(serve.deployment(max_ongoing_requests=1)(Waits).bind(str(tmp_path)))
    for method in ("GET", "POST"):
        connection = http.client.HTTPConnection("127.0.0.1", own_system.settings.http.port)
        connection.request(method, f"/?mark={method}")
        wait_until((tmp_path / f"{method} began").exists, 10, "it has begun")
        os.kill(own_system.pid_of("proxy"), signal.SIGKILL)
        if method == "POST":
            assert connection.getresponse().status == 503, "it may have run"
        wait_until(lambda: own_system.get("/-/healthz")[0] == 200, 10, "there is another router")
        connection.close()
        wait_until((tmp_path / f"{method} cancelled").exists, 10, "the one that ran is cancelled")
        assert own_system.get("/?mark=quick") == (200, b"quick")


class Deaf:
    """Streams on when it is cancelled, before its first value or after it."""

    async def streams(self, first):
        if first:
            yield first
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        while True:
            yield bytes(100_000)


@pytest.mark.parametrize("first", ["", "begun"])
def test_what_streams_on_when_it_is_cancelled_keeps_no_slot(one_process, first):
    """No caller takes what it sends, so it would wait for room for ever."""
    one = one_process(Deaf, limit=3)

    async def test():
        response = one.handle.options(stream=True).streams.remote(first)
        taking = asyncio.ensure_future(anext(response))
        await until(lambda: one.queries.running and (taking.done() or not first))
        await asyncio.sleep(0)
        response.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await until(lambda: not one.queries.running)

    one.run(test())
