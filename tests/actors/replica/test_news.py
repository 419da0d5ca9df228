"""When a replica tells its router that a slot is free."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from greenroom.actors.messages.control import MeetProxy
from greenroom.actors.runtime.loop import Outbox
from greenroom.core.routing.load import busy
from tests.actors.one_process import Place
from tests.support.timing import until


async def quick(number: int) -> int:
    return number


@pytest.mark.parametrize(
    ("limit", "waits"), [(1, False), (2, True), (3, True)], ids=["one slot", "two", "three"]
)
def test_the_reports_of_a_full_replica_do_not_wait_for_others(
    one_process, monkeypatch, limit, waits
):
    """With one slot the router can send nothing before it knows: 2 ms of waiting for each query."""
    waited: list[Any] = []
    put_patiently = Outbox.put_patiently

    def noting(outbox: Outbox, item: Any, within_s: float) -> None:
        waited.append(item)
        put_patiently(outbox, item, within_s)

    monkeypatch.setattr(Outbox, "put_patiently", noting)
    one = one_process(quick, limit=limit)

    async def ask() -> int:
        return await one.handle.remote(7)

    assert one.run(ask()) == 7
    assert any(field == "answered" for field, _ in waited) is waits


HELD: dict[str, asyncio.Event] = {}


async def held(number: int) -> int:
    from tests.actors.replica.test_news import HELD  # noqa: PLC0415  # it may be a copy

    HELD["begun"].set()
    await HELD["gate"].wait()
    return number


def test_reports_of_a_query_reach_its_router_however_many_others_there_are(one_process):
    """Its slot would stay taken for good."""
    one = one_process(held, limit=1)
    others = [Place(one.loop) for _ in range(300)]

    async def ask() -> int:
        HELD.update(begun=asyncio.Event(), gate=asyncio.Event())
        answer = one.handle.remote(7)
        await HELD["begun"].wait()
        for each in others:
            meet = MeetProxy(proxy=each, process=each.process, is_near=False)
            each.loop.send(one.queries.port.address, meet)
        for _ in range(3):  # passes of the loop, until all have arrived
            await asyncio.sleep(0)
        HELD["gate"].set()
        return await answer

    assert one.run(ask()) == 7
    one.run(until(lambda: not busy(one.proxy.dispatcher.router.state)))
    for each in others:
        each.loop.close()
