"""Five times what a backend can do: what is still answered, how soon, and who else suffers.

`python -m benchmarks.overload` first measures the capacity, by twice as many clients as slots, each
of which asks again when it is answered. Then requests come at five times that rate, whether or not
others are answered: once with `max_queued_requests`, and once with a time limit only. Beside them
come polite requests, a tenth of the capacity each: to another endpoint of the same backend, and to
an endpoint of another backend, on the same proxy and worker. Times are from when each was due.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.open_loop import Clients, Seen
from benchmarks.options import positive, run_main
from benchmarks.own_system import own_system
from benchmarks.report import machine, table, write_json
from greenroom import serve

SLOTS, RUN_S = 8, 0.04
QUEUED = 40
TIMEOUT_S = 1.0
FACTOR = 5
HEADER = (
    "load",
    "requests/s",
    "answered/s",
    "of capacity",
    "p50 ms",
    "p99 ms",
    "503",
    "Retry-After",
    "408",
    "failed",
)


class Waits:
    """Takes RUN_S, and no processor time: so the clients of this benchmark do not slow it down."""

    async def __call__(self, request: Any) -> str:
        await asyncio.sleep(RUN_S)
        return "done"


class Settings:
    """How a backend is guarded."""

    def __init__(self, name: str, config: dict[str, Any], timeout_s: float | None) -> None:
        self.name, self.config, self.timeout_s = name, config, timeout_s


KINDS = (
    Settings("queue limit", {"max_queued_requests": QUEUED}, None),
    Settings("time limit", {}, TIMEOUT_S),
)


def create(client: serve.Client, kind: Settings) -> None:
    for tag, endpoints in (("busy", ("flooded", "beside")), ("idle", ("elsewhere",))):
        config = {"max_ongoing_requests": SLOTS, **kind.config}
        client.wait_for_goal(client.create_backend(tag, Waits, config=config), 60)
        for name in endpoints:
            client.create_endpoint(name, backend=tag, route=f"/{name}")


def delete(client: serve.Client) -> None:
    for name in ("flooded", "beside", "elsewhere"):
        client.delete_endpoint(name)
    for tag in ("busy", "idle"):
        client.wait_for_goal(client.delete_backend(tag), 60)


async def capacity(port: int, seconds: float) -> float:
    """Return how many requests per second the slots do, each of them always taken."""
    done = 0
    until = time.monotonic() + seconds

    async def ask_again() -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < until:
            writer.write(b"GET /flooded HTTP/1.1\r\nHost: x\r\n\r\n")
            while (line := await reader.readline()).strip():
                if line.lower().startswith(b"content-length"):
                    length = int(line.split()[1])
            await reader.readexactly(length)
            done += 1
        writer.close()

    await asyncio.gather(*(ask_again() for _ in range(2 * SLOTS)))
    return done / seconds


async def polite(port: int, rate: float, seconds: float) -> dict[str, Seen]:
    """Ask politely on both other endpoints."""
    clients = Clients(port)
    names = ("beside", "elsewhere")
    asking = (clients.ask(f"/{name}", rate, seconds, timeout_s=None) for name in names)
    seen = dict(zip(names, await asyncio.gather(*asking), strict=True))
    clients.close()
    return seen


async def overload(port: int, kind: Settings, rate: float, seconds: float) -> dict[str, Seen]:
    """Flood one endpoint and ask politely on the others."""
    clients = Clients(port)
    flood = clients.ask("/flooded", FACTOR * rate, seconds, timeout_s=kind.timeout_s)
    flooded, seen = await asyncio.gather(flood, polite(port, rate / 10, seconds))
    clients.close()
    return {"flooded": flooded, **seen}


def row(what: str, seen: Seen, seconds: float, whole: float) -> tuple[str, ...]:
    took = sorted(seen.took_s)
    every = len(took) + len(seen.refused_s) + seen.timed_out + seen.failed
    shown = [f"{1000 * took[int(share * (len(took) - 1))]:.0f}" for share in (0.5, 0.99)]
    after = f"{median(seen.retry_after_s):.0f} s" if seen.retry_after_s else "-"
    return (
        what,
        f"{every / seconds:.0f}",
        f"{len(took) / seconds:.0f}",
        f"{len(took) / seconds / whole:.0%}",
        *shown,
        str(len(seen.refused_s)),
        after,
        str(seen.timed_out),
        str(seen.failed),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=positive, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")
    options = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    with own_system() as port, serve.Client.connect() as client:
        for kind in KINDS:
            print(kind.name, file=sys.stderr)
            create(client, kind)
            whole = asyncio.run(capacity(port, options.seconds))
            alone = asyncio.run(polite(port, whole / 10, options.seconds))
            seen = asyncio.run(overload(port, kind, whole, options.seconds))
            delete(client)
            for name, each in alone.items():
                rows.append(row(f"{kind.name}: {name}, alone", each, options.seconds, whole))
            busy = Seen()  # what the flooded backend does for both of its endpoints
            for each in (seen["flooded"], seen["beside"]):
                busy.add(each)
            rows.append(row(f"{kind.name}: flooded backend", busy, options.seconds, whole))
            for name, each in seen.items():
                rows.append(row(f"{kind.name}: {name}", each, options.seconds, whole))
    print(table(HEADER, rows))
    write_json(options.json, {"machine": machine(), "rows": [HEADER, *rows]})
    return 0


if __name__ == "__main__":
    run_main(main)
