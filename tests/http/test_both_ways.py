"""The ways through a worker, short, by Falcon and by ASGI: the same bytes, and the same ends.

Everything else in this folder goes one way, by default the short one where it applies; see
``WAY`` in wire.py.
"""

import asyncio
import gc
import re

import pytest

from greenroom.actors.caller.streams import Stream, StreamFailedError
from greenroom.actors.messages.queries import (
    FailedAnswer,
    HttpAnswer,
    Pieces,
    Process,
    StreamBegun,
    StreamEnded,
    StreamPart,
)
from greenroom.http_front.heads import MAX_KNOWN, HeadReader
from greenroom.http_front.request import Request
from greenroom.http_front.responses import StreamedBody
from tests.http.wire import connected, exchange, turn_over
from tests.support.asking import statuses
from tests.support.queries import query

pytestmark = pytest.mark.anyio
WAYS = {
    "short": {"short_way": True},
    "falcon": {"short_way": False},
    "asgi": {"middlewares": [("tests.support.middlewares:untouched", {})]},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)

GET = b"GET %b HTTP/1.1\r\nHost: a\r\nX-Request-ID: id\r\n\r\n"
FORMS = {
    "a path": GET % b"/ok",
    "an escaped path": GET % b"/ok%20%ff?a=b",
    "a body": b"POST /ok HTTP/1.1\r\nHost: a\r\nX-Request-ID: id\r\nContent-Length: 2\r\n\r\nab",
    "a body that did not wait": (
        b"POST /ok HTTP/1.1\r\nHost: a\r\nX-Request-ID: id\r\n"
        b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nab"
    ),
    "chunks": b"POST /ok HTTP/1.1\r\nHost: a\r\nX-Request-ID: id\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    "head": (GET % b"/ok").replace(b"GET", b"HEAD"),
    "HTTP/1.0": (GET % b"/ok").replace(b"/1.1", b"/1.0"),
    "close": (GET % b"/ok").replace(b"Host", b"Connection: close\r\nHost"),
    "many headers": GET % b"/headers",
    "a date of user code": GET % b"/date",
    "no body": GET % b"/204",
    "nothing new": GET % b"/304",
    "in pieces": GET % b"/pieces",
    "a head of pieces": (GET % b"/pieces").replace(b"GET", b"HEAD"),
    "in parts": GET % b"/parts",
    "in parts of a known length": GET % b"/measured",
    "in too few parts": GET % b"/short",
    "in too many parts": GET % b"/long",
    "a bad header in parts": GET % b"/bad-parts",
    "a bad header": GET % b"/bad",
    "a bad status": GET % b"/99",
    "a failure": GET % b"/failure",
    "a failure in JSON": (GET % b"/failure").replace(b"Host", b"Accept: application/json\r\nHost"),
    "a bug": GET % b"/bug",
    "a bad timeout": (GET % b"/ok").replace(b"Host", b"X-Request-Timeout-Seconds: x\r\nHost"),
    "no host": b"GET /ok HTTP/1.1\r\nX-Request-ID: id\r\n\r\n",
    "a bad host": (GET % b"/ok").replace(b": a", b": a b"),
    "a bad host before a body": (
        b"POST /ok HTTP/1.1\r\nHost: a b\r\nX-Request-ID: id\r\nContent-Length: 2\r\n\r\nab"
    ),
    "a URL": GET % b"http://a/ok",
    "a page": GET % b"/-/healthz",
    "a page that is none": GET % b"/-/none",
    "too large": b"POST /ok HTTP/1.1\r\nHost: a\r\nX-Request-ID: id\r\nContent-Length: 99\r\n\r\n"
    + b"x" * 99,
    "dots": GET % b"/ok/%2e%2e/ok",
    "an empty segment": GET % b"/ok%2F/ok",
    "two": GET % b"/ok" + GET % b"/failure",
    "two bodies": b"".join(
        b"POST /ok HTTP/1.1\r\nHost: a\r\nX-Request-ID: id\r\nContent-Length: 2\r\n\r\n" + body
        for body in (b"ab", b"cd")
    ),
    "the stars": (GET % b"*").replace(b"GET", b"OPTIONS"),
}


class Source:
    """The replica that a stream comes from."""

    def __init__(self):
        self.stopped = 0

    def taken(self, size):
        pass

    def stop(self):
        self.stopped += 1


