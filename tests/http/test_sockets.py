"""WebSockets as the front sees them, with the replica's side by hand."""

import asyncio
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.actors.messages import BINARY, END, MORE, TEXT, Process, StreamBegun, StreamPart
from understudy.actors.streams import Stream
from understudy.core.closing import close_frame
from understudy.http_front import socket_protocol
from understudy.http_front.fake import FakeDispatcher
from understudy.http_front.socket_protocol import MOST_UNREAD, FrontSocket

SCOPE = {
    "type": "websocket",
    "http_version": "1.1",
    "scheme": "ws",
    "path": "/ws",
    "raw_path": b"/ws",
    "query_string": b"",
    "headers": [(b"host", b"test")],
    "client": ("127.0.0.1", 5),
    "server": None,
}
EXTENSIONS = {"extensions": {"websocket.http.response": {}}}


class Replica(FakeDispatcher):
    """Accepts, with these parts as its answer; keeps what it is fed."""

    def __init__(self, *parts, headers=(), end=True):
        super().__init__()
        self.parts = parts
        self.headers = headers
        self.end = end
        self.fed = []
        self.stopped = 0
        self.last_words = None

    async def ask(self, *, follows, on_fed, **_):
        assert follows == "socket"
        on_fed(self)
        stream = Stream(StreamBegun(0, 101, self.headers, Process(1, 1, "x")), self)
        for data, ends in self.parts:
            stream.arrived(StreamPart(0, data, ends))
        return stream

    def taken(self, size):
        pass

    def stop(self):
        self.stopped += 1

    async def send(self, data, ends=MORE):
        self.fed.append((data, ends))

    def leave(self, data):
        self.last_words = data


def converse(app, replica, *events, drain=False, extensions=True):
    """Open a WebSocket whose client sends these events; return what it got."""
    app.dispatcher = replica
    app.rebuild()
    incoming = [{"type": "websocket.connect"}, *events]
    sent = []

    async def receive():
        if incoming:
            return incoming.pop(0)
        return await asyncio.Event().wait()

    async def send(event):
        sent.append(event)

    async def run():
        app.front.draining = drain
        scope = {**SCOPE, **(EXTENSIONS if extensions else {})}
        await asyncio.wait_for(app.front(scope, receive, send), 10)

    asyncio.run(run())
    return sent


def test_messages_in_pieces_leave_whole_and_the_close_as_it_is(app):
    replica = Replica(
        (b"te", MORE),
        (b"xt", TEXT),
        (b"\0", BINARY),
        (b"half", MORE),
        (close_frame(4000, "x"), END),
    )
    accept, *rest = converse(app, replica)
    assert accept["type"] == "websocket.accept"
    assert [name for name, _ in accept["headers"]] == [b"x-request-id"]
    assert rest == [
        {"type": "websocket.send", "text": "text"},
        {"type": "websocket.send", "bytes": b"\0"},
        {"type": "websocket.close", "code": 4000, "reason": "x"},
    ]
    assert app.log()[0]["status"] == 101
    assert app.log()[0]["bytes"] == 5


def test_what_the_client_sends_goes_to_the_replica_with_its_last_words(app):
    replica = Replica()
    converse(
        app,
        replica,
        {"type": "websocket.receive", "text": "ä", "bytes": None},
        {"type": "websocket.receive", "bytes": b"b"},
        {"type": "websocket.disconnect", "code": 1001, "reason": "gone"},
    )
    assert replica.fed == [("ä".encode(), TEXT), (b"b", BINARY)]
    assert replica.last_words == close_frame(1001, "gone")


def test_headers_of_the_protocol_itself_are_ours_and_bad_ones_refuse(app):
    own = (
        (b"sec-websocket-protocol", b"v1"),
        (b"sec-websocket-accept", b"x"),
        (b"upgrade", b"x"),
        (b"x-kept", b"1"),
    )
    accept = converse(app, Replica((close_frame(1000), END), headers=own))[0]
    assert accept["subprotocol"] == "v1"
    assert [name for name, _ in accept["headers"]] == [b"x-kept", b"x-request-id"]
    replica = Replica(headers=((b"x-bad", b"1\r\nx-injected: 1"),))
    start, body = converse(app, replica)
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 500)
    assert b"x-bad" in body["body"]
    assert replica.last_words == close_frame(1006)


def test_a_refusal_is_a_response_or_where_the_server_has_none_a_bare_close(app):
    start, body = converse(app, FakeDispatcher(), drain=True)
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 503)
    assert b"stopping" in body["body"]
    assert app.log()[-1]["status"] == 503
    (close,) = converse(app, FakeDispatcher(), drain=True, extensions=False)
    assert close["type"] == "websocket.close"
    assert app.log()[-1]["status"] == 403


