"""What comparing adds to the way of a primary's query: CPU time, ``-m benchmarks.comparing_path``.

A caller, a proxy and the primary's replica, the real ones, run on one loop in one process, with
every message pickled and unpickled as if they were several; the shadow's replica answers at once
and throws away what it is sent, as one on another host would. A latency is the thread's CPU time
from a query's submission to its answer, so what else the machine does is not in it, and the work of
sending answers to be compared is in that of the queries which have to wait for it. Short blocks,
without a shadow, with one, and with one that is compared, take turns; bootstrap intervals are over
the blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import random
import time
from collections import defaultdict
from typing import Any

from benchmarks.comparing import show_changes
from greenroom.actors.messages.queries import PythonCall, QueriesFinished, RunQueries
from greenroom.core.comparing.comparing import check_compare
from greenroom.core.routing.tables import BackendTable, EndpointTable, ReplicaTable
from tests.actors.one_process import OneProcess, Place, pickle_messages

COMPARE = ("by", check_compare({"how": "json", "relative_tolerance": 1e-6}).model_dump())
MODES: dict[str, dict[str, Any]] = {
    "no shadow": {},
    "shadow": {"shadows": {"s": 1.0}},
    "the same again": {"shadows": {"s": 1.0}},
    "compared": {"shadows": {"s": 1.0}, "compares": {"s": COMPARE}},
}
CALL = pickle.dumps(PythonCall("__call__", pickle.dumps(((), {}))))


async def answer() -> dict[str, Any]:
    """Return some twenty small objects, other ones each time."""
    return {
        "score": 0.25 + random.random() * 1e-9,
        "items": [{"id": i, "name": f"item {i}"} for i in range(20)],
    }


def add_shadow(world: OneProcess) -> None:
    """Have a replica of a shadow that is done with each copy at once."""
    place: Any = Place(world.loop)

    def run(message: RunQueries, _sender: Any) -> None:
        done = QueriesFinished(
            replica="s1",
            incarnation=place.process.incarnation,
            answered=tuple((each.ticket, 200) for each in message.assignments),
        )
        place.loop.send(world.proxy.myAddress, done)

    place.on(RunQueries, run)
    replica = ReplicaTable(tag="s1", address=place, process=place.process)
    table = BackendTable(tag="s", replicas=(replica,), max_ongoing_requests=100)
    world.proxy.dispatcher.take_tables([("backend/s", table)], 0.0)


async def block(world: OneProcess, queries: int, pause_s: float) -> list[float]:
    """Return the latencies of queries, one after the other, in seconds of CPU time."""
    latencies = []
    for _ in range(queries):
        began = time.thread_time()
        pending = world.client.pending("a request")
        world.client.submit(pending, endpoint="e", call=CALL)
        while not pending.future.done():
            await asyncio.sleep(0)
        latencies.append(time.thread_time() - began)
        await asyncio.sleep(pause_s)
    return latencies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--pause-s", type=float, default=0.0)
    options = parser.parse_args()
    pickle_messages()
    world = OneProcess(answer, limit=100)
    add_shadow(world)
    rounds: dict[str, list[list[float]]] = defaultdict(list)
    for number in range(options.rounds + 1):
        modes = list(MODES.items())
        for mode, shares in modes if number % 2 else reversed(modes):
            table = EndpointTable(name="e", traffic={"b": 1.0}, **shares)
            world.proxy.dispatcher.take_tables([("endpoint/e", table)], time.monotonic())
            found = world.loop.run_until_complete(block(world, options.queries, options.pause_s))
            if number:  # the first is to warm up
                rounds[mode].append(found)
    show_changes(rounds)
    for mode, found in rounds.items():
        every = sorted(each for part in found for each in part)
        middle, late = every[len(every) // 2], every[len(every) * 99 // 100]
        print(f"{mode}: {len(every)} queries, p50 {middle * 1e6:.0f} us, p99 {late * 1e6:.0f} us")


if __name__ == "__main__":
    main()