def stream(*parts, headers=(), source=None, is_over=True):
    made = Stream(StreamBegun(0, 200, headers, Process(1, 1, "x")), source or Source())
    for part in parts:
        made.arrived(StreamPart(0, part))
    if is_over:
        made.ended(StreamEnded(0, 200))
    return made


def answer(asked):
    name = asked.path.rpartition("/")[2]
    length = ((b"content-length", b"4"),)
    answers = {
        "headers": HttpAnswer(0, 203, ((b"X-A", b"1"), (b"x-a", b"2"), (b"Link", b"\xe4")), b"b"),
        "date": HttpAnswer(0, 200, ((b"Date", b"Thu, 01 Jan 1970 00:00:00 GMT"),), b"b"),
        "204": HttpAnswer(0, 204, (), b"ignored"),
        "304": HttpAnswer(0, 304, ((b"etag", b"1"),), b""),
        "99": HttpAnswer(0, 99, (), b""),
        "bad": HttpAnswer(0, 200, ((b"a b", b"1"),), b""),
        "pieces": HttpAnswer(0, 200, (), Pieces([memoryview(b"abc"), memoryview(b"de")])),
        "parts": stream(b"one", b"two", headers=((b"x-a", b"1"),)),
        "measured": stream(b"on", b"e2", headers=length),
        "short": stream(b"one", headers=length),
        "long": stream(b"one", b"two", headers=length),
        "bad-parts": stream(b"one", headers=((b"a b", b"1"),)),
        "failure": FailedAnswer(0, "BackPressureError", "full", 2.5),
        "bug": None,
    }
    return answers.get(name, HttpAnswer(0, 200, ((b"content-type", b"a/b"),), asked.call.body))


async def said(front, request):
    written = await exchange(front, request)
    responses = re.findall(rb"HTTP/1.1 [2-5]", written)
    assert len(re.findall(rb"\ndate: [^\r]* GMT\r", written)) == len(responses), "one each"
    return re.sub(rb"date: [^\r]* GMT", b"date: now", written)


@pytest.mark.parametrize("parts", [(b"one",), (b"one", b"two")])
def test_parts_that_are_not_as_long_as_declared_end_in_an_error(parts):
    passed_on = 0

    async def read():
        nonlocal passed_on
        async for part in StreamedBody(stream(*parts), b"4"):
            passed_on += len(part)

    with pytest.raises(StreamFailedError, match="Content-Length"):
        asyncio.run(read())
    assert passed_on <= 4


