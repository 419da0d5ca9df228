"""WebSockets as the front sees them, with the replica's side by hand."""

import asyncio
import contextlib
import gc
import os
import socket
import struct
import tracemalloc
import weakref
from functools import partial

import pytest

from greenroom.actors.caller.streams import Stream
from greenroom.actors.messages.closing import close_frame
from greenroom.actors.messages.queries import (
    BINARY,
    END,
    MORE,
    TEXT,
    Process,
    StreamBegun,
    StreamPart,
)
from greenroom.core.config import HTTPOptions
from greenroom.http_front import websocket
from greenroom.http_front.connections import Connections, Listener
from greenroom.http_front.protocol import FrontProtocol
from tests.http.fake_link import FakeLink
from tests.http.wire import Conversation, connected, respond, turn_over

pytestmark = pytest.mark.anyio


class Replica(FakeLink):
    """Accepts, with these parts as its answer; keeps what it is fed."""

    def __init__(self, *parts, headers=(), end=True):
        super().__init__()
        self.parts = parts
        self.headers = headers
        self.end = end
        self.uploaded = []
        self.stopped = 0
        self.closing_frame = None
        self.is_hurried = False

    async def ask(self, query, on_upload):
        assert query.follows == "socket"
        on_upload(self)
        stream = Stream(StreamBegun(0, 101, self.headers, Process(1, 1, "x")), self)
        for data, ends in self.parts:
            stream.arrived(StreamPart(0, data, ends))
        return stream

    def taken(self, size):
        pass

    def stop(self):
        self.stopped += 1

    async def send(self, data, ends=MORE):
        self.uploaded.append((data, ends))

    def hurry(self):
        self.is_hurried = True

    def leave(self, data):
        self.closing_frame = data


async def converse(app, replica, *frames, drain=False, headers=None, **http):
    """Open a WebSocket whose client sends these frames; return the head and the frames it got."""
    app.link = replica
    app.rebuild(**http)
    if drain:
        app.front.drain()
    connection = connected(app.front)
    connection.say(opening(**(headers or {})))
    await turn_over()
    for each in frames:
        connection.say(each)
        await turn_over()
    head, _, rest = connection.wire.written.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 101 "):
        reader = asyncio.StreamReader()
        reader.feed_data(rest)
        reader.feed_eof()
        client = Client(None, reader, None)
        rest = [got async for got in client]
    await connection.end()
    return head, rest


async def test_messages_in_pieces_leave_whole_and_the_close_as_it_is(app):
    end = close_frame(4000, "x")
    parts = (b"te", MORE), (b"xt", TEXT), (b"\0", BINARY), (b"half", MORE), (end, END)
    _, got = await converse(app, Replica(*parts))
    assert got == [(TEXT_FRAME, b"text"), (BYTES, b"\0"), (CLOSE, end)]


async def test_what_the_client_sends_goes_to_the_replica_with_its_last_words(app):
    replica = Replica()
    end = close_frame(1001, "gone")
    said = frame("ä".encode(), TEXT_FRAME), frame(b"b"), frame(end, CLOSE)
    await converse(app, replica, *said)
    assert replica.uploaded == [("ä".encode(), TEXT), (b"b", BINARY)]
    assert replica.closing_frame == end


async def test_a_client_that_has_gone_is_heard_of_behind_messages_that_nobody_takes(app):
    class Unread(Replica):
        async def ask(self, query, on_upload):
            self.stream = await super().ask(query, on_upload)
            return self.stream

        async def send(self, data, ends=MORE):
            while not self.is_hurried:
                await asyncio.sleep(0)
            await super().send(data, ends)

    app.link = replica = Unread()
    app.rebuild()
    connection = connected(app.front)
    connection.say(REQUEST)
    await turn_over()
    connection.say(frame(b"one") + frame(b"two"))
    await turn_over()
    connection.protocol.connection_lost(None)
    await turn_over()
    assert (replica.uploaded, replica.closing_frame) == ([], None), "user code may read them yet"
    replica.stream.arrived(StreamPart(0, b"news", TEXT))
    await turn_over()
    assert replica.uploaded == [(b"one", BINARY), (b"two", BINARY)]
    assert replica.closing_frame == close_frame(1006)
    await connection.end()


