"""Clients that leave while nothing is read of their connections."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator

import pytest

from greenroom.http_front.protocol import DisconnectWatcher

DEADLINE_S = 10.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Give both ends of a TCP connection; what the second has sent is never read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    with near, far:
        far.sendall(b"x" * 1000)
        yield near, far


def run(watched: Callable[[DisconnectWatcher, asyncio.Event], Awaitable[None]]) -> None:
    async def within() -> None:
        departures = DisconnectWatcher()
        try:
            await asyncio.wait_for(watched(departures, asyncio.Event()), DEADLINE_S)
        finally:
            departures.close()

    asyncio.run(within())


@pytest.mark.parametrize("how", ["before", "after", "reset", "half"])
def test_whoever_leaves_is_told_of_behind_what_is_not_read(pair: Pair, how: str) -> None:
    near, far = pair

    def leave() -> None:
        if how == "reset":
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half":
            far.shutdown(socket.SHUT_WR)
        else:
            far.close()

    async def watch(departures: DisconnectWatcher, told: asyncio.Event) -> None:
        if how == "before":
            leave()
        departures.watch(near.fileno(), told.set)
        if how != "before":
            leave()
        await told.wait()
        departures.unwatch(near.fileno())

    run(watch)


def test_who_stays_and_who_is_not_watched_any_more_are_not_told_of(pair: Pair) -> None:
    near, far = pair
    told = []

    async def watch(departures: DisconnectWatcher, last: asyncio.Event) -> None:
        departures.watch(near.fileno(), lambda: told.append("too late"))
        far.sendall(b"more")
        departures.unwatch(near.fileno())
        far.close()
        with contextlib.ExitStack() as stack:
            other, its_end = (stack.enter_context(each) for each in socket.socketpair())
            departures.watch(other.fileno(), last.set)
            its_end.close()
            await last.wait()

    run(watch)
    assert not told
