"""Throws bytes at the unauthenticated side of the transport.

With atheris installed ``python -m tests.transport.fuzz_handshake --atheris -max_total_time=60`` is
guided by coverage; without it the same entry point takes random inputs for ``--seconds``.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
from collections.abc import Iterator

from tests.transport.pairs import KEY, identity
from understudy.actors.transport.events import Refused
from understudy.actors.transport.handshake import MAX_HANDSHAKE, Handshake, Role
from understudy.actors.transport.protocol import Connection
from understudy.actors.transport.sessions import Sessions

NONCE = bytes(31) + b"\1"
OWN = identity("b")
HELLOS = (
    Handshake(Role.DIALER, identity("a"), key=None, nonce=None).start(),
    Handshake(Role.DIALER, identity("a"), key=KEY, nonce=bytes(32)).start(),
)


def fuzz_one(data: bytes) -> int:
    """Feed ``data`` to a fresh remote connection; return the most bytes that it kept.

    The first byte chooses the role and the size of the pieces, the rest is the stream. Raises when
    the stream is taken for an authenticated peer's, or more than one Refused comes.
    """
    choice, stream = (data[0], data[1:]) if data else (0, b"")
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
        raise AssertionError(f"{data!r} made {events}")
    if kept > MAX_HANDSHAKE:
        raise AssertionError(f"{data!r} made the connection keep {kept} bytes")
    return kept


def inputs(seed: int) -> Iterator[bytes]:
    """Yield garbage, and right beginnings that were cut, changed and continued at random."""
    draw = random.Random(seed)
    while True:
        start = draw.choice((b"", *HELLOS))[: draw.choice((8, 10, 11, 13, 45, 100))]
        stream = bytearray(start + draw.randbytes(draw.choice((0, 1, 2, 40, 600, 2000))))
        for _ in range(draw.choice((0, 0, 1, 3)) if stream else 0):
            stream[draw.randrange(len(stream))] = draw.randrange(256)
        yield draw.randbytes(1) + bytes(stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments, rest = parser.parse_known_args()
    if arguments.atheris:
        atheris = importlib.import_module("atheris")  # optional, and without types
        atheris.instrument_all()
        atheris.Setup([sys.argv[0], *rest], fuzz_one)
        atheris.Fuzz()
        return
    end_at, count = time.monotonic() + arguments.seconds, 0
    for count, data in enumerate(inputs(arguments.seed), 1):  # noqa: B007
        fuzz_one(data)
        if time.monotonic() > end_at:
            break
    print(f"{count} inputs, none taken for a peer")


if __name__ == "__main__":
    main()
