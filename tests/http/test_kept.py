"""What a worker keeps of what it asks others for."""

import asyncio

import pytest

from greenroom.http_front.link import Kept
from tests.http.wire import turn_over


@pytest.mark.parametrize("strictly", [True, False])
def test_who_waits_for_a_slow_answer_gets_it_or_strictly_the_next_one(monkeypatch, strictly):
    clock, asked, gate = [100.0], [], asyncio.Event()
    monkeypatch.setattr("greenroom.http_front.link.monotonic", lambda: clock[0])

    async def read():
        asked.append(clock[0])
        await gate.wait()
        return len(asked)

    async def run():
        kept = Kept(read)
        first = asyncio.create_task(kept.get(2, strictly=strictly))
        await turn_over()
        clock[0] += 5
        second = asyncio.create_task(kept.get(2, strictly=strictly))
        await turn_over()
        gate.set()
        return await first, await second

    assert asyncio.run(run()) == (1, 2 if strictly else 1)


@pytest.mark.parametrize("strictly", [True, False])
def test_an_answer_that_took_long_is_kept_from_its_arrival_or_strictly_from_its_question(
    monkeypatch, strictly
):
    clock, asked = [100.0], []
    monkeypatch.setattr("greenroom.http_front.link.monotonic", lambda: clock[0])

    async def read():
        asked.append(clock[0])
        clock[0] += 1.5
        return len(asked)

    async def run():
        kept = Kept(read)
        answers = [await kept.get(1) for _ in range(2)]
        clock[0] += 1.1
        return [*answers, await kept.get(2, strictly=strictly)]

    assert asyncio.run(run()) == [1, 1, 2 if strictly else 1]