def test_a_worker_that_stops_closes_those_that_are_open_and_those_that_open(app):
    app.dispatcher = replica = Replica()
    app.rebuild()
    sent = []

    async def run():
        opened = asyncio.Event()
        incoming = [{"type": "websocket.connect"}]

        async def receive():
            return incoming.pop(0) if incoming else await asyncio.Event().wait()

        async def send(event):
            sent.append(event)
            opened.set()

        serving = asyncio.create_task(app.front({**SCOPE, **EXTENSIONS}, receive, send))
        await asyncio.wait_for(opened.wait(), 10)
        app.front.close_sockets()
        await asyncio.wait_for(serving, 10)
        incoming.append({"type": "websocket.connect"})
        await asyncio.wait_for(app.front({**SCOPE, **EXTENSIONS}, receive, send), 10)

    asyncio.run(run())
    assert [(each["type"], each.get("code")) for each in sent] == [
        ("websocket.accept", None),
        ("websocket.close", 1012),
    ] * 2
    assert replica.last_words == close_frame(1012, "the server stops")


# --- the protocol -----------------------------------------------------------------------------


class Transport:
    """A connection whose other side is the test."""

    def __init__(self):
        self.written = b""
        self.paused = self.aborted = self.closed = False

    def write(self, data):
        self.written += data

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    def abort(self):
        self.aborted = True

    def close(self):
        self.closed = True

    def get_extra_info(self, _name):
        return self

    def getsockopt(self, *_):
        raise OSError("no TCP")


class Log:
    def debug(self, *_):
        pass

    exception = debug


async def no_wait():
    pass


def frame(payload, opcode=2, *, fin=True):
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


def speak(test, app=None):
    """Run ``test(protocol, transport)`` beside an app that accepts."""

    async def accepting(_scope, receive, send):
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass

    async def run():
        transport = Transport()
        scope = {"headers": [(b"sec-websocket-key", b"x")]}
        protocol = FrontSocket(transport, scope, app or accepting, Log(), 2**24, no_wait)
        running = asyncio.create_task(protocol.run())
        await asyncio.wait_for(test(protocol, transport), 10)
        protocol.feed_eof()
        await asyncio.wait_for(running, 10)

    asyncio.run(run())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


@given(st.binary(max_size=10_000), st.binary(min_size=4, max_size=4))
def test_unmasking_is_an_exclusive_or_by_the_key(payload, key):
    expected = bytes(byte ^ key[at % 4] for at, byte in enumerate(payload))
    assert FrontSocket._unmask(None, payload, key) == expected


def test_a_client_that_neither_answers_nor_takes_anything_is_dropped(monkeypatch):
    monkeypatch.setattr(socket_protocol, "PING_S", 0.1)

    async def silent(_protocol, transport):
        await until(lambda: transport.aborted)
        assert b"\x89\x00" in transport.written, "it was pinged"

    speak(silent)


def test_a_client_that_answers_pings_stays(monkeypatch):
    monkeypatch.setattr(socket_protocol, "PING_S", 0.1)

    async def answering(protocol, transport):
        for _ in range(5):
            transport.written = b""
            await until(lambda: b"\x89\x00" in transport.written)
            protocol.feed_data(frame(b"", 0xA))
        assert not transport.aborted

    speak(answering)


def test_a_message_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(socket_protocol, "PING_S", 0.1)
    monkeypatch.setattr(socket_protocol, "MESSAGE_TIMEOUT_S", 0.3)

    async def dribbling(protocol, transport):
        message = iter(frame(b"x" * 10_000))
        while not transport.closed:
            protocol.feed_data(bytes([next(message)]))
            await asyncio.sleep(0.02)
        assert struct.pack("!H", 1008) in transport.written

    speak(dribbling)


def test_what_waits_for_an_app_that_does_not_read_is_bounded_in_bytes():
    gate = asyncio.Event()
    got = []

    async def slow(_scope, receive, send):
        await send({"type": "websocket.accept"})
        await gate.wait()
        while (event := await receive())["type"] != "websocket.disconnect":
            got.append(event.get("bytes"))

    async def test(protocol, transport):
        message = frame(b"x" * (MOST_UNREAD // 2))
        for _ in range(10):
            protocol.feed_data(message)
            await asyncio.sleep(0)
        await until(lambda: transport.paused)
        waiting = sum(len(event.get("bytes", b"")) for event in protocol._receive_queue._queue)
        assert waiting <= 2 * MOST_UNREAD
        gate.set()
        await until(lambda: len([each for each in got if each]) == 10)

    speak(test, slow)


@pytest.mark.parametrize("status", [401, 299])
def test_a_refusal_of_the_apps_own_is_a_whole_response(status):
    async def refusing(_scope, _receive, send):
        headers = [(b"x-why", b"1"), (b"content-length", b"99"), (b"transfer-encoding", b"x")]
        start = {"type": "websocket.http.response.start", "status": status, "headers": headers}
        await send(start)
        await send({"type": "websocket.http.response.body", "body": b"n", "more_body": True})
        await send({"type": "websocket.http.response.body", "body": b"o"})

    async def test(_protocol, transport):
        await until(lambda: transport.closed)
        head, _, body = transport.written.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        assert first.startswith(b"HTTP/1.1 %d " % status)
        assert lines == [b"x-why: 1", b"content-length: 2", b"connection: close"]
        assert body == b"no"

    speak(test, refusing)
