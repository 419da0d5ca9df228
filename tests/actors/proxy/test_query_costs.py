"""What a query costs caller, router and replica, without transport and HTTP front.

It is told as calls of our functions, whose number no machine changes.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import greenroom.actors
from tests.actors.one_process import OneProcess

LEASED, ROUTED = 79, 153
QUERIES = 100
DEADLINE_S = 30.0
ROOT = Path(greenroom.actors.__file__).parents[1]
OURS = tuple(f"{ROOT / folder}/" for folder in ("actors", "core", "serve"))


async def answer() -> bytes:
    return b"ok"


@pytest.fixture
def one(request, one_process):
    return one_process(answer, limit=8, **request.param)


def calls_each(one: OneProcess, *, is_leased: bool) -> float:
    """Return how many calls of our functions one query is, when many have come before.

    The median: a timer, or a lease that ran out while other processes had the processor, is not
    what a query costs.
    """
    handle, counts, leases = one.handle, [0], list[bool]()

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        counts[-1] += event == "call" and frame.f_code.co_filename.startswith(OURS)

    async def ask() -> None:
        for _ in range(QUERIES):
            assert await handle.remote() == b"ok"
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for _ in range(QUERIES):
                counts.append(0)
                await handle.remote()
                leases.append(bool(one.caller.leases.held))
        finally:
            sys.setprofile(before)

    one.run(ask())
    assert statistics.median(leases) == is_leased
    return statistics.median(counts[1:])


@pytest.mark.parametrize("one", [{}], indirect=True)
def test_a_query_under_a_lease_is_few_calls(one):
    assert calls_each(one, is_leased=True) <= LEASED


# There are no leases where the queue has a limit.
@pytest.mark.parametrize("one", [{"max_queued_requests": 100}], indirect=True)
def test_a_query_that_the_router_places_is_few_calls(one):
    assert calls_each(one, is_leased=False) <= ROUTED