@pytest.mark.parametrize("name", ["ok", "parts", "failure"])
@each_way
def test_a_request_that_is_over_is_not_left_to_the_garbage_collector(app, name, way):
    app.link.handler = answer
    app.rebuild(**way)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        asyncio.run(said(app.front, (GET % f"/{name}".encode()) * 20))
        gc.collect()
        left = [each for each in gc.garbage if isinstance(each, Request)]
        assert len(left) <= 1, "the last, which goes with the connection of this test"
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("request_bytes", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("is_draining", [False, True])
def test_all_ways_give_the_same_bytes_and_lines_of_the_log(app, request_bytes, is_draining):
    app.link.handler = answer
    seen = []
    for way in WAYS.values():
        app.rebuild(**way, max_body_bytes=50)
        if is_draining:
            app.front.drain()
        app.link.asked.clear()
        written = asyncio.run(said(app.front, request_bytes * 3))  # the short way knows heads again
        app.front.access_log.flush()
        fields = ("request_id", "method", "path", "status", "bytes")
        lines = [{name: line[name] for name in fields} for line in app.log()]
        (app.settings.logs_dir / "access.log").unlink()
        asked = [each._replace(request_id="") for each in app.link.asked]
        assert app.front.requests.in_flight == 0
        seen.append((written, lines, asked))
    assert seen[0] == seen[1] == seen[2]


@each_way
async def test_parts_of_a_wrong_length_are_a_500_until_some_have_left_and_then_a_cut(
    app, way, caplog
):
    app.rebuild(**way)
    made = []
    app.link.handler = lambda _: made[-1]
    length = ((b"content-length", b"4"),)
    connection = connected(app.front)
    for parts, what in (((b"one", b"two"), "longer than"), ((), "not as long as")):
        made.append(stream(*parts, headers=length))
        connection.say(GET % b"/")
        await turn_over()
        assert f"{what} their Content-Length" in caplog.text
    assert statuses(connection.wire.written) == [500, 500]
    made.append(stream(b"one", headers=length, is_over=False))
    connection.say(GET % b"/")
    await turn_over()
    made[-1].arrived(StreamPart(0, b"two"))
    await turn_over()
    assert connection.wire.closed
    assert connection.wire.written.endswith(b"\r\n\r\none")
    await connection.end()
    assert statuses(connection.wire.written) == [500, 500, 200]
    assert [line["status"] for line in app.log()] == [500, 500, 200]


def test_a_head_may_be_cut_anywhere(app):
    text = GET % b"/ok"
    for at in range(1, len(text)):
        heads = HeadReader(app.front.options)
        assert heads.take(text[:at]) == (None, b"")
        head, behind = heads.take(text[at:] + b"rest")
        assert (head.target, behind) == (b"/ok", b"rest")


def test_a_head_is_known_again_if_it_is_the_same_and_has_made_a_query(app):
    heads = HeadReader(app.front.options)
    text = GET % b"/ok"
    first, _ = heads.take(text)
    second, _ = heads.take(text)
    assert second is not first, "it has made none"
    second.query = query(1)
    assert heads.take(text + b"rest") == (second, b"rest")
    assert heads.take(text.replace(b": id", b": other"))[0].named[b"x-request-id"] == b"other"

    long = text.replace(b": id", b": " + b"x" * MAX_KNOWN)
    for pieces in ([long], [b"UN", text.replace(b"GET", b"LOCK")]):
        for piece in pieces:
            head, _ = heads.take(piece)
        head.query = second.query
        assert heads.take(pieces[-1])[0] is not head, "its bytes were not kept"


@each_way
async def test_a_head_that_comes_again_once_the_worker_drains_is_refused(app, way):
    connection = connected(app.rebuild(**way).front)
    for _ in range(2):
        connection.say(GET % b"/ok")
        await turn_over()
        app.front.drain()
    await connection.end()
    assert statuses(connection.wire.written) == [200, 503]
    assert len(app.link.asked) == 1


@each_way
@pytest.mark.parametrize(
    ("version", "asked"), [(b"1.1", b"HTTP/1.1 100 Continue\r\n\r\n"), (b"1.0", b"")]
)
async def test_a_client_that_waits_with_its_body_is_asked_for_it_once_if_it_knows_how(
    app, way, version, asked
):
    app.rebuild(**way)
    head = FORMS["a body that did not wait"].removesuffix(b"ab").replace(b"/1.1", b"/" + version)

    connection = connected(app.front)
    connection.say(head)
    await turn_over()
    before = connection.wire.written
    connection.say(b"ab")
    await turn_over()
    await connection.end()
    assert before == asked
    assert connection.wire.written.removeprefix(before).startswith(b"HTTP/1.1 200 OK\r\n")


@each_way
def test_the_server_as_a_whole_is_no_path_below_a_root_path(app, way):
    app.rebuild(**way, root_path="/api")
    assert app.ask("OPTIONS", "*").status == 204
    assert not app.link.asked


def test_middlewares_keep_requests_off_the_short_way(app):
    assert app.rebuild(short_way=True).front.begin is not None
    tag = ("tests.support.middlewares:Tag", {})
    assert app.rebuild(middlewares=[tag]).front.begin is None


ORIGIN = "https://shop.example"
CORS = {
    "one origin": [ORIGIN],
    "all": True,
    "credentials": {"allow_origins": ["*"], "allow_credentials": True, "expose_headers": ["x-a"]},
}
OF_ORIGIN = (GET % b"/ok").replace(b"Host", b"Origin: https://shop.example\r\nHost")
OF_ORIGINS = {
    "none": GET % b"/ok",
    "allowed": OF_ORIGIN,
    "another": OF_ORIGIN.replace(b"shop.example", b"evil.example"),
    "a cookie": OF_ORIGIN.replace(b"Host", b"Cookie: a=b\r\nHost"),
    "a failure": OF_ORIGIN.replace(b"/ok", b"/failure"),
    "many headers": OF_ORIGIN.replace(b"/ok", b"/headers"),
    "in parts": OF_ORIGIN.replace(b"/ok", b"/parts"),
    "options": OF_ORIGIN.replace(b"GET", b"OPTIONS"),
    "a preflight": OF_ORIGIN.replace(b"GET", b"OPTIONS").replace(
        b"Host", b"Access-Control-Request-Method: GET\r\nHost"
    ),
}


@pytest.mark.parametrize("cors", CORS.values(), ids=CORS)
@pytest.mark.parametrize("request_bytes", OF_ORIGINS.values(), ids=OF_ORIGINS)
def test_cors_gives_the_same_bytes_all_ways(app, request_bytes, cors):
    app.link.handler = answer
    seen = []
    for way in WAYS.values():
        app.rebuild(**way, cors=cors)
        seen.append(asyncio.run(said(app.front, request_bytes)))
    assert seen[0] == seen[1] == seen[2]
    is_allowed = cors != [ORIGIN] or ORIGIN.encode() in request_bytes
    has_origin = b"Origin" in request_bytes
    assert (b"access-control-allow-origin: " in seen[0]) is (is_allowed and has_origin)


def test_with_cors_all_but_preflights_go_the_short_way(app, monkeypatch):
    app.rebuild(short_way=True, cors=[ORIGIN])
    submitted, submit = [], app.link.submit
    monkeypatch.setattr(
        app.link, "submit", lambda *query: submitted.append(query) or submit(*query)
    )
    origin = (b"host", b"test"), (b"origin", ORIGIN.encode())
    assert app.ask(headers=origin)["access-control-allow-origin"] == ORIGIN
    assert len(submitted) == 1
    assert app.ask("OPTIONS", headers=(*origin, (b"access-control-request-method", b"GET")))
    assert len(submitted) == len(app.link.asked) == 1


def test_without_a_router_a_request_waits_for_it_the_long_way_as_one_request(app):
    app.rebuild(short_way=True)
    app.link.submit = lambda _query, _on_answer: None
    assert app.ask("POST", body=b"body").text == "ok"
    assert app.front.requests.in_flight == 0
    assert app.link.asked[-1].call.body == b"body"
    assert [line["status"] for line in app.log()] == [200]


@pytest.mark.parametrize(
    ("way", "begins"), [*((way, True) for way in WAYS.values()), (WAYS["short"], False)]
)
async def test_a_client_that_leaves_ends_the_stream_it_gets(app, way, begins):
    source = Source()
    app.rebuild(**way)
    app.link.handler = lambda _asked: stream(b"first", source=source, is_over=False)

    connection = connected(app.front)
    connection.say(GET % b"/")
    if begins:
        await turn_over()
        assert b"first" in connection.wire.written
    await connection.end()
    await turn_over()
    assert app.front.requests.in_flight == 0
    assert source.stopped == 1
    assert [line["status"] for line in app.log()] == [499]


@each_way
@pytest.mark.parametrize(("value", "goes_on"), [(b"?1", True), (b"?0", False), (b"true", False)])
async def test_a_request_goes_on_without_its_client_where_it_asks_for_that(
    app, way, value, goes_on
):
    app.rebuild(**way)
    may_end, ended = asyncio.Event(), []

    async def answer(asked):
        await may_end.wait()
        ended.append(asked.path)
        return HttpAnswer(0, 200, (), b"done")

    app.link.handler = answer
    connection = connected(app.front)
    header = b"X-Request-Disconnect-Disabled: %b\r\nHost" % value
    connection.say((GET % b"/").replace(b"Host", header))
    await turn_over()
    connection.protocol.connection_lost(None)
    await turn_over()
    may_end.set()
    await turn_over()
    await connection.end()
    assert not connection.wire.written
    assert (ended, app.link.cancelled) == ((["/"], 0) if goes_on else ([], 1))
    assert app.front.requests.in_flight == 0


@each_way
async def test_a_client_that_has_all_of_a_known_length_may_leave_and_cancels_nothing(app, way):
    source = Source()
    app.rebuild(**way)
    headers = ((b"content-length", b"5"),)
    app.link.handler = lambda _: stream(b"first", headers=headers, source=source, is_over=False)

    connection = connected(app.front)
    connection.say(GET % b"/")
    await turn_over()
    await connection.end()
    await turn_over()
    assert source.stopped == 0


@each_way
def test_a_connection_that_waits_holds_nothing_of_the_last_response(app, way):
    dropped = []

    class Content(bytes):
        def __del__(self):
            dropped.append(self)

    app.link.handler = lambda _asked: HttpAnswer(0, 200, (), Content(b"x" * 1000))
    app.rebuild(**way)

    async def talk():
        connection = connected(app.front)
        connection.say(GET % b"/ok")
        await turn_over()
        seen = len(dropped)
        await connection.end()
        return seen

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(talk()) == 1
    finally:
        gc.enable()