async def test_headers_of_the_protocol_itself_are_ours_and_bad_ones_refuse(app):
    own = (
        (b"sec-websocket-protocol", b"v1"),
        (b"sec-websocket-accept", b"x"),
        (b"upgrade", b"x"),
        (b"x-kept", b"1"),
    )
    head, _ = await converse(app, Replica((close_frame(1000), END), headers=own))
    for line in (b"sec-websocket-protocol: v1", b"x-kept: 1", b"upgrade: websocket"):
        assert head.count(b"\r\n" + line) == 1
    assert b": x" not in head
    replica = Replica(headers=((b"x-bad", b"1\r\nx-injected: 1"),))
    head, body = await converse(app, replica)
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"x-bad" in body
    assert replica.closing_frame == close_frame(1006)


async def test_what_fails_before_it_is_open_is_500(app):
    class Failing(Replica):
        async def ask(self, *_):
            raise ValueError("broken on purpose")

    head, body = await converse(app, Failing())
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"broken" not in body


@pytest.mark.parametrize("is_draining", [False, True])
async def test_its_status_and_what_it_was_sent_are_logged_with_the_id_of_its_answer(
    app, is_draining
):
    replica = Replica(("\xe4tex".encode(), MORE), (b"t", TEXT), (close_frame(1000), END))
    head, got = await converse(app, replica, drain=is_draining, headers={"X-Request-ID": "mine"})
    (entry,) = app.log()
    assert head.startswith(b"HTTP/1.1 %d " % entry["status"])
    assert head.count(b"\r\nx-request-id: mine") == 1
    assert entry["request_id"] == "mine"
    if is_draining:
        assert (entry["status"], entry["bytes"]) == (503, len(got))
        assert b"stopping" in got
    else:
        assert (entry["status"], entry["bytes"]) == (101, 6)


async def test_a_worker_that_stops_closes_those_that_are_open_and_those_that_open(app):
    app.link = replica = Replica()
    app.rebuild()
    closing = close_frame(1012, "the server stops")
    for is_first in (True, False):
        connection = connected(app.front)
        connection.say(REQUEST)
        await turn_over()
        if is_first:
            app.front.conversations.close_all()
            await turn_over()
        assert connection.wire.written.endswith(closing)
        await connection.end()
        assert replica.closing_frame == closing


async def test_middlewares_that_are_for_websockets_see_them(app):
    def only(host):
        return [["starlette.middleware.trustedhost:TrustedHostMiddleware", {"allowed_hosts": host}]]

    head, _ = await converse(app, Replica((close_frame(1000), END)), middlewares=only(["test"]))
    assert head.startswith(b"HTTP/1.1 101 ")
    head, body = await converse(app, FakeLink(), middlewares=only(["other"]))
    assert head.startswith(b"HTTP/1.1 400 ")
    assert body == b"Invalid host header"


# --- the protocol -----------------------------------------------------------------------------


async def echo(_scope, receive, send):
    await receive()
    await send({"type": "websocket.accept"})
    while (event := await receive())["type"] != "websocket.disconnect":
        await send({**event, "type": "websocket.send"})


