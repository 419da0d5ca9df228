"""Traffic between two hosts while strangers crowd the port: ``python -m benchmarks.strangers``.

The hosts are two actor systems, on two addresses of 127.0.0.0/8. The traffic is asks at a fixed
rate, timed from when each was due: over TCP to the other host, over a Unix socket within it, and
over TCP with a new connection each time; one kind after the other. The strangers hold 1,000
connections on which they say nothing, and 200 on which they send garbage, torn or strangers' TLS
greetings, or a byte now and then; each comes back half a second after it was closed.

They cost processor time here that elsewhere would be their own. So the same crowd also comes to a
gate of a process that has nothing to do with the systems ("next door"): what differs from that is
what the systems themselves suffer. And there are processes that only count, as many as processors
and of the lowest priority ("counting"): what an ask takes on a machine that is never idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import itertools
import logging
import os
import secrets
import select
import selectors
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from thespian.actors import Actor, ActorExitRequest, ActorSystem

from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.actors.transport.admission import Admission
from greenroom.actors.transport.cluster_key import KeyFiles, ensure_key
from greenroom.actors.transport.other_hosts import Gate, Handshakes
from greenroom.actors.transport.thespian_base import install

HERE, THERE, NEXT_DOOR = "127.0.0.21", "127.0.0.22", "127.0.0.23"
KINDS = ("to the other host", "within a host", "with a new connection")
IDLE, HOSTILE = 1000, 200
COME_BACK_S, SLOW_S = 0.5, 0.05
ASK_S = 30
Figures = tuple[float, float, float, float]


class Echo(Actor):
    """Sends back what it gets."""

    def receiveMessage(self, message: Any, sender: Any) -> None:
        if not isinstance(message, ActorExitRequest):
            self.send(sender, message)


# --- The strangers --------------------------------------------------------------------------------


def client_hello() -> bytes:
    """Return how a TLS session begins that will show no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def greetings() -> list[bytes]:
    """Return what hostile strangers say; all of it is refused."""
    hello = client_hello()
    return [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        secrets.token_bytes(2000),
        hello[:40],
        hello,
        hello + hello,
        b"",
    ]


class Stranger:
    """Connects, says something, stays until turned away, and comes back."""

    def __init__(self, crowd: Crowd, greeting: bytes, *, ends: bool, slow: bool) -> None:
        self._crowd = crowd
        self._greeting, self._ends, self._slow = greeting, ends, slow
        self.come()

    def come(self) -> None:
        self._crowd.visits += 1
        self._said = 0
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.connect_ex(self._crowd.place)
        self._crowd.selector.register(self._socket, selectors.EVENT_READ, self)
        self._crowd.later(SLOW_S, self.speak)

    def speak(self) -> None:
        piece = self._greeting[self._said :][: 1 if self._slow else None]
        try:
            self._said += self._socket.send(piece) if piece else 0
            if self._slow and self._said < len(self._greeting):
                self._crowd.later(SLOW_S, self.speak)
            elif self._ends:
                self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # turned away, which is heard

    def hear(self) -> None:
        try:
            if self._socket.recv(1000):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._crowd.selector.unregister(self._socket)
        self._socket.close()
        self._crowd.later(COME_BACK_S, self.come)


class Crowd:
    """All strangers, on a selector: asyncio's streams would cost the machine several times more."""

    def __init__(self, place: tuple[str, int]) -> None:
        self.place = place
        self.selector = selectors.DefaultSelector()
        self.visits = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        said = greetings()
        for _ in range(IDLE):
            Stranger(self, b"", ends=False, slow=False)
        for number in range(HOSTILE):
            greeting = said[number % len(said)]
            Stranger(self, greeting, ends=number % 3 == 0, slow=number % 5 == 0)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._numbers), action))

    def run(self) -> None:
        """Crowd the port until standard input ends."""
        yield_to_all()  # real ones have processors of their own
        print("there", flush=True)
        self.selector.register(sys.stdin, selectors.EVENT_READ)
        begun = time.monotonic()
        while True:
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            for key, _ in self.selector.select(0.01):
                if key.data is None:
                    print(f"{self.visits / (time.monotonic() - begun):.0f}", flush=True)
                    return
                key.data.hear()


