"""When a replica tells its router that a slot is free."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from greenroom.actors.messages.control import MeetProxy
from greenroom.actors.runtime.loop import Outbox
from greenroom.core.routing.load import busy
from greenroom.serve.handle import DeploymentHandle
from tests.actors.one_process import OneProcess, Place
from tests.support.timing import until


async def quick(number: int) -> int:
    return number


@pytest.mark.parametrize(
    ("limit", "waits"), [(1, False), (2, True), (3, True)], ids=["one slot", "two", "three"]
)
def test_the_reports_of_a_full_replica_do_not_wait_for_others(
    monkeypatch: pytest.MonkeyPatch, limit: int, waits: bool
) -> None:
    """With one slot the router can send nothing before it knows: 2 ms of waiting for each query."""
    waited: list[Any] = []
    put_patiently = Outbox.put_patiently

    def noting(outbox: Outbox, item: Any, within_s: float) -> None:
        waited.append(item)
        put_patiently(outbox, item, within_s)

    monkeypatch.setattr(Outbox, "put_patiently", noting)
    one = OneProcess(quick, limit=limit)
    try:
        handle = DeploymentHandle("e", None, client=one.client)

        async def ask() -> int:
            return await handle.remote(7)

        assert one.loop.run_until_complete(ask()) == 7
        assert any(field == "answered" for field, _ in waited) is waits
    finally:
        one.close()


HELD: dict[str, asyncio.Event] = {}


async def held(number: int) -> int:
    from tests.actors.replica.test_news import HELD  # noqa: PLC0415  # it may be a copy

    HELD["begun"].set()
    await HELD["gate"].wait()
    return number


def test_reports_of_a_query_reach_its_router_however_many_others_there_are() -> None:
    """Its slot would stay taken for good."""
    one = OneProcess(held, limit=1)
    try:
        handle = DeploymentHandle("e", None, client=one.client)
        others = [Place(one.loop) for _ in range(300)]

        async def ask() -> int:
            HELD.update(begun=asyncio.Event(), gate=asyncio.Event())
            answer = handle.remote(7)
            await HELD["begun"].wait()
            for each in others:
                meet = MeetProxy(proxy=each, process=each.process, is_near=False)
                each.loop.send(one.queries.port.address, meet)
            for _ in range(3):  # passes of the loop, until all have arrived
                await asyncio.sleep(0)
            HELD["gate"].set()
            return await answer

        assert one.loop.run_until_complete(ask()) == 7
        state = one.proxy.dispatcher.router.state
        one.loop.run_until_complete(until(lambda: not busy(state)))
        for each in others:
            each.loop.close()
    finally:
        one.close()
