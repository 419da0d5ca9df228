"""A thousand idle and two hundred hostile connections at once: nobody else notices."""

import contextlib
import itertools
import os
import resource
import socket
import ssl
import tracemalloc

import pytest

from tests.support.programs import cannot_run
from tests.support.systems import free_port
from tests.transport.worlds import HERE, THERE, open_files

IDLE, HOSTILE = 1000, 200


@pytest.fixture(autouse=True)
def descriptors_enough():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        cannot_run(f"needs 4096 descriptors, and may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def client_hello():
    """Return how a TLS session begins that will show no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def greetings():
    """Return what hostile strangers say."""
    hello = client_hello()
    return [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(2000), hello[:50], hello, hello * 2]


class Crowd:
    def __init__(self, world, place):
        self.place = place
        said = itertools.cycle(greetings())
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


def test_traffic_goes_on_and_nothing_of_a_crowd_is_kept(world, caplog):
    port = free_port()
    _, one, there, other = *world.host(HERE, port), *world.host(THERE, port)
    world.meet(one, other)
    files, sizes = len(open_files()), []
    for wave in range(3):
        crowd = Crowd(world, (THERE, port))
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
        world.until(lambda: len(open_files()) <= files, f"{files} files are open again")
        if not tracemalloc.is_tracing():
            tracemalloc.start()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[2] - sizes[1] < 300_000, sizes
    assert not one.dead
    lines = [record for record in caplog.records if record.levelname == "WARNING"]
    assert 3 < len(lines) < 60
