"""Calls leave nothing to the garbage collector, which would take its time of each of them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request

from greenroom import serve
from greenroom.actors.caller.client import PendingQuery
from greenroom.actors.caller.streams import Stream
from greenroom.actors.caller.uploads import Upload
from greenroom.actors.messages.queries import HttpAnswer, Query
from greenroom.actors.replica.data_plane import Run
from greenroom.core.routing.tickets import BODY
from greenroom.serve.decorators.continuous import Stream as LiveStream
from greenroom.serve.handle import DeploymentHandle
from tests.support.timing import until

KINDS = (LiveStream, PendingQuery, Query, Run, Stream, asyncio.Task)
CALLS = 20


class Node:
    """Is called in every way there is."""

    def __init__(self) -> None:
        self.itself = DeploymentHandle("e", None)

    async def quick(self) -> int:
        return 1

    async def nested(self) -> int:
        return int(await self.itself.quick.remote())

    async def stream(self) -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async def reads(self) -> int:
        return sum([each async for each in self.itself.options(stream=True).stream.remote()])

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.001)
    async def batched(self, numbers: list[int]) -> list[int]:
        return numbers

    async def in_a_batch(self) -> int:
        return int(await self.batched(1))

    @serve.continuous_batch
    async def step(self, streams: list[LiveStream[int, int]]) -> None:
        for stream in streams:
            stream.put(stream.item)
            stream.end()

    async def steps(self) -> int:
        return sum([each async for each in self.step(3)])

    async def __call__(self, request: Request) -> int:
        return sum([len(part) async for part in request.stream()])


@pytest.fixture
def one(one_process):
    return one_process(Node, limit=30)


@pytest.mark.parametrize("method", ["quick", "nested", "reads", "in_a_batch", "steps"])
def test_no_call_is_part_of_a_cycle_when_it_is_over(one, method):
    async def calls() -> None:
        for _ in range(CALLS):
            await one.handle.options(method_name=method).remote()
        await asyncio.sleep(0.05)  # what the last one has set off

    one.run(calls())
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        one.run(calls())
        gc.collect()
        found: Counter[Any] = Counter(type(each) for each in gc.garbage if isinstance(each, KINDS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert max(found.values(), default=0) < CALLS / 2, found


def test_a_query_that_its_body_followed_holds_no_upload_when_it_is_over(one):
    """It may have kept two megabytes."""
    uploads = []

    def send(upload: Upload) -> None:
        uploads.append(weakref.ref(upload))
        upload.end(b"body")

    async def ask() -> None:
        answer = await one.http(send, method="POST", follows=BODY)
        assert isinstance(answer, HttpAnswer), answer
        assert answer.body == b"4"

    gc.disable()
    try:
        one.run(ask())
        one.run(until(lambda: [each() for each in uploads] == [None]))  # of what it has set off
    finally:
        gc.enable()
