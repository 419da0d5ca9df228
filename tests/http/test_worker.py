"""Which connections the worker gives up on, and its event loop."""

import asyncio
import errno
import importlib.util
import os
import re
import socket
import struct
from types import SimpleNamespace

import pytest

from greenroom.http_front import worker
from greenroom.http_front.protocol import Connections, FrontProtocol
from greenroom.http_front.worker import Listener, most_connections, new_loop

HEADERS_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 90.0
SEND_TIMEOUT_S = 20.0
MAX_WAITING = 2 * 1024 * 1024
HALF = b"GET / HTTP/1.1\r\nHost: a\r\nX-Half: "
WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


OPEN = os.pipe()  # of which nobody leaves


class WireSocket:
    """What is watched while nothing is read of a wire."""

    peer = ""
    acknowledged = 0

    def fileno(self):
        return OPEN[0]

    def getpeername(self):
        return self.peer

    getsockname = getpeername

    def getsockopt(self, level, option, size):
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return struct.pack("=120xQ", self.acknowledged)[:size]


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written = b""
        self.closed = False
        self.paused = False
        self.unsent = 0
        self.socket = WireSocket()

    def get_extra_info(self, name, default=None):
        return self.socket if name == "socket" else default

    def get_write_buffer_size(self):
        return self.unsent

    def abort(self):
        self.closed = True

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = True

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False


class Server:
    """One connection, whose app answers each request once it is told to."""

    def __init__(self, loop):
        self.loop = loop
        self.wire = Wire()
        self.asked = []
        self.cancelled = []
        self.answers = asyncio.Semaphore(0)
        self.connections = Connections(
            self.answer,
            keep_alive_s=KEEP_ALIVE_S,
            header_timeout_s=HEADERS_TIMEOUT_S,
            send_timeout_s=SEND_TIMEOUT_S,
            opening_timeout_s=60,
            max_message_bytes=1000,
            max_waiting_bytes=MAX_WAITING,
            trusted=["127.0.0.1"],
        )
        self.protocol = FrontProtocol(self.connections)
        self.protocol.connection_made(self.wire)

    async def answer(self, scope, receive, send):
        self.asked.append(scope["path"])
        try:
            await self.answers.acquire()
            while (await receive()).get("more_body"):
                pass
        except asyncio.CancelledError:
            self.cancelled.append(scope["path"])
            raise
        body = scope["path"].encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def say(self, data):
        async def arrive():
            self.protocol.data_received(data)

        self.loop.run_until_complete(arrive())
        self.turn()

    def let_answer(self):
        self.answers.release()
        self.turn()

    def turn(self):
        async def over():
            for _ in range(20):  # more than anything here takes, and not a time
                await asyncio.sleep(0)

        self.loop.run_until_complete(over())

    def give_up_after(self, seconds, *, served_too=False, fresh_s=HEADERS_TIMEOUT_S):
        now = self.loop.time() + seconds
        self.connections.give_up(now, served_too=served_too, fresh_s=fresh_s)
        return self.wire.closed


@pytest.fixture
def loop():
    loop = new_loop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def server(loop):
    async def make():
        return Server(loop)

    async def end():
        server.protocol.connection_lost(None)
        await asyncio.sleep(0)
        server.connections.departures.close()

    server = loop.run_until_complete(make())
    yield server
    loop.run_until_complete(end())


def test_a_new_connection_that_stays_silent_is_closed(server):
    assert not server.give_up_after(HEADERS_TIMEOUT_S - 1)
    assert server.give_up_after(HEADERS_TIMEOUT_S + 1)
    assert server.wire.written == b""


def test_half_of_the_headers_are_not_waited_for_longer_than_that(server):
    server.say(HALF)
    assert not server.give_up_after(HEADERS_TIMEOUT_S - 1)
    server.say(b"more")
    assert server.give_up_after(HEADERS_TIMEOUT_S + 1), "a byte now and then gains no time"
    assert server.wire.written.startswith(b"HTTP/1.1 408 ")


def test_nor_are_those_of_a_later_request(server):
    server.say(WHOLE)
    server.let_answer()
    server.say(HALF)
    assert server.give_up_after(HEADERS_TIMEOUT_S + 1)
    assert server.wire.written.endswith(b"the headers did not arrive in time")


def test_a_request_under_way_is_left_alone(server):
    server.say(WHOLE)
    assert not server.give_up_after(1000, served_too=True, fresh_s=0)


def test_a_connection_that_was_served_is_kept_for_a_time(server):
    server.say(WHOLE)
    server.let_answer()
    assert not server.give_up_after(KEEP_ALIVE_S - 1)
    assert server.give_up_after(KEEP_ALIVE_S + 1)


def test_a_worker_that_leaves_closes_what_was_served_at_once(server):
    server.say(WHOLE)
    server.let_answer()
    assert server.give_up_after(0, served_too=True)


def test_a_connection_that_is_gone_is_forgotten(server):
    server.protocol.connection_lost(None)
    assert not server.connections.connections


def test_who_leaves_wants_no_answer(server):
    server.say(WHOLE + WHOLE.replace(b"/ ", b"/second "))
    server.protocol.connection_lost(None)
    server.turn()
    assert server.cancelled == ["/"]
    assert server.asked == ["/"], "the second's turn never comes"