def yield_to_all() -> None:
    """Take only processor time that nobody else wants."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def count() -> None:
    """Take processor time until standard input ends."""
    yield_to_all()
    print("there", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        sum(range(10_000))


async def stand_next_door(port: int, key_file: Path) -> None:
    """Be a gate that leads nowhere until standard input ends."""
    loop = asyncio.get_running_loop()
    own = ProcessAddress(NEXT_DOOR, port)
    handshakes = Handshakes(loop, KeyFiles(key_file), Admission(loop))
    gate = Gate(loop, own, handshakes, lambda sock, _: sock.close())
    print("there", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    gate.close()
    os._exit(0)


# --- The traffic ----------------------------------------------------------------------------------


class Traffic:
    """Asks of each kind, and how long they took."""

    def __init__(self, here: Any, there: Any, echo: Any) -> None:
        self.here, self.there, self.echo = here, there, echo

    def run(self, kind: str, seconds: float, rate: float) -> list[float]:
        """Return the milliseconds of each ask."""
        took = []
        begun, number = time.monotonic(), 0
        while (due := begun + number / rate) < begun + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            self._ask(kind)
            took.append((time.monotonic() - due) * 1e3)
            number += 1
        return took

    def _ask(self, kind: str) -> None:
        message = secrets.token_bytes(8)
        if kind == KINDS[2]:
            with self.here.private() as asker:
                answer = asker.ask(self.echo, message, ASK_S)
        else:
            answer = (self.there if kind == KINDS[1] else self.here).ask(self.echo, message, ASK_S)
        assert answer == message, answer


@contextlib.contextmanager
def systems(port: int, folder: Path) -> Iterator[tuple[Any, Any]]:
    ensure_key(folder / "cluster.key")
    os.environ["GREENROOM_KEY_FILE"] = str(folder / "cluster.key")
    started = []
    try:
        for address in (HERE, THERE):
            os.environ["GREENROOM_BIND"] = address
            log = {"version": 1, "root": {"level": "ERROR"}}
            started.append(ActorSystem(install(), {"Admin Port": port}, log, True))
        yield started[0], started[1]
    finally:
        for system in started:
            system.shutdown()


def admin_at(address: str, port: int) -> psutil.Process:
    """Return the admin, which is who listens there."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr == (address, port):
            return psutil.Process(connection.pid)
    raise LookupError(f"nobody listens at {address}:{port}")


def describe(admin: psutil.Process) -> str:
    return f"{admin.num_fds()} open files, {admin.memory_info().rss / 2**20:.1f} MB"


def measure(traffic: Traffic, options: Any, admin: psutil.Process) -> dict[str, Figures]:
    """Return p50, p99 and maximum of each kind in milliseconds, and the admin's CPU seconds."""
    figures = {}
    for kind, rate in zip(KINDS, (options.rate, options.rate, options.rate / 10), strict=True):
        before = sum(admin.cpu_times()[:2])
        took = traffic.run(kind, options.seconds, rate)
        cpu = (sum(admin.cpu_times()[:2]) - before) / options.seconds
        cuts = statistics.quantiles(took, n=100)
        figures[kind] = (cuts[49], cuts[98], max(took), cpu * 100)
    return figures


@contextlib.contextmanager
def beside(*arguments: str) -> Iterator[list[str]]:
    """Have one more process of this program; the list gets what it says at its end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.strangers", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    said: list[str] = []
    try:
        yield said
    finally:
        said.append(process.communicate()[0].strip())


def show(phases: dict[str, list[dict[str, Figures]]]) -> None:
    """Print the medians over the rounds."""
    print(f"{'':16}{'asks':24}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'admin CPU %':>13}")
    for phase, rounds in phases.items():
        for kind in KINDS:
            p50, p99, most, cpu = (
                statistics.median(column)
                for column in zip(*(each[kind] for each in rounds), strict=True)
            )
            print(f"{phase:16}{kind:24}{p50:>9.2f}{p99:>9.2f}{most:>9.2f}{cpu:>13.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=21790)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each kind and phase")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=200.0, help="asks per second")
    parser.add_argument("--key-file", help=argparse.SUPPRESS)
    parser.add_argument("--crowd", help=argparse.SUPPRESS)
    parser.add_argument("--next-door", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("greenroom").setLevel(logging.ERROR)  # there are lines for each stranger
    if options.crowd:
        Crowd((options.crowd, options.port)).run()
    elif options.count:
        count()
    elif options.next_door:
        asyncio.run(stand_next_door(options.port, Path(options.key_file)))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder, systems(options.port, Path(folder)) as both:
        here, there = both
        where = ("--port", str(options.port), "--key-file", f"{folder}/cluster.key")
        traffic = Traffic(here, there, there.createActor(Echo))
        for kind in KINDS:
            traffic.run(kind, 1, options.rate)
        admin = admin_at(THERE, options.port)
        phases: dict[str, list[dict[str, Figures]]] = {
            name: [] for name in ("quiet", "counting", "next door", "here")
        }
        for _ in range(options.rounds):
            phases["quiet"].append(measure(traffic, options, admin))
            with contextlib.ExitStack() as counting:
                for _ in range(os.cpu_count() or 1):
                    counting.enter_context(beside("--count"))
                phases["counting"].append(measure(traffic, options, admin))
            with beside(*where, "--next-door"), beside(*where, "--crowd", NEXT_DOOR):
                phases["next door"].append(measure(traffic, options, admin))
            print(f"admin: {describe(admin)}", end="; ", flush=True)
            with beside(*where, "--crowd", THERE) as rate:
                phases["here"].append(measure(traffic, options, admin))
                print(f"with strangers {describe(admin)}", end="; ")
            print(f"they made {rate[0]} connections/s", flush=True)
            time.sleep(6)  # longer than a stranger is borne
        show(phases)
        print(f"admin: {describe(admin)}")


if __name__ == "__main__":
    socket.setdefaulttimeout(30)
    main()
