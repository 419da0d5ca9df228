"""How many calls a second a script makes through a handle: `python -m benchmarks.handles`.

The script has a number of calls outstanding at all times, in three ways: as many threads, each
waiting for its own; one thread that waits for the oldest; and asyncio tasks. One replica answers,
with an async method and with a sync one, which runs on its threads. Then streams of values, and a
chain of three deployments.
"""

import argparse
import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.options import positive, run_main
from benchmarks.own_system import own_system
from benchmarks.report import machine, table, write_json
from greenroom import serve

Call = Callable[[], Any]
VALUES = 10_000


@serve.deployment
class Echo:
    async def in_loop(self, value: int) -> int:
        return value

    def on_threads(self, value: int) -> int:
        return value

    async def values(self, count: int) -> Any:
        for number in range(count):
            yield number


@serve.deployment
class Chain:
    def __init__(self, following: Any) -> None:
        self.following = following

    async def in_loop(self, value: int) -> int:
        return await self.following.in_loop.remote(value)

    async def values(self, count: int) -> Any:
        async for number in self.following.options(stream=True).values.remote(count):
            yield number


class Clock:
    """Takes the time of calls until the seconds are over."""

    def __init__(self, seconds: float) -> None:
        self.begun_at = time.perf_counter()
        self.until = self.begun_at + seconds
        self.taken_s: list[float] = []

    def calls(self) -> Iterator[float]:
        """Yield when each call begins."""
        while (now := time.perf_counter()) < self.until:
            yield now

    def done(self, begun_at: float) -> None:
        self.taken_s.append(time.perf_counter() - begun_at)

    def result(self) -> dict[str, float]:
        seconds = time.perf_counter() - self.begun_at
        cuts = quantiles(self.taken_s, n=100)
        return {
            "per_s": len(self.taken_s) / seconds,
            "p50_ms": cuts[49] * 1000,
            "p99_ms": cuts[98] * 1000,
        }


def with_threads(call: Call, outstanding: int, seconds: float) -> dict[str, float]:
    clock = Clock(seconds)

    def work() -> None:
        for begun_at in clock.calls():
            call().result()
            clock.done(begun_at)

    threads = [threading.Thread(target=work) for _ in range(outstanding)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clock.result()


def with_one_thread(call: Call, outstanding: int, seconds: float) -> dict[str, float]:
    clock = Clock(seconds)
    waiting: deque[tuple[float, Any]] = deque()
    for begun_at in clock.calls():
        waiting.append((begun_at, call()))
        if len(waiting) == outstanding:
            first_at, response = waiting.popleft()
            response.result()
            clock.done(first_at)
    for begun_at, response in waiting:
        response.result()
        clock.done(begun_at)
    return clock.result()


def with_asyncio(call: Call, outstanding: int, seconds: float) -> dict[str, float]:
    async def work(clock: Clock) -> None:
        for begun_at in clock.calls():
            await call()
            clock.done(begun_at)

    async def main() -> dict[str, float]:
        clock = Clock(seconds)
        await asyncio.gather(*[work(clock) for _ in range(outstanding)])
        return clock.result()

    return asyncio.run(main())


def streamed(handle: Any, seconds: float) -> float:
    """Return values per second, of streams one after the other."""
    begun_at = time.perf_counter()
    count = 0
    while time.perf_counter() < begun_at + seconds:
        count += sum(1 for _ in handle.options(stream=True).values.remote(VALUES))
    return count / (time.perf_counter() - begun_at)


WAYS = {"threads": with_threads, "one thread": with_one_thread, "asyncio": with_asyncio}


COLUMNS = (("per_s", 0), ("p50_ms", 1), ("p99_ms", 1))


def options_of(text: str) -> Any:
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--outstanding", type=positive, default=64)
    parser.add_argument("--seconds", type=positive, default=5, help="of each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")
    return parser.parse_args()


def main() -> int:
    options = options_of(__doc__)
    rows, measured = [], {}
    with own_system():
        app = Chain.options(name="First").bind(Chain.options(name="Second").bind(Echo.bind()))
        first = serve.run(app, route_prefix=None)
        echo = serve.get_deployment_handle("Echo")
        calls: dict[str, Call] = {
            "async method": lambda: echo.in_loop.remote(1),
            "sync method": lambda: echo.on_threads.remote(1),
            "chain of three": lambda: first.in_loop.remote(1),
        }
        for what, call in calls.items():
            call().result()
            for way, measure in WAYS.items():
                print(f"{what}, {way}", file=sys.stderr)
                found = measure(call, options.outstanding, options.seconds)
                measured[f"{what}, {way}"] = found
                rows.append((what, way, *(f"{found[k]:.{d}f}" for k, d in COLUMNS)))
        streams = {
            f"{VALUES} values, {hops}": streamed(handle, options.seconds)
            for hops, handle in (("one hop", echo), ("three hops", first))
        }
    print(
        table(("call", f"{options.outstanding} outstanding", "calls/s", "p50 ms", "p99 ms"), rows)
    )
    print()
    print(table(("stream", "values/s"), [(name, f"{rate:.0f}") for name, rate in streams.items()]))
    write_json(options.json, {"machine": machine(), "calls": measured, "streams": streams})
    return 0


if __name__ == "__main__":
    run_main(main)
