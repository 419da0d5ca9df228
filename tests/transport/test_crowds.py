"""A thousand idle and two hundred hostile connections at once: nobody else notices."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import tracemalloc

import pytest

from greenroom.actors.transport.addresses import Identity
from greenroom.actors.transport.gate import write_route
from greenroom.actors.transport.handshake import MAGIC, Handshake, Role
from tests.support.systems import free_port
from tests.transport.worlds import KEY, World

HERE, THERE = "127.0.0.2", "127.0.0.3"
IDLE, HOSTILE = 1000, 200


@pytest.fixture(autouse=True)
def descriptors_enough():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"needs 4096 descriptors, and may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def greetings(port, number):
    """Return what hostile strangers say; ``number`` is whom they want, if they get so far."""
    hello = Handshake(
        Role.DIALER, Identity("x", "0" * 16, 7, "stage"), key=bytes(32), nonce=bytes(32)
    ).start()
    recorded = write_route(number, KEY, bytes(32))
    return [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(2000),
        recorded[:50],  # torn
        write_route(port, bytes(32), bytes(32)),  # forged
        recorded + hello + b"\0\x50" + bytes(80),  # replayed
        recorded + hello[:20],
        MAGIC + b"\0\0" + bytes(80),
    ]


class Crowd:
    def __init__(self, world, place, number):
        self.place = place
        said = itertools.cycle(greetings(place[1], number))
        self.sockets = []
        for stranger in range(IDLE + HOSTILE):
            sock = self.connected()
            self.sockets.append(sock)
            if stranger >= IDLE:
                self.say(sock, next(said))
            if stranger % 100 == 0:
                world.passes(5)  # the backlog has an end

    def connected(self):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(self.place)
        return sock

    def say(self, sock, greeting):
        with contextlib.suppress(OSError):  # turned away already
            sock.send(greeting)

    def close(self):
        for sock in self.sockets:
            sock.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_traffic_goes_on_and_nothing_of_a_crowd_is_kept(world, caplog):
    port = free_port()
    _, one, there, other = *world.host(HERE, port), *world.host(THERE, port)
    one.send(other)
    world.until(lambda: one.done)
    files, sizes = open_files(), []
    for wave in range(3):
        crowd = Crowd(world, (THERE, port), other.address.number)
        for _ in range(200):
            one.send(other)
        world.until(lambda total=1 + 200 * (wave + 1): len(other.inbox) == total)
        assert len(there.strangers) <= there.strangers.limit
        assert len(other.strangers) <= HOSTILE
        _, fresh = world.host(f"127.0.0.{10 + wave}", port)
        fresh.send(other)
        world.until(lambda p=fresh: p.done, "a new peer gets in")
        crowd.close()
        for process in world.processes[-2:]:
            process.links.close()
        del world.processes[-2:], crowd, other.inbox[-1:], fresh
        world.until(lambda: not len(there.strangers) and not len(other.strangers))
        world.until(lambda: open_files() <= files, f"{files} files are open again")
        if not tracemalloc.is_tracing():
            tracemalloc.start()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[2] - sizes[1] < 300_000, sizes
    assert not one.dead
    lines = [record for record in caplog.records if record.levelname == "WARNING"]
    assert 3 < len(lines) < 60
