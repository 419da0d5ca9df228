"""Requests that are here in one piece: the connection's side, and the front's."""

import asyncio

import pytest

from greenroom.actors.caller.streams import Stream
from greenroom.actors.messages.queries import FailedAnswer, HttpAnswer, Pieces, Process, StreamBegun
from greenroom.http_front.exchange import CLOSE, Exchange, InnerExchange, Reply, RequestIds
from greenroom.http_front.protocol import Connections, FrontProtocol

from .conftest import Turn
from .test_worker import Wire

WHOLE = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
HALF_BODY = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nab"
FORWARDED = (
    b"GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 9.9.9.9\r\nX-Forwarded-Proto: https\r\n\r\n"
)


class PeerWire(Wire):
    def get_extra_info(self, name, default=None):
        return ("127.0.0.1", 5) if name == "peername" else super().get_extra_info(name, default)


class Server:
    """One connection; ``turns`` are the requests that were offered, ``left`` those of who left."""

    def __init__(self, *, takes=True):
        self.turns = []
        self.left = []
        self.served = []
        self.takes = takes
        self.wire = PeerWire()
        self.connections = Connections(
            self.serve,
            self.begin,
            keep_alive_s=9,
            header_timeout_s=9,
            send_timeout_s=9,
            opening_timeout_s=9,
            max_message_bytes=9,
            max_waiting_bytes=2**20,
            trusted=["127.0.0.1"],
        )
        self.connections.tell_time()
        self.protocol = FrontProtocol(self.connections)
        self.protocol.connection_made(self.wire)
        self.say = self.protocol.data_received

    def begin(self, turn):
        if not self.takes:
            return None
        self.turns.append(turn)
        return lambda: self.left.append(turn)

    async def serve(self, scope, receive, send):
        self.served.append(scope["path"])
        headers = [(b"content-length", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x"})


async def turn_over():
    """Let everything on the loop happen that is ready to."""
    for _ in range(20):
        await asyncio.sleep(0)


def over_a_connection(act, **options):
    async def run():
        server = Server(**options)
        await act(server)
        server.protocol.connection_lost(None)
        await turn_over()

    asyncio.run(run())


def test_pipelined_requests_have_their_turns_one_after_the_other():
    async def act(server):
        server.say(b"".join(WHOLE % number for number in range(3)))
        for number in range(3):
            assert [turn.scope["path"] for turn in server.turns] == [
                f"/{each}" for each in range(number + 1)
            ]
            body = b"%d" % number
            server.turns[-1].reply(200, [(b"content-length", b"1")], body)
        assert [part[-1:] for part in server.wire.written.split(b"HTTP/1.1 200 OK")[1:]] == [
            b"0",
            b"1",
            b"2",
        ]
        assert server.wire.written.count(b"date: ") == 3
        assert not server.wire.closed

    over_a_connection(act)


def test_who_leaves_is_told_of_and_gets_nothing_more():
    async def act(server):
        server.say(WHOLE % 1)
        (turn,) = server.turns
        server.protocol.connection_lost(None)
        assert server.left == [turn]
        turn.reply(200, [(b"content-length", b"0")], b"")
        assert not server.wire.written

    over_a_connection(act)


def test_an_answer_that_is_complete_is_not_cancelled():
    async def act(server):
        server.say(WHOLE % 1)
        server.turns[0].reply(200, [(b"content-length", b"0")], b"")
        server.protocol.connection_lost(None)
        assert not server.left

    over_a_connection(act)


@pytest.mark.parametrize(
    ("request_bytes", "headers", "says_close"),
    [
        (WHOLE % 1, [CLOSE], 1),
        (b"GET / HTTP/1.0\r\nHost: a\r\n\r\n", [], 1),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", [CLOSE], 1),
        (WHOLE % 1, [], 0),
    ],
)
def test_the_connection_closes_when_either_side_wants_it(request_bytes, headers, says_close):
    async def act(server):
        server.say(request_bytes)
        server.turns[0].reply(200, [(b"content-length", b"0"), *headers], b"")
        assert server.wire.written.count(b"connection: close") == says_close
        assert server.wire.closed is bool(says_close)

    over_a_connection(act)


def test_what_a_trusted_proxy_says_of_the_client_is_believed():
    async def act(server):
        server.say(FORWARDED)
        (turn,) = server.turns
        assert (turn.scope["client"], turn.scope["scheme"]) == (("9.9.9.9", 0), "https")

    over_a_connection(act)


def test_bodies_on_their_way_need_a_task_and_nothing_begins_for_who_takes_nothing():
    async def act(server):
        server.say(HALF_BODY)
        assert not server.turns
        await turn_over()
        assert server.served == ["/"]
        server.protocol.pause_writing()
        server.say(b"cd" + WHOLE % 1)
        await turn_over()
        assert not server.turns
        assert server.wire.paused
        server.protocol.resume_writing()
        assert [turn.scope["path"] for turn in server.turns] == ["/1"]
        assert not server.wire.paused

    over_a_connection(act)


def test_what_is_not_taken_is_served_as_any_other():
    async def act(server):
        server.say(WHOLE % 1)
        await turn_over()
        assert server.served == ["/1"]

    over_a_connection(act, takes=False)


# --- The front ------------------------------------------------------------------------------------


class Source:
    """Where a stream comes from."""

    stopped = 0

    def taken(self, size):
        pass

    def stop(self):
        self.stopped += 1


class StreamingTurn(Turn):
    """Serves what goes on by a task, whose events it keeps."""

    def __init__(self, scope):
        super().__init__(scope, b"")
        self.events = []

    def go_on(self, app):
        async def send(event):
            self.events.append(event)

        self.task = asyncio.create_task(app(self.scope, None, send))
        return self.task


def scope():
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/s",
        "raw_path": b"/s",
        "query_string": b"",
        "headers": [(b"host", b"a")],
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
    }


@pytest.fixture
def streaming(app):
    """The app, with a stream as the answer to everything, and the stream's source."""
    source = Source()
    begun = StreamBegun(0, 200, ((b"content-type", b"text/plain"),), Process(1, 1, "x"))
    app.dispatcher.handler = lambda _asked: Stream(begun, source)
    return app, source


def test_an_answer_in_parts_goes_on_in_a_task_and_is_logged_at_its_end(streaming):
    app, source = streaming

    async def run():
        turn = StreamingTurn(scope())
        leave = app.front.begin(turn)
        await turn_over()
        assert turn.events[0]["status"] == 200
        assert app.front.in_flight == 1
        leave()
        await asyncio.wait([turn.task])
        await turn_over()

    asyncio.run(run())
    assert (app.front.in_flight, source.stopped) == (0, 1)
    assert [line["status"] for line in app.log()] == [499]


def test_a_client_that_leaves_before_the_task_has_begun_ends_the_stream_too(streaming):
    app, source = streaming

    async def run():
        turn = StreamingTurn(scope())
        app.front.begin(turn)()
        await asyncio.wait([turn.task])
        await turn_over()
        assert not turn.events

    asyncio.run(run())
    assert (app.front.in_flight, source.stopped) == (0, 1)
    assert [line["status"] for line in app.log()] == [499]


def test_without_a_router_a_request_waits_for_it_in_a_task(app):
    app.dispatcher.submit = lambda _query, _on_answer: None
    assert app.ask().text == "ok"
    assert app.front.in_flight == 0


def test_an_answer_that_is_none_is_500_and_the_front_goes_on(app, caplog):
    app.dispatcher.handler = lambda _asked: None
    assert app.ask().status == 500
    assert "failed" in caplog.text
    app.dispatcher.handler = lambda _asked: FailedAnswer(0, "ReplicaUnavailableError", "gone")
    assert app.ask().status == 503
    app.dispatcher.handler = lambda _asked: HttpAnswer(0, 205, (), b"")
    assert app.ask()["content-length"] == "0"
    assert [line["status"] for line in app.log()] == [500, 503, 205]


def test_an_answer_in_pieces_leaves_piece_by_piece_and_is_logged_at_its_end(app):
    body = Pieces([memoryview(b"abc"), memoryview(b"de")])
    app.dispatcher.handler = lambda _asked: HttpAnswer(0, 200, (), body)

    async def run():
        turn = StreamingTurn(scope())
        app.front.begin(turn)
        await turn_over()
        await turn.task
        await turn_over()
        return turn.events

    start, *parts = asyncio.run(run())
    assert (b"content-length", b"5") in start["headers"]
    assert [bytes(part["body"]) for part in parts] == [b"abc", b"de", b""]
    assert [part.get("more_body", False) for part in parts] == [True, True, False]
    assert app.front.in_flight == 0
    assert [(line["status"], line["bytes"]) for line in app.log()] == [(200, 5)]


def test_middlewares_are_given_pieces_as_bytes(app):
    seen = []

    async def run():
        async def send(event):
            seen.append(event)

        outer = Exchange(scope(), RequestIds(), app.front)
        body = Pieces([memoryview(b"abc"), memoryview(b"de")])
        await InnerExchange(scope(), send, outer).reply(Reply(200, [], body))

    asyncio.run(run())
    assert [event["body"] for event in seen[1:]] == [b"abc", b"de", b""]
    assert {type(event["body"]) for event in seen[1:]} == {bytes}