def opening(path=b"/", **headers):
    fields = {
        "Host": "test",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        **headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return b"GET " + path + b" HTTP/1.1\r\n" + lines.encode() + b"\r\n"


REQUEST = opening()


class Client:
    """A connection to a worker's protocol in this process, and what has come over it."""

    def __init__(self, connections, reader, writer):
        self.connections = connections
        self.reader = reader
        self.writer = writer

    async def another(self):
        address = self.writer.get_extra_info("peername")
        return Client(self.connections, *await asyncio.open_connection(*address))

    async def open(self, path=b"/", **headers):
        self.send(opening(path, **headers))
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        return int(head.split(b" ")[1])

    def send(self, data):
        self.writer.write(data)

    async def read(self):
        """Return the next frame's opcode and payload; None at the end."""
        try:
            first, size = await asyncio.wait_for(self.reader.readexactly(2), 10)
            if size == 126:
                size = int.from_bytes(await self.reader.readexactly(2), "big")
            return first & 0xF, await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def __aiter__(self):
        while (got := await self.read()) is not None:
            yield got

    async def closed(self):
        """Read to the end; return the close code that came."""
        code = None
        async for got in self:
            if got[0] == CLOSE:
                self.send(frame(got[1], CLOSE))
                code = int.from_bytes(got[1][:2], "big")
        return code


CONT, TEXT_FRAME, BYTES, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


def frame(payload, opcode=BYTES, *, fin=True):
    mask = os.urandom(4)
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 65536:
        length = bytes([0x80 | 126]) + struct.pack("!H", size)
    else:
        length = bytes([0x80 | 127]) + struct.pack("!Q", size)
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return bytes([0x80 * fin | opcode]) + length + mask + masked


async def check(connections):
    """Do what a worker does once a second."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(0.05)
        connections.close_idle(loop.time())


@contextlib.asynccontextmanager
async def talking(app=echo, **options):
    """Serve ``app`` by the worker's protocol; give a client."""
    limits = {"request_timeout_s": 5, "send_timeout_s": 5, "max_websocket_message_bytes": 2**20}
    connections = Connections(app, HTTPOptions(**{**limits, **options}), 100)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listener = Listener(listening, connections, partial(FrontProtocol, connections))
        listener.open()
        client = Client(connections, *await asyncio.open_connection(*listening.getsockname()))
        checking = asyncio.create_task(check(connections))
        try:
            yield client
        finally:
            checking.cancel()
            client.writer.close()
            listener.close()
            async with asyncio.timeout(20):
                while connections.tasks or connections.all:
                    await asyncio.sleep(0.01)
    assert connections.waiting_bytes == 0


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(websocket, "PING_S", 0.1)
    monkeypatch.setattr(websocket, "MESSAGE_TIMEOUT_S", 0.3)


@pytest.fixture
def patient(hasty, monkeypatch):
    """Give clients the time to answer, in which a busy machine may do other things."""
    monkeypatch.setattr(websocket, "PING_S", 1.0)


async def test_a_client_that_neither_answers_nor_takes_anything_is_dropped(hasty):
    async with talking() as client:
        assert await client.open() == 101
        # It acknowledges what it is sent, in its kernel, and no more from then on.
        assert await client.closed() == 1011


async def test_a_client_that_answers_pings_stays(patient):
    async with talking() as client:
        assert await client.open() == 101
        for _ in range(3):
            opcode, payload = await client.read()
            assert opcode == PING
            client.send(frame(payload, PONG))
        client.send(frame(b"still here"))
        while (got := await client.read())[0] == PING:
            pass
        assert got == (BYTES, b"still here")


async def test_a_client_whose_messages_nobody_takes_stays(hasty):
    gate = asyncio.Event()

    async def slow(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        await gate.wait()
        await send({"type": "websocket.send", "bytes": (await receive())["bytes"]})

    async with talking(slow) as client:
        assert await client.open() == 101
        client.send(frame(b"message"))
        for _ in range(5):
            assert (await client.read())[0] == PING
        gate.set()
        while (got := await client.read())[0] == PING:
            pass
        assert got == (BYTES, b"message")


async def test_a_message_that_never_ends_is_abandoned(patient):
    async with talking() as client:
        assert await client.open() == 101
        message = frame(b"x" * 10_000)
        closed = asyncio.create_task(client.closed())
        for at in range(len(message)):
            client.send(message[at : at + 1])
            await asyncio.wait((closed,), timeout=0.02)
            if closed.done():
                break
        assert await closed == 1008


async def test_what_a_message_sent_fast_gains_it_no_time_for_later(patient):
    async with talking() as client:
        assert await client.open() == 101
        client.send(frame(b"x" * 900_000)[:-1])
        assert await client.closed() == 1008


async def test_nor_does_a_message_that_ended_with_the_beginning_of_the_next_in_the_same_read(
    patient,
):
    async with talking() as client:
        assert await client.open() == 101
        client.send(frame(b"first") + frame(b"x" * 900)[:-1])
        while (got := await client.read())[0] == PING:
            pass
        assert got == (BYTES, b"first")
        assert await client.closed() == 1008


HELD = {
    "part of a frame": frame(b"x" * 700_000)[:600_000],
    "fragments": frame(b"x" * 600_000, fin=False),
    "nobody takes it": frame(b"first") + frame(b"x" * 600_000),
    "text of wide characters": frame(b"first") + frame(("x" * 150_000 + "🙂").encode(), TEXT_FRAME),
}


@pytest.mark.parametrize("sent", HELD.values(), ids=HELD)
async def test_messages_that_wait_are_in_the_budget_for_bodies(sent):
    async def accepting(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        await asyncio.Event().wait()

    async with talking(accepting, max_waiting_body_bytes=2**20) as first:
        second = await first.another()
        for client in (first, second):
            assert await client.open() == 101
        first.send(sent)
        while first.connections.waiting_bytes < 599_000:
            await asyncio.sleep(0.01)
        second.send(sent)
        assert await second.closed() == 1013
        second.writer.close()
        for task in list(first.connections.tasks):
            task.cancel()


@pytest.mark.parametrize("is_next_here", [False, True])
async def test_messages_that_are_taken_are_in_it_no_more(is_next_here):
    seen, size = [], 400_000

    async def taking(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] == "websocket.receive":
            seen.append(client.connections.waiting_bytes)
            await send({"type": "websocket.send", "bytes": b"taken"})
            while is_next_here and len(seen) < 3 and client.connections.waiting_bytes < 2 * size:
                await asyncio.sleep(0.001)

    async with talking(taking, max_waiting_body_bytes=2**20) as client:
        assert await client.open() == 101
        for _ in range(3):
            client.send(frame(b"x" * size))
            assert await client.read() == (BYTES, b"taken")
    assert len(seen) == 3
    assert all(size <= each < size + 1000 for each in seen)


@pytest.mark.parametrize(
    "data",
    [
        frame(b"x" * 10_000)[:9_000],
        frame(b"x" * 9_000, fin=False),
        frame(b"x", opcode=3),  # no opcode of the protocol: an error, with its frames
    ],
    ids=["part of a frame", "fragment", "broken"],
)
def test_what_a_connection_held_is_free_once_it_is_closed(monkeypatch, data):
    parsers = []
    taken = asyncio.Event()

    class Kept(websocket.ServerProtocol):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            parsers.append(weakref.ref(self))

        def receive_data(self, data):
            super().receive_data(data)
            if not data.startswith(b"GET "):
                taken.set()

    monkeypatch.setattr(websocket, "ServerProtocol", Kept)

    async def leaving():
        async with talking() as client:
            assert await client.open() == 101
            client.send(data)
            await taken.wait()

    gc.collect()
    gc.disable()
    try:
        asyncio.run(leaving())
        assert {parser() for parser in parsers} == {None}
    finally:
        gc.enable()


async def test_fragments_however_many_are_one_message():
    async with talking() as client:
        assert await client.open() == 101
        client.send(frame(b"a", fin=False))
        client.send(frame(b"", CONT, fin=False) * 5_000)
        client.send(frame(b"b", CONT, fin=False) * 10)
        client.send(frame(b"c", CONT))
        assert await client.read() == (BYTES, b"a" + b"b" * 10 + b"c")


async def test_of_many_empty_messages_nobody_takes_few_are_read_and_the_others_counted():
    async def silent(_scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        await asyncio.Event().wait()

    connection = Conversation(silent, HTTPOptions())
    connection.say(REQUEST)
    await turn_over()
    gc.collect()
    tracemalloc.start()
    connection.say(frame(b"", TEXT_FRAME) * 50_000)
    await turn_over()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert connection.wire.paused
    assert taken > 1_000_000
    assert 0.8 * taken < connection.connections.waiting_bytes < 1.2 * taken
    for task in connection.connections.tasks:
        task.cancel()
    await turn_over()
    assert connection.connections.waiting_bytes == 0, "the app has ended"
    await connection.end()


async def test_messages_of_a_client_that_has_left_take_no_room_however_long_the_app_runs():
    seen, go_on = [], asyncio.Event()

    async def slow(_scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        await go_on.wait()
        while (event := await receive())["type"] == "websocket.receive":
            seen.append((len(event["bytes"]), connection.connections.waiting_bytes))

    connection = Conversation(slow, HTTPOptions())
    connection.say(REQUEST)
    await turn_over()
    connection.say(frame(b"x" * 600_000))
    await turn_over()
    assert connection.connections.waiting_bytes > 600_000
    connection.wire.close()
    connection.protocol.connection_lost(None)
    assert connection.connections.waiting_bytes == 0
    go_on.set()
    await turn_over()
    assert seen == [(600_000, 0)], "it has them all the same"
    assert not connection.connections.tasks


async def test_a_task_that_an_app_leaves_waiting_for_a_message_hears_of_the_end():
    waiting = []

    async def leaving(_scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        waiting.append(asyncio.ensure_future(receive()))
        await asyncio.sleep(0)

    connection = Conversation(leaving, HTTPOptions())
    connection.say(REQUEST)
    await turn_over()
    await connection.end()
    await turn_over()
    assert waiting[0].done()
    assert waiting[0].result()["type"] == "websocket.disconnect"


async def test_an_app_that_closes_amid_many_messages_has_them_skipped_in_turns_up_to_the_answer(
    monkeypatch,
):
    monkeypatch.setattr(websocket, "CLOSE_S", 600)  # which a busy machine needs for that
    gate = asyncio.Event()

    async def closing(_scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        await gate.wait()
        await send({"type": "websocket.close"})
        await receive()

    connection = Conversation(closing, HTTPOptions())
    connection.say(REQUEST)
    await turn_over()
    flood = frame(b"", TEXT_FRAME) * websocket.TURN
    connection.say(flood)
    gate.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert connection.wire.written.endswith(close_frame(1000))
    assert connection.wire.paused, "what is not skipped yet is bounded"
    await turn_over()
    assert not connection.wire.paused
    connection.say(flood + frame(close_frame(1000), CLOSE))
    await turn_over()
    assert connection.wire.closed
    await connection.end()


async def test_of_many_pings_some_are_answered_at_once_and_others_have_their_turn():
    connection = Conversation(echo, HTTPOptions())
    connection.say(REQUEST)
    await turn_over()
    opened = len(connection.wire.written)
    connection.say(frame(b"", PING) * websocket.TURN)
    assert len(connection.wire.written) - opened <= 2 * websocket.TURN / 6
    await turn_over()
    assert connection.wire.written[opened:] == b"\x8a\0" * websocket.TURN
    assert not connection.wire.paused
    await connection.end()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x82\x01x", 1002),
        (frame(b"x", CONT), 1002),
        (frame(b"x", 5), 1002),
        (frame(b"\xff", TEXT_FRAME), 1007),
        (frame(b"x" * (2**20 + 1)), 1009),
    ],
    ids=["not masked", "of no message", "an opcode that is none", "no UTF-8", "too large"],
)
async def test_what_breaks_the_protocol_is_closed_with_the_code_for_it(data, code):
    async with talking() as client:
        assert await client.open() == 101
        client.send(data)
        assert await client.closed() == code


async def test_a_path_that_is_no_ascii_is_refused():
    async with talking() as client:
        assert await client.open(b"/\xff") == 400


@pytest.mark.parametrize(
    ("said", "scheme"),
    [({}, "ws"), ({"X-Forwarded-Proto": "https"}, "wss"), ({"X-Forwarded-Proto": "wss"}, "wss")],
)
async def test_the_scheme_is_a_websockets_also_where_a_proxy_names_it(said, scheme):
    schemes = []

    async def accepting(scope, _receive, send):
        schemes.append(scope["scheme"])
        await send({"type": "websocket.accept"})

    async with talking(accepting) as client:
        assert await client.open(**said) == 101
    assert schemes == [scheme]


async def test_none_is_opened_before_the_request_ahead_of_it_is_answered():
    gate = asyncio.Event()

    async def answering(scope, _receive, send):
        if scope["type"] == "websocket":
            assert gate.is_set()
            await send({"type": "websocket.accept"})
            return
        await gate.wait()
        await respond(send)

    async with talking(answering) as client:
        client.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        opening = asyncio.create_task(client.open())
        await asyncio.wait((opening,), timeout=0.2)
        gate.set()
        assert await opening == 200, "that of the first"
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize("asked", [{}, {"X-Request-Disconnect-Disabled": "?1"}])
async def test_an_opening_whose_client_leaves_is_cancelled(asked):
    cancelled = asyncio.Event()

    async def waiting(_scope, _receive, _send):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with talking(waiting) as client:
        opening = asyncio.create_task(client.open(**asked))
        await asyncio.wait((opening,), timeout=0.2)
        opening.cancel()
        client.writer.transport.abort()
        await cancelled.wait()


async def test_a_client_that_leaves_is_gone_though_it_never_took_what_was_sent():
    events = []

    async def app(_scope, receive, send):
        events.append(await receive())
        await send({"type": "websocket.accept"})
        events.append(await receive())

    connection = Conversation(app, HTTPOptions())
    connection.say(REQUEST)
    await turn_over()
    connection.protocol.eof_received()
    await turn_over()
    assert [(each["type"], each.get("code")) for each in events] == [
        ("websocket.connect", None),
        ("websocket.disconnect", 1006),
    ]
    await connection.end()


async def test_a_refusal_of_the_apps_own_is_a_whole_response():
    async def refusing(_scope, _receive, send):
        headers = [(b"x-why", b"1")]
        await send({"type": "websocket.http.response.start", "status": 401, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": b"n", "more_body": True})
        await send({"type": "websocket.http.response.body", "body": b"o"})

    async with talking(refusing) as client:
        assert await client.open() == 401
        assert await client.reader.read() == b"1\r\nn\r\n1\r\no\r\n0\r\n\r\n"


async def test_a_failing_app_is_cut_off_or_1011():
    async def failing(scope, _receive, send):
        if scope["path"] == "/later":
            await send({"type": "websocket.accept"})
        raise ValueError("broken on purpose")

    async with talking(failing) as client:
        client.send(REQUEST)
        assert await client.reader.read() == b""
    async with talking(failing) as client:
        assert await client.open(b"/later") == 101
        assert await client.closed() == 1011


async def test_what_comes_before_the_opening_is_answered_is_taken_after_it():
    gate = asyncio.Event()

    async def late(scope, receive, send):
        await gate.wait()
        await echo(scope, receive, send)

    async with talking(late) as eager:
        eager.send(REQUEST + frame(b"early"))
        gate.set()
        await eager.reader.readuntil(b"\r\n\r\n")
        assert await eager.read() == (BYTES, b"early")


async def test_what_comes_before_the_opening_is_answered_is_not_read_on_without_a_bound():
    async def silent(_scope, _receive, _send):
        await asyncio.Event().wait()

    connection = Conversation(silent, HTTPOptions())
    connection.say(opening() + frame(b"x" * 1000))
    await turn_over()
    assert connection.wire.paused
    assert not connection.wire.written
    await connection.end()


async def test_pings_whose_pongs_are_not_read_are_not_read_either_and_the_client_is_cut():
    async with talking(send_timeout_s=0.3) as client:
        assert await client.open() == 101
        client.writer.transport.pause_reading()
        sent = 0
        pings = frame(b"x" * 125, PING) * 1000
        while not client.writer.transport.is_closing():
            client.send(pings)
            with contextlib.suppress(ConnectionError):
                await client.writer.drain()
            sent += len(pings)
            assert sent < 50_000_000


async def test_who_breaks_the_protocol_has_no_more_time_by_taking_nothing(monkeypatch):
    monkeypatch.setattr("greenroom.http_front.connections.LINGER_S", 0.01)

    cut = asyncio.Event()
    connection = Conversation(echo, HTTPOptions())
    connection.wire.abort = cut.set
    connection.say(opening())
    await turn_over()
    connection.protocol.data_received(frame(b"x", opcode=3))
    await asyncio.wait_for(cut.wait(), 10)
    await connection.end()
