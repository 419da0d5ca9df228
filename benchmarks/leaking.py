"""What a leak does to its clients, and to those of a neighbour: `python -m benchmarks.leaking`.

Two deployments of two replicas each, asked all the time. First neither leaks, for a fifth of the
time; then each replica of one takes 10 MB more a second, and has a limit of 400 MB above what it
begins with. Printed are the answers that were no 200, the 99th percentiles of latencies, how many
replicas were replaced, and the neighbour's 99th percentile before the leak and during it. Run it
where nothing else runs, or the latter tells of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections import Counter

import aiohttp
from starlette.requests import Request

from benchmarks.options import positive, run_main
from benchmarks.own_system import own_system
from benchmarks.report import machine, table
from greenroom import serve
from greenroom.actors.replica.wear import memory_bytes

MB = 1_000_000
LEAK_BYTES_PER_S = 10 * MB
ROOM_BYTES = 400 * MB
CONNECTIONS = 4  # to each deployment
PAUSE_S = 0.02


@serve.deployment(num_replicas=2)
class Asked:
    """Answers after 5 ms; one that leaks keeps more and more besides."""

    def __init__(self, *, leaks: bool) -> None:
        self._kept: list[bytes] = []
        if leaks:
            threading.Thread(target=self._leak, daemon=True).start()

    def _leak(self) -> None:
        while True:
            time.sleep(0.1)
            self._kept.append(b"x" * (LEAK_BYTES_PER_S // 10))

    async def __call__(self, request: Request) -> str:
        await asyncio.sleep(0.005)
        return "ok"


async def _load(url: str, seconds: float) -> tuple[Counter[int], list[float]]:
    """Return how many answers had which status, and how long each took; -1 for no answer."""
    statuses: Counter[int] = Counter()
    took_s: list[float] = []
    ends_at = time.monotonic() + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        while (began_at := time.monotonic()) < ends_at:
            try:
                async with session.get(url) as response:
                    await response.read()
                statuses[response.status] += 1
            except (aiohttp.ClientError, TimeoutError):
                statuses[-1] += 1
            took_s.append(time.monotonic() - began_at)
            await asyncio.sleep(PAUSE_S)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(CONNECTIONS)))
    return statuses, sorted(took_s)


async def _both(port: int, seconds: float) -> list[tuple[Counter[int], list[float]]]:
    return await asyncio.gather(
        *(_load(f"http://127.0.0.1:{port}/{name}", seconds) for name in ("leaky", "neighbour"))
    )


def main() -> None:
    """Measure without a leak and with one, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=positive, default=10, help="of the leak [10]")
    seconds_of_leak = 60 * parser.parse_args().minutes
    rows = []
    neighbours_p99_s = []
    failed = 0
    with own_system() as port:
        serve.run(Asked.bind(leaks=False), name="neighbour", route_prefix="/neighbour")
        for leaks, seconds in ((False, seconds_of_leak // 5), (True, seconds_of_leak)):
            most = memory_bytes() + ROOM_BYTES
            leaky = Asked.options(max_memory_bytes=most).bind(leaks=leaks)
            serve.run(leaky, name="leaky", route_prefix="/leaky")
            measured = asyncio.run(_both(port, seconds))
            backends = serve.Client.connect().list_backends()
            replaced = backends["leaky#Asked"].get("restarts", {})
            for name, (statuses, took_s) in zip(("leaky", "neighbour"), measured, strict=True):
                bad = statuses.total() - statuses[200]
                p99_s = took_s[int(0.99 * len(took_s))]
                failed += bad
                if name == "neighbour":
                    neighbours_p99_s.append(p99_s)
                row = ["yes" if leaks else "no", f"{seconds} s", name, str(statuses.total())]
                why = ", ".join(f"{count} {reason}" for reason, count in replaced.items())
                rows.append([*row, str(bad), f"{p99_s * 1e3:.1f} ms", why or "none"])
    print(machine())
    heads = ["leak", "for", "deployment", "requests", "not 200", "p99", "replaced (leaky)"]
    print(table(heads, rows))
    before, during = (f"{each * 1e3:.1f} ms" for each in neighbours_p99_s)
    print(f"the neighbour's p99: {before} before the leak, {during} during it; {failed} not 200")


if __name__ == "__main__":
    run_main(main)
