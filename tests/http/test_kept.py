"""What a worker keeps of what it asks others for."""

import asyncio

import pytest

from greenroom.http_front.link import Kept
from tests.http.wire import turn_over

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("strictly", [True, False])
async def test_who_waits_for_a_slow_answer_gets_it_or_strictly_the_next_one(monkeypatch, strictly):
    clock, asked, gate = [100.0], [], asyncio.Event()
    monkeypatch.setattr("greenroom.http_front.link.monotonic", lambda: clock[0])

    async def read():
        asked.append(clock[0])
        await gate.wait()
        return len(asked)

    kept = Kept(read)
    first = asyncio.create_task(kept.get(2, strictly=strictly))
    await turn_over()
    clock[0] += 5
    second = asyncio.create_task(kept.get(2, strictly=strictly))
    await turn_over()
    gate.set()
    assert (await first, await second) == (1, 2 if strictly else 1)


@pytest.mark.parametrize("strictly", [True, False])
async def test_an_answer_that_took_long_is_kept_from_its_arrival_or_strictly_from_its_question(
    monkeypatch, strictly
):
    clock, asked = [100.0], []
    monkeypatch.setattr("greenroom.http_front.link.monotonic", lambda: clock[0])

    async def read():
        asked.append(clock[0])
        clock[0] += 1.5
        return len(asked)

    kept = Kept(read)
    answers = [await kept.get(1) for _ in range(2)]
    clock[0] += 1.1
    assert ([*answers, await kept.get(2, strictly=strictly)]) == [1, 1, 2 if strictly else 1]
