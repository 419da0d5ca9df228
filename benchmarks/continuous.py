"""Streams of a small language model, in three ways: `python -m benchmarks.continuous`.

The character model of examples/chars.py writes texts of 20 to 200 letters, whose requests come one
after the other, 10 ms apart. It steps one stream at a time, or the streams of a batch of
`serve.batch` until the last of them has ended, or whatever streams `serve.continuous_batch` has.
"""

import argparse
import asyncio
import random
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from benchmarks.options import positive, run_main
from benchmarks.own_system import own_system
from benchmarks.report import machine, table, write_json
from examples.chars import CharModel, Writing
from greenroom import serve
from greenroom.serve.decorators.continuous import Stream

APART_S = 0.01
MAX_SIZE = 32
WAYS = ("one_by_one", "batched", "continuous")
Prompt = tuple[str, int]


@serve.deployment(max_ongoing_requests=1000)
class Writers:
    def __init__(self) -> None:
        self.model = CharModel()
        self.turn = asyncio.Lock()

    def begin(self, prompt: Prompt) -> Writing:
        return Writing(self.model.read(prompt[0]), prompt[1])

    def step(self, writings: list[Writing]) -> list[str]:
        hidden = np.stack([writing.hidden for writing in writings])
        letters = self.model.choose(hidden)
        for writing, row in zip(writings, self.model.advance(hidden, letters), strict=True):
            writing.hidden, writing.left = row, writing.left - 1
        return [self.model.letters[letter] for letter in letters]

    async def one_by_one(self, prompt: Prompt) -> Any:
        async with self.turn:
            writing = self.begin(prompt)
            while writing.left:
                yield (await asyncio.to_thread(self.step, [writing]))[0]

    @serve.batch(max_batch_size=MAX_SIZE)
    async def batched(self, prompts: list[Prompt]) -> Any:
        writings = [self.begin(prompt) for prompt in prompts]
        while any(writing.left > 0 for writing in writings):
            live = [writing.left > 0 for writing in writings]
            letters = await asyncio.to_thread(self.step, writings)
            yield [x if lives else StopIteration for x, lives in zip(letters, live, strict=True)]

    @serve.continuous_batch(max_size=MAX_SIZE, max_waiting=1000)
    def continuous(self, streams: list[Stream[Prompt, str]]) -> None:
        for stream in streams:
            stream.state = stream.state or self.begin(stream.item)
        letters = self.step([stream.state for stream in streams])
        for stream, letter in zip(streams, letters, strict=True):
            stream.put(letter)
            if not stream.state.left:
                stream.end()


async def measure(call: Any, streams: int) -> dict[str, float]:
    drawn = random.Random(5)
    first_s: list[float] = []
    ended_s: list[float] = []

    async def read(limit: int) -> int:
        began_at = time.perf_counter()
        number = 0
        async for _ in call.remote(("The ", limit)):
            number += 1
            if number == 1:
                first_s.append(time.perf_counter() - began_at)
        ended_s.append(time.perf_counter() - began_at)
        return number

    began_at = time.perf_counter()
    tasks = []
    for _ in range(streams):
        tasks.append(asyncio.create_task(read(drawn.randrange(20, 200))))
        await asyncio.sleep(APART_S)
    tokens = sum(await asyncio.gather(*tasks))
    return {
        "tokens_per_s": tokens / (time.perf_counter() - began_at),
        "first_p50_ms": median(first_s) * 1000,
        "first_p95_ms": quantiles(first_s, n=20)[18] * 1000,
        "whole_p50_ms": median(ended_s) * 1000,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=positive, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with own_system():
        handle = serve.run(Writers.bind(), route_prefix=None).options(stream=True)
        for way in WAYS:
            call = handle.options(method_name=way)
            asyncio.run(measure(call, 5))  # warm
            results[way] = asyncio.run(measure(call, options.streams))
    rows = [[way, *(f"{value:,.0f}" for value in found.values())] for way, found in results.items()]
    print(table(("", *next(iter(results.values()))), rows))
    write_json(options.json, {"machine": machine(), "ways": results})
    return 0


if __name__ == "__main__":
    run_main(main)
