"""Throws bytes at the unauthenticated side of the transport, and changed ones at the other.

``python -m tests.transport.fuzz_handshake --seconds 60`` draws inputs at random; with ``--atheris``
and atheris installed the same entry point is guided by coverage, from the same beginnings. Either
way what is kept must not grow, and an input that breaks a rule is printed and ends the run.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from greenroom.actors.transport.addresses import RefusedError
from greenroom.actors.transport.connection import (
    Authenticated,
    Closed,
    Connection,
    Refused,
    Sessions,
)
from greenroom.actors.transport.frames import DATA, HEADER, SMALL_MESSAGE
from greenroom.actors.transport.gate import (
    ROUTE_SIZE,
    ROUTED_SIZE,
    read_route,
    read_routed,
    write_route,
    write_routed,
)
from greenroom.actors.transport.handshake import (
    MAGIC,
    MAX_HANDSHAKE,
    ConnectionState,
    Handshake,
    Role,
)
from tests.transport.pairs import KEY, Link, Process, identity

NONCE = bytes(31) + b"\1"
OWN = identity("b")
HELLOS = (
    Handshake(Role.DIALER, identity("a"), key=None, nonce=None).start(),
    Handshake(Role.DIALER, identity("a"), key=KEY, nonce=bytes(32)).start(),
)
ROUTE = write_route(7, KEY, NONCE)
OTHER_KEY = bytes(32)
BODIES = (b"one", b"two" * 400, bytes(SMALL_MESSAGE + 5))
MAX_INPUT = 4096
GROWN_BLOCKS = 20_000  # of Python's allocator, beyond those after warming up
WARM_UP, CHECK_EVERY = 20_000, 5_000


def fuzz_one(data: bytes) -> int:
    """Give ``data`` to one of the targets, chosen by its first byte; return the bytes kept.

    AssertionError when a rule is broken; nothing else is ever raised.
    """
    choice, stream = (data[0], data[1:]) if data else (0, b"")
    return TARGETS[choice % len(TARGETS)](choice // len(TARGETS), stream)


def fuzz_stranger(choice: int, stream: bytes) -> int:
    """Feed a fresh remote connection: nothing without the key is taken for a peer's."""
    role = Role.DIALER if choice & 1 else Role.ACCEPTOR
    sessions = Sessions(OWN)
    connection = Connection(role, sessions, key=KEY, nonce=NONCE)
    piece = 1 + (choice >> 1)
    kept, events = 0, []
    for at in range(0, len(stream), piece):
        events += connection.receive_data(stream[at : at + piece])
        kept = max(kept, len(connection._received))
        connection.data_to_send()
        if events:
            break
    events += connection.receive_data(stream)
    events += connection.receive_eof()
    if [type(event) for event in events] != [Refused] or len(sessions):
        raise AssertionError(f"{role} {stream!r} made {events}")
    if kept > MAX_HANDSHAKE:
        raise AssertionError(f"{role} {stream!r} made the connection keep {kept} bytes")
    return kept


def fuzz_gate(choice: int, stream: bytes) -> int:
    """Give the gate a ROUTE, or a dialer a ROUTED: neither is taken unless the key made it."""
    made = write_route(7, KEY, NONCE) if choice & 1 else write_routed(ROUTE, KEY, found=True)
    size = ROUTE_SIZE if choice & 1 else ROUTED_SIZE
    for end in range(1, min(len(stream), size) + 1):
        piece = stream[:end]
        try:
            read = read_route(piece, [KEY]) if choice & 1 else read_routed(piece, ROUTE, KEY)
        except RefusedError:
            break
        if read is not None and piece not in {made, write_routed(ROUTE, KEY, found=False)}:
            raise AssertionError(f"{piece!r} was taken for {read}")
    return min(len(stream), size)


def fuzz_local(choice: int, stream: bytes) -> int:
    """Feed a connection of this user's own process, as a bug there might: no harm is done."""
    role = Role.DIALER if choice & 1 else Role.ACCEPTOR
    connection = Connection(role, Sessions(OWN))
    for part in (stream[: choice >> 1], stream[choice >> 1 :]):
        connection.receive_data(part)
        connection.data_to_send()
    connection.receive_eof()
    if connection.state is not ConnectionState.DEAD:
        raise AssertionError(f"{role} {stream!r} left the connection {connection.state}")
    return len(stream)


def fuzz_exchange(choice: int, stream: bytes) -> int:
    """Change what two honest ends say, in any state: what arrives is what was sent, or nothing.

    ``stream`` is a list of changes: two bytes for where, one for how, one to change it with.
    """
    left, right = Process("a"), Process("b")
    link = Link(left, right, remote=True, keys=(KEY, OTHER_KEY if choice & 16 else KEY))
    for number, body in enumerate(BODIES):
        left.sessions.to("b").send([body], number)
        right.sessions.to("a").send([body], number)
    side = choice & 1
    changes = [stream[at : at + 4] for at in range(0, min(len(stream) - 3, 16), 4)]
    link.collect()
    passed = 0
    for _ in range(12):
        for sender in (0, 1):
            if sender == side:
                passed = _change(link.transit[sender], changes, passed)
            link.carry(sender, None if choice & 2 else 1 + (choice << 3))
        link.collect()
    link.break_off()
    for process in (left, right):
        bodies = [message[0] for message in process.messages()]
        if bodies != list(BODIES[: len(bodies)]):
            raise AssertionError(f"{changes} made {[each[:50] for each in bodies]} arrive")
        ends = [event for event in process.events if isinstance(event, Refused | Closed)]
        if len(ends) > 1 or (choice & 16 and process.of(Authenticated)):
            raise AssertionError(f"{changes} made {process.events}")
    return passed


