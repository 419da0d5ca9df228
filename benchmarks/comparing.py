"""What comparing a shadow's answers costs the primary: latencies and CPU, with it and without.

``python -m benchmarks.comparing`` starts a system of its own, sends a steady load to an endpoint
that has a shadow for all queries, and switches the comparison on and off in turn, round by round,
so that whatever else the machine does falls on both alike: in many short rounds, whose order turns
too. The change of the p99 is reported with the interval that a bootstrap over the rounds gives it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

from greenroom import serve

ENDPOINT, OLD, NEW = "shop", "shop:v1", "shop:v2"
COMPARE = {"how": "json", "relative_tolerance": 1e-6}
RESAMPLES = 400
REPORTED_S = 20.0
WORK_VARIABLE = "COMPARING_WORK_S"
# "The same again" is a shadow once more, to tell how much two runs of one thing differ.
MODES = {
    "no shadow": (0.0, None),
    "shadow": (1.0, None),
    "the same again": (1.0, None),
    "compared": (1.0, COMPARE),
}
PAIRS = (
    ("shadow", "no shadow"),
    ("the same again", "shadow"),
    ("compared", "shadow"),
    ("compared", "no shadow"),
)


async def answer(request):
    """Answer a little differently each time, so that no two answers are the same bytes."""
    await asyncio.sleep(float(os.environ[WORK_VARIABLE]))
    return {
        "score": 0.25 + random.random() * 1e-9,
        "items": [{"id": i, "name": f"item {i}"} for i in range(20)],
    }


async def load(port: int, connections: int, pause_s: float, seconds: float) -> list[float]:
    request = f"GET /{ENDPOINT} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    latencies: list[float] = []
    ends_at = time.perf_counter() + seconds

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < ends_at:
            began = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            latencies.append(time.perf_counter() - began)
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"an answer was not 200: {head!r}")
            await asyncio.sleep(pause_s)
        writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return latencies


def percentile(rounds: list[list[float]], percent: int) -> float:
    """Return the percentile of all that the rounds have."""
    latencies = sorted(itertools.chain.from_iterable(rounds))
    return latencies[min(len(latencies) * percent // 100, len(latencies) - 1)]


def change(
    base: list[list[float]], other: list[list[float]], percent: int
) -> tuple[float, float, float]:
    """Return by how much a percentile changes, between the bounds of 95 % of the resamples.

    Rounds are drawn in pairs, of one and the other, for what disturbs one is likely to disturb the
    other too.
    """
    chance = random.Random(0)
    numbers = range(len(base))
    found = []
    for _ in range(RESAMPLES):
        drawn = chance.choices(numbers, k=len(base))
        of_base = percentile([base[n] for n in drawn], percent)
        found.append(percentile([other[n] for n in drawn], percent) / of_base - 1)
    found.sort()
    middle = percentile(other, percent) / percentile(base, percent) - 1
    return found[RESAMPLES * 25 // 1000], middle, found[RESAMPLES * 975 // 1000]


def show_changes(rounds: dict[str, list[list[float]]]) -> None:
    """Print what the shadow changes, what comparing does, and both: the median and the p99."""
    for mode, base in PAIRS:
        for percent in (50, 99):
            low, middle, high = change(rounds[base], rounds[mode], percent)
            print(
                f"{mode} beside {base}: p{percent} {middle:+.1%}, with 95 % confidence {low:+.1%} "
                f"to {high:+.1%}"
            )


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure(client: serve.Client, port: int, arguments: argparse.Namespace) -> None:
    for tag in (OLD, NEW):
        client.wait_for_goal(client.create_backend(tag, answer), 30)
    client.create_endpoint(ENDPOINT, backend=OLD, route=f"/{ENDPOINT}")
    replicas = client.list_backends()
    processes = {
        "primary": psutil.Process(replicas[OLD]["replicas"][0]["pid"]),
        "shadow": psutil.Process(replicas[NEW]["replicas"][0]["pid"]),
    }
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if "proxy" in title and process.ppid() == processes["primary"].ppid():
            processes["proxy"] = process
    latencies: dict[str, list[float]] = defaultdict(list)
    rounds: dict[str, list[list[float]]] = defaultdict(list)
    cpu: dict[tuple[str, str], float] = defaultdict(float)
    for number in range(arguments.rounds + 1):
        modes = list(MODES.items())
        if number % 2 != arguments.rounds % 2:
            modes.reverse()  # the last round ends with the comparison, which is reported
        for mode, (proportion, compare) in modes:
            client.shadow_traffic(ENDPOINT, NEW, proportion, compare)
            before = {name: cpu_s(process) for name, process in processes.items()}
            run = load(port, arguments.connections, arguments.pause_s, arguments.seconds)
            found = asyncio.run(run)
            if number == 0:
                continue  # to warm up
            latencies[mode] += found
            rounds[mode].append(found)
            for name, process in processes.items():
                cpu[mode, name] += cpu_s(process) - before[name]
    show(latencies, rounds, cpu, list(processes))
    print(differences(client))


def differences(client: serve.Client) -> dict[str, int]:
    """Return what was found since the comparison was switched on last, once there is something."""
    deadline = time.monotonic() + REPORTED_S
    while not (found := client.diff(ENDPOINT).get(NEW, {})).get("compared"):
        if time.monotonic() > deadline:
            raise SystemExit("nothing was compared")
        time.sleep(0.1)
    return {name: found[name] for name in ("compared", "different", "not_compared")}


def show(
    latencies: dict[str, list[float]],
    rounds: dict[str, list[list[float]]],
    cpu: dict[tuple[str, str], float],
    processes: list[str],
) -> None:
    for mode, found in latencies.items():
        hundredths = statistics.quantiles(found, n=100)
        each = ", ".join(
            f"{name} {cpu[mode, name] / len(found) * 1e6:.0f} us" for name in processes
        )
        print(
            f"{mode}: {len(found)} queries, p50 {hundredths[49] * 1e3:.2f} ms, p99 "
            f"{hundredths[98] * 1e3:.2f} ms; CPU per query: {each}"
        )
    show_changes(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=0.02)
    parser.add_argument("--work-s", type=float, default=0.0, help="what user code waits for")
    parser.add_argument("--port", type=int, default=8471)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "GREENROOM_STATE_DIR": str(Path(folder) / "state"),
            "GREENROOM_HTTP_PORT": str(arguments.port),
            "GREENROOM_ADMIN_PORT": str(arguments.port + 1),
            WORK_VARIABLE: str(arguments.work_s),
        }
        command = [sys.executable, "-m", "greenroom.serve.cli.main"]
        subprocess.run([*command, "start"], check=True)
        try:
            with serve.Client.connect() as client:
                measure(client, arguments.port, arguments)
        finally:
            subprocess.run([*command, "destroy", "--yes"], check=True)


if __name__ == "__main__":
    main()
