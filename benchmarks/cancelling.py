"""How soon what nobody wants any more is dropped, and what is left of it.

`python -m benchmarks.cancelling` sends requests through three deployments, each of which has as
many slots as there are clients. One more request waits. A client leaves, and the time is taken
until the last of the three has its `CancelledError`, and until the one that waits has begun there:
then all three slots were free, and had been given on. After that come a hundred thousand calls
through handles, each cancelled; then memory is compared, and what the proxy still counts.
"""

import argparse
import asyncio
import itertools
import random
import socket
import sys
import tempfile
import time
import urllib.request
from collections import deque
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks import BenchmarkError
from benchmarks.options import positive, run_main
from benchmarks.own_system import own_system
from benchmarks.processes import pss_bytes
from benchmarks.report import machine, mib, table, write_json
from greenroom import serve
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import read_settings

REST_S = 60.0
WARM_UP = 5_000
OUTSTANDING = 64


class Last:
    """Waits, and says by a datagram when it begins and when it is cancelled."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def say(self, number: int, what: str) -> None:
        self.socket.sendto(f"{number} {what} {time.monotonic()}".encode(), self.path)

    async def wait(self, number: int) -> None:
        self.say(number, "began")
        try:
            await asyncio.sleep(3600)
        finally:
            self.say(number, "cancelled")

    async def quietly(self) -> None:
        await asyncio.sleep(3600)


class Passes:
    """Calls the next."""

    def __init__(self, following: Any) -> None:
        self.following = following

    async def __call__(self, request: Any) -> None:
        await self.wait(int(request.query_params["number"]))

    async def wait(self, number: int) -> None:
        await self.following.wait.remote(number)

    async def quietly(self) -> None:
        await self.following.quietly.remote()


class Witness:
    """Hears what the last one says."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._socket.settimeout(30)
        self._said: dict[tuple[int, str], float] = {}

    def when(self, number: int, what: str) -> float:
        """Wait until it has happened, and return when."""
        while (number, what) not in self._said:
            found, did, at = self._socket.recv(200).decode().split()
            self._said[int(found), did] = float(at)
        return self._said[number, what]


def ask(port: int, number: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"GET /?number=%d HTTP/1.1\r\nHost: x\r\n\r\n" % number)
    return connection


def leave(port: int, witness: Witness, clients: int, trials: int) -> dict[str, list[float]]:
    """Have clients leave, one at a time; return the seconds until cancelled and until free."""
    numbers = itertools.count(1)
    rng = random.Random(1)
    running: dict[int, socket.socket] = {}
    found: dict[str, list[float]] = {"cancelled": [], "free": []}
    for number in itertools.islice(numbers, clients):
        running[number] = ask(port, number)
        witness.when(number, "began")
    for number in itertools.islice(numbers, trials):
        running[number] = ask(port, number)
        time.sleep(0.02)  # so that it waits
        leaving = rng.choice(list(running)[:clients])
        left_at = time.monotonic()
        running.pop(leaving).close()
        found["cancelled"].append(witness.when(leaving, "cancelled") - left_at)
        found["free"].append(witness.when(number, "began") - left_at)
    for number, connection in running.items():
        connection.close()
        witness.when(number, "cancelled")  # few datagrams may wait to be heard
    return found


def cancel_calls(handle: Any, count: int) -> float:
    """Make calls and cancel each; return how many a second."""
    rng = random.Random(1)
    calls: deque[Any] = deque()
    begun_at = time.monotonic()
    for _ in range(count):
        calls.append(handle.quietly.remote())
        if len(calls) > OUTSTANDING:
            calls.rotate(rng.randrange(OUTSTANDING))
            calls.popleft().cancel()
            time.sleep(0)
    for call in calls:
        call.cancel()
    return count / (time.monotonic() - begun_at)


def wait_for_rest(port: int) -> None:
    """Wait until the proxy counts nothing; BenchmarkError when it goes on counting."""
    deadline = time.monotonic() + REST_S
    while busy := counted(port):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{busy:.0f} queries are left over")
        time.sleep(0.05)


def counted(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    names = ("greenroom_queued", "greenroom_ongoing")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


def application(path: str, clients: int) -> serve.Application:
    options = {"max_ongoing_requests": clients}
    last = serve.deployment(Last).options(**options).bind(path)
    middle = serve.deployment(Passes).options(**options, name="Middle").bind(last)
    return serve.deployment(Passes).options(**options, name="First").bind(middle)


def summary(seconds: list[float]) -> tuple[str, str, str]:
    cuts = quantiles(seconds, n=100)
    return tuple(f"{1000 * each:.1f}" for each in (cuts[49], cuts[98], max(seconds)))


def main() -> int:
    options = options_of(__doc__)
    rows, measured = [], {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, own_system() as port:
        for clients in (1, 32):
            path = f"{folder}/witness{clients}"
            witness = Witness(path)
            handle = serve.run(application(path, clients))
            print(f"{options.trials} clients leave, {clients} at once", file=sys.stderr)
            found = leave(port, witness, clients, options.trials)
            measured[str(clients)] = found
            rows += [(what, str(clients), *summary(each)) for what, each in found.items()]
            wait_for_rest(port)
        print(table(("until", "clients", "p50 ms", "p99 ms", "longest ms"), rows))
        print(f"{options.calls} calls are cancelled", file=sys.stderr)
        cancel_calls(handle, WARM_UP)
        wait_for_rest(port)
        pids = {process.pid for process in RunRecords(read_settings().run_dir).alive()}
        before = pss_bytes(pids)
        rate = cancel_calls(handle, options.calls)
        wait_for_rest(port)
        after = pss_bytes(pids)
    print()
    print(
        f"{options.calls} calls of three hops, cancelled at {rate:.0f}/s: nothing is queued or "
        f"ongoing; memory of the system {mib(before)} before, {mib(after)} after"
    )
    measured["calls"] = {"per_s": rate, "pss_before": before, "pss_after": after}
    write_json(options.json, {"machine": machine(), **measured})
    return 0


def options_of(text: str) -> Any:
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--trials", type=positive, default=300)
    parser.add_argument("--calls", type=positive, default=100_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")
    return parser.parse_args()


if __name__ == "__main__":
    run_main(main)