def test_a_refusal_waits_for_the_answer_to_the_request_before(server):
    server.say(WHOLE + b"nonsense\r\n\r\n")
    assert server.wire.written == b""
    server.let_answer()
    first, second = server.wire.written.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 ")
    assert first.endswith(b"\r\n\r\n/")
    assert second.startswith(b"400 ")
    assert b"connection: close" in second
    assert server.wire.closed


def test_a_body_that_cannot_be_read_ends_its_own_request(server):
    chunked = b"POST /broken HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    server.say(chunked)
    server.say(b"zz\r\n")
    assert server.wire.written.startswith(b"HTTP/1.1 400 ")
    assert server.wire.closed
    assert server.cancelled == ["/broken"]


def test_and_not_those_before_it(server):
    chunked = b"POST /broken HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    server.say(WHOLE + WHOLE.replace(b"/ ", b"/second ") + chunked + b"zz\r\n")
    server.let_answer()
    server.let_answer()
    assert server.asked == ["/", "/second"]
    assert re.findall(rb"HTTP/1.1 (\d+) ", server.wire.written) == [b"200", b"200", b"400"]
    assert server.wire.closed


def test_a_client_that_takes_too_little_of_an_answer_is_cut(server):
    server.say(WHOLE)
    server.let_answer()
    server.wire.unsent = 1000
    assert not server.give_up_after(0)
    server.wire.socket.acknowledged = int(500 * SEND_TIMEOUT_S)
    assert not server.give_up_after(SEND_TIMEOUT_S), "it takes 500 bytes a second"
    server.wire.socket.acknowledged += int(499 * SEND_TIMEOUT_S)
    assert not server.give_up_after(2 * SEND_TIMEOUT_S - 1)
    assert server.give_up_after(2 * SEND_TIMEOUT_S)


def test_a_client_with_nothing_to_take_may_wait_for_an_answer(server):
    server.say(WHOLE)
    for seconds in (0, 1000, 2000):
        assert not server.give_up_after(seconds)


def test_what_is_sent_ahead_is_not_read_before_its_turn(server):
    server.say(WHOLE + WHOLE * 1000)
    assert server.asked == ["/"]
    assert server.wire.paused
    for _ in range(1000):
        server.let_answer()
        if len(server.asked) == 1001:
            break
    assert not server.wire.paused


def test_head_and_body_leave_together(server):
    written = []
    server.wire.write = written.append
    server.say(WHOLE)
    server.let_answer()
    assert len(written) == 1


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"GET / RTSP/1.0\r\nHost: a\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /  HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ],
)
def test_what_others_may_read_differently_is_refused(server, request_bytes, status):
    server.say(request_bytes)
    assert server.wire.written.startswith(b"HTTP/1.1 %d " % status)
    assert server.asked == []


def test_a_header_line_without_an_end_is_not_collected(server):
    server.say(HALF)
    for _ in range(70):
        server.say(b"a" * 1000)
    assert server.wire.written.startswith(b"HTTP/1.1 431 ")


def test_of_a_burst_it_takes_no_more_than_its_share_so_that_other_workers_get_theirs(loop):
    made = []

    class Taken(asyncio.Protocol):
        def connection_made(self, transport):
            made.append(transport)

    async def take_turns(listener, count):
        shared = SimpleNamespace(
            make=Taken, loop=loop, connections=(), header_timeout_s=HEADERS_TIMEOUT_S
        )
        accepting = Listener(listener, shared, 1000)
        accepting.open()
        while len(made) < count:
            before = len(made)
            await asyncio.sleep(0)
            assert len(made) <= before + 2, "about one per turn of the loop"
        accepting.close()
        for transport in made:
            transport.abort()
        await asyncio.sleep(0)

    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(40)]
        loop.run_until_complete(asyncio.wait_for(take_turns(listener, len(clients)), 20))
        for client in clients:
            client.close()


def test_it_accepts_again_when_the_system_has_descriptors_again(loop, monkeypatch):
    monkeypatch.setattr(worker, "ACCEPT_AGAIN_S", 0.05)
    made, warned = [], []

    class Taken(asyncio.Protocol):
        def connection_made(self, transport):
            made.append(transport)
            transport.abort()

    async def take():
        shared = SimpleNamespace(
            make=Taken,
            loop=loop,
            connections=(),
            header_timeout_s=HEADERS_TIMEOUT_S,
            warn=warned.append,
        )
        accepting = Listener(Exhausted(listener, 3), shared, 1000)
        accepting.open()
        while not made:
            await asyncio.sleep(0.01)
        accepting.close()
        await asyncio.sleep(0)

    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()):
        loop.run_until_complete(asyncio.wait_for(take(), 20))
    assert warned == ["no connection can be accepted: Too many open files"] * 3


class Exhausted:
    """A listening socket that has no descriptor to give, so many times."""

    def __init__(self, listener, times):
        self._listener = listener
        self._times = times
        self.setblocking = listener.setblocking
        self.fileno = listener.fileno

    def accept(self):
        if self._times:
            self._times -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()


def test_a_worker_takes_as_many_connections_as_descriptors_leave_room_for():
    assert most_connections(1024) == 896
    assert most_connections(64) == 1
    assert most_connections(1_000_000) == most_connections(-1) == 57_344


def test_the_loop_is_uvloops_where_that_is_installed(loop):
    installed = importlib.util.find_spec("uvloop") is not None
    assert (type(loop).__module__ == "uvloop") is installed
