"""What one bad replica of three does to the requests of all: `python -m benchmarks.bad_replicas`.

The good ones answer after 200 ms. The bad one raises at once, or for every third request, or gets
nothing but requests that fail everywhere (poison); each without help, with `outlier_ejection`, and
with `retry_failures` besides. Each case sends requests from 4, 16 and 32 connections for some
seconds; those of the first two are shown apart, as what is found out takes a moment.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter

import aiohttp
from starlette.requests import Request

from benchmarks.options import positive, run_main
from benchmarks.own_system import own_system
from benchmarks.report import machine, table
from greenroom import serve

CONNECTIONS = (4, 16, 32)
FIRST_S = 2.0
FAULTS = ("raises", "raises sometimes", "poison")
HELP: dict[str, dict[str, bool]] = {
    "none": {"outlier_ejection": False},
    "ejection": {"outlier_ejection": True},
    "and retries": {"outlier_ejection": True, "retry_failures": True},
}


@serve.deployment(num_replicas=3)
class Replicas:
    """Three replicas, of which the one of rank 1 is bad."""

    def __init__(self, fault: str) -> None:
        context = serve.get_replica_context()
        self._is_bad = context.rank is not None and context.rank.rank == 1
        self._fault, self._count = fault, 0

    async def __call__(self, request: Request) -> str:
        self._count += 1
        if self._fault == "poison":
            raise ValueError("no such thing")
        if self._is_bad and (self._fault == "raises" or self._count % 3 == 0):
            raise RuntimeError("the GPU has fallen off the bus")
        await asyncio.sleep(0.2)
        return "good"


async def _load(url: str, connections: int, seconds: int) -> tuple[Counter[int], Counter[int]]:
    """Return how many answers had which status, in the first FIRST_S and after that."""
    began_at = time.monotonic()
    first: Counter[int] = Counter()
    later: Counter[int] = Counter()

    async def client(session: aiohttp.ClientSession) -> None:
        while (age := time.monotonic() - began_at) < seconds:
            async with session.get(url) as response:
                await response.read()
            (first if age < FIRST_S else later)[response.status] += 1

    connector = aiohttp.TCPConnector(limit=connections)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(client(session) for _ in range(connections)))
    return first, later


def _failed(statuses: Counter[int]) -> str:
    count = sum(statuses.values())
    return f"{100 * statuses[500] / count:.1f} % of {count}" if count else "-"


def _is_ejected() -> bool:
    shown = serve.status().applications["bad"]
    return "fails where other replicas do not" in shown.message


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--seconds", type=positive, default=8, help="of each load [8]")
    add("--faults", nargs="+", choices=FAULTS, default=FAULTS, help="only these [all]")
    add("--help-by", nargs="+", choices=HELP, default=HELP, help="only with this help [all]")
    arguments = parser.parse_args()
    rows = []
    with own_system() as port:
        for fault in arguments.faults:
            for helped in arguments.help_by:
                options = HELP[helped]
                for connections in CONNECTIONS:
                    serve.run(Replicas.options(**options).bind(fault), name="bad")
                    url = f"http://127.0.0.1:{port}/"
                    first, later = asyncio.run(_load(url, connections, arguments.seconds))
                    ejected = "yes" if _is_ejected() else "no"
                    serve.delete("bad")
                    row = [fault, helped, str(connections)]
                    rows.append([*row, _failed(first), _failed(later), ejected])
    print(machine())
    heads = ["bad replica", "help", "connections", f"failed in {FIRST_S:g} s", "later"]
    print(table([*heads, "ejected"], rows))


if __name__ == "__main__":
    run_main(main)