def _change(transit: bytearray, changes: list[bytes], passed: int) -> int:
    """Do the changes whose place lies in ``transit``; return how far the stream is after it."""
    size = len(transit)
    for change in list(changes):
        at = int.from_bytes(change[:2], "big") - passed
        if 0 <= at < size:
            changes.remove(change)
            how, by = change[2] % 5, change[3]
            if how == 0:
                transit[at : at + 1] = bytes([by])
            elif how == 1:
                del transit[at : at + 1 + by]
            elif how == 2:
                transit[at:at] = bytes([by]) * (1 + by)
            elif how == 3:
                transit[at:at] = transit[at : at + 1 + by]  # said again
            else:
                transit[at : at + 2] = transit[at : at + 2][::-1]
    return passed + size


TARGETS: tuple[Callable[[int, bytes], int], ...] = (
    fuzz_stranger,
    fuzz_gate,
    fuzz_local,
    fuzz_exchange,
)


def beginnings() -> list[bytes]:
    """Return right beginnings of everything that is said, as whole conversations, recorded."""
    link = Link(Process("a"), Process("b"), remote=True)
    link.processes[0].sessions.to("b").send([b"body"])
    link.run()
    recorded = [bytes(carried[:600]) for carried in link.carried]
    frame = HEADER.pack(DATA, 1, 4, 1, 0) + b"body"
    own_hello = Handshake(Role.ACCEPTOR, OWN, key=KEY, nonce=NONCE)._hello
    return [
        *HELLOS,
        *recorded,
        HELLOS[0] + frame,
        HELLOS[1] + b"\0\x50" + bytes(80),
        own_hello,
        ROUTE,
        ROUTE[:-1] + b"\0",
        write_route(7, OTHER_KEY, NONCE),
        write_routed(ROUTE, KEY, found=True),
        write_routed(ROUTE, OTHER_KEY, found=True),
        MAGIC + b"\0\2",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"",
    ]


def inputs(seed: int) -> Iterator[bytes]:
    """Yield garbage, and right beginnings that were cut, changed and continued at random."""
    draw = random.Random(seed)
    starts = beginnings()
    while True:
        start = draw.choice(starts)
        if draw.random() < 0.7:
            start = start[: draw.choice((8, 10, 11, 13, 44, 45, 83, 100, len(start)))]
        stream = bytearray(start + draw.randbytes(draw.choice((0, 0, 1, 2, 40, 600, 2000))))
        for _ in range(draw.choice((0, 0, 1, 3)) if stream else 0):
            stream[draw.randrange(len(stream))] = draw.randrange(256)
        if draw.random() < 0.3:
            change = (draw.choice((0, 60, 200, 1000, 35_000)) + draw.randrange(60)).to_bytes(
                2, "big"
            )
            stream[:0] = change + draw.randbytes(2)
        yield draw.randbytes(1) + bytes(stream)


class Growth:
    """Watches that inputs leave nothing in memory."""

    def __init__(self) -> None:
        self.count = 0
        self._blocks = 0

    def __call__(self, data: bytes) -> None:
        """Run one input."""
        fuzz_one(data)
        self.count += 1
        if self.count == WARM_UP:
            self._blocks = sys.getallocatedblocks()
        elif self.count > WARM_UP and self.count % CHECK_EVERY == 0:
            grown = sys.getallocatedblocks() - self._blocks
            if grown > GROWN_BLOCKS:
                raise AssertionError(f"{self.count} inputs left {grown} blocks of memory")


def fuzz_guided(seconds: float, seed: int, options: list[str]) -> None:
    """Run atheris, which ends the process."""
    atheris = importlib.import_module("atheris")  # optional, and without types
    atheris.instrument_all()
    with tempfile.TemporaryDirectory() as folder:
        for number, start in enumerate(beginnings()):
            for choice in range(2 * len(TARGETS)):
                (Path(folder) / f"{number}-{choice}").write_bytes(bytes([choice]) + start)
        limits = [f"-max_total_time={seconds:.0f}", f"-max_len={MAX_INPUT}", f"-seed={seed + 1}"]
        command = [sys.argv[0], *limits, "-rss_limit_mb=1024", "-print_final_stats=1", *options]
        command.append(f"-artifact_prefix={folder}/")  # it is printed too
        atheris.Setup([*command, folder], Growth())
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--atheris", action="store_true", help="more options are passed on to it")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments, rest = parser.parse_known_args()
    if arguments.atheris:
        fuzz_guided(arguments.seconds, arguments.seed, rest)
    end_at, growth = time.monotonic() + arguments.seconds, Growth()
    for data in inputs(arguments.seed):
        try:
            growth(data)
        except Exception:
            print(f"broken by {data!r}", file=sys.stderr)
            raise
        if time.monotonic() > end_at:
            break
    print(f"{growth.count} inputs, none taken for a peer's, and none left anything in memory")


if __name__ == "__main__":
    main()
