"""ASGI middlewares and CORS around every request, and what is said of bad ones."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware

from greenroom.actors.messages.queries import HttpAnswer, Pieces
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.config import HTTPOptions
from greenroom.core.errors import InvalidRequestError
from greenroom.core.validation import validated
from greenroom.http_front.middlewares import around
from tests.http.wire import connected, exchange, turn_over
from tests.support import middlewares

pytestmark = pytest.mark.anyio

GZIP = "starlette.middleware.gzip:GZipMiddleware"
HERE = "tests.support.middlewares"
ORIGIN = "https://shop.example"


BROKEN = [
    *("header", "raises", "silent", "length", "short", "raises midway"),
    *middlewares.BAD_STATUSES,
    *middlewares.BAD_BODIES,
]


def options(**values):
    return validated(HTTPOptions, values)


def a(name, **settings):
    return (f"{HERE}:{name}", settings)


# --- in this process ------------------------------------------------------------------------------


def test_the_first_middleware_is_outermost(app):
    answer = app.rebuild(middlewares=[a("Tag", word="outer"), a("Tag", word="inner")]).ask()
    assert answer.all("x-tags") == ["inner", "outer"]
    tags = [value for name, value in app.link.asked[0].call.headers if name == b"x-tags"]
    assert tags == [b"outer", b"inner"]


def test_a_middleware_may_answer_itself_and_it_is_logged_with_its_id(app):
    app.rebuild(middlewares=[a("Guard", password="open")], cors=[ORIGIN])
    refused = app.ask(target="/x", headers=((b"host", b"test"), (b"origin", ORIGIN.encode())))
    assert (refused.status, refused.text) == (401, "no")
    assert refused["access-control-allow-origin"] == ORIGIN
    assert app.link.asked == []
    taken = app.ask(headers=((b"host", b"test"), (b"authorization", b"open")))
    assert taken.status == 200
    entry = app.log()[0]
    assert (entry["status"], entry["request_id"]) == (401, refused["x-request-id"])


def test_health_is_asked_past_the_middlewares_and_other_pages_are_not(app):
    app.rebuild(middlewares=[a("Guard", password="open")], root_path="/api")
    assert app.ask(target="/-/healthz").status == 200
    assert app.ask(target="/api/-/healthz").status == 200
    assert app.ask(target="/-/metrics").status == 401


def test_a_refusal_passes_through_the_middlewares_too(app):
    app.rebuild(cors=True, max_body_bytes=3)
    headers = ((b"host", b"test"), (b"origin", ORIGIN.encode()))
    answer = app.ask("POST", body=b"1234", headers=headers)
    assert (answer.status, answer["access-control-allow-origin"]) == (413, "*")


def test_what_leaves_compressed_keeps_its_own_headers_and_is_counted_as_sent(app):
    app.rebuild(middlewares=[a("Tag"), (GZIP, {"minimum_size": 1})])
    answer = app.ask(headers=((b"host", b"test"), (b"accept-encoding", b"gzip")))
    assert answer["content-encoding"] == "gzip"
    assert int(answer["content-length"]) == len(answer.body)
    assert answer.all("x-request-id") == [app.link.asked[0].request_id]
    assert app.log()[0]["bytes"] == len(answer.body)


def test_a_preflight_is_answered_without_a_query(app):
    app.rebuild(cors={"allow_origins": [ORIGIN], "allow_methods": ["PUT"]})
    headers = (
        (b"host", b"test"),
        (b"origin", ORIGIN.encode()),
        (b"access-control-request-method", b"PUT"),
    )
    answer = app.ask("OPTIONS", headers=headers)
    assert (answer.status, answer["access-control-allow-origin"]) == (200, ORIGIN)
    assert answer["access-control-allow-methods"] == "PUT"
    assert app.link.asked == []


@pytest.mark.parametrize("how", BROKEN)
def test_a_middleware_that_breaks_the_answer_before_it_begins_is_500(app, how):
    answer = app.rebuild(middlewares=[a("breaking", how=how)]).ask()
    assert answer.status == 500
    assert answer["x-request-id"] in answer.text
    assert "secret" not in answer.text
    assert answer.all("x-evil") == []


def test_what_breaks_inside_of_one_that_keeps_the_answer_back_is_500(app):
    app.rebuild(middlewares=[(GZIP, {"minimum_size": 1}), a("breaking", how="raises midway")])
    answer = app.ask(headers=((b"host", b"test"), (b"accept-encoding", b"gzip")))
    assert answer.status == 500
    assert answer["x-request-id"] in answer.text
    assert app.log()[0]["status"] == 500


def test_an_answer_that_a_middleware_does_not_end_is_reported(app, caplog):
    app.rebuild(middlewares=[a("breaking", how="end")]).ask()
    assert "was cut off: its response has no end" in caplog.text


def test_a_middleware_gets_the_headers_of_the_answer_that_user_code_gave(app):
    answer = app.rebuild(middlewares=[a("Tag")]).ask()
    assert (answer["content-type"], answer.text) == ("text/plain", "ok")


# --- responses that break off ---------------------------------------------------------------------

GET = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("how", BROKEN)
async def test_whatever_breaks_an_answer_before_it_begins_the_500_is_the_same(app, how):
    """Byte for byte, so nothing of the other answer is in it, and the next one is where it ends."""

    async def received(how):
        front = app.rebuild(middlewares=[a("breaking", how=how)]).front
        asked = GET.replace(b"Host", b"X-Request-ID: 1\r\nHost")
        return re.sub(rb"date: [^\r]*", b"", await exchange(front, asked, asked))

    expected = await received("raises")
    assert expected.count(b"HTTP/1.1 500 ") == expected.count(b"content-length: ") == 2
    assert await received(how) == expected
    assert [entry["status"] for entry in app.log()[-2:]] == [500, 500]


async def test_a_head_that_was_refused_leaves_nothing_to_the_next_one(app):
    front = app.rebuild(middlewares=[a("second_try", midway=False)]).front
    nothing, *answers = (await exchange(front, GET, GET)).split(b"HTTP/1.1 200 OK\r\n")
    assert (nothing, len(answers)) == (b"", 2)
    for answer in answers:
        assert b"content-length" not in answer
        assert b"transfer-encoding: chunked\r\n" in answer
        assert answer.endswith(b"\r\n\r\n4\r\nfour\r\n0\r\n\r\n")
    assert [entry["status"] for entry in app.log()] == [200, 200]


def in_pieces(_asked):
    return HttpAnswer(0, 200, (), Pieces([memoryview(b"ab"), memoryview(b"cd")]))


async def cut_off(app, *layers):
    """Return what a client gets of two requests, on a connection that is closed at the first."""
    connection = connected(app.rebuild(middlewares=layers).front)
    connection.say(GET * 2)
    async with asyncio.timeout(10):
        while not connection.wire.closed:
            await asyncio.sleep(0)
    received = connection.wire.written
    await connection.end()
    assert received.count(b"HTTP/1.1 ") == received.count(b"HTTP/1.1 200") == 1
    return received


@pytest.mark.parametrize("how", ["length", "short", "end", "raises midway"])
async def test_an_answer_broken_midway_cuts_the_connection(app, how):
    app.link.handler = in_pieces
    received = await cut_off(app, a("breaking", how=how))
    assert b"more than was announced" not in received
    assert b"content-length" in received or not received.endswith(b"0\r\n\r\n")


async def test_a_part_that_was_refused_does_not_count(app):
    assert (await cut_off(app, a("second_try", midway=True))).endswith(b"\r\n\r\nfour")


@pytest.mark.parametrize("inside", ["Tag", "Stamp"])
async def test_an_answer_that_one_breaks_inside_of_starlettes_base_is_cut_too(app, inside):
    app.link.handler = in_pieces
    received = await cut_off(app, a("Stamp"), a(inside), a("unfinished"))
    assert not received.endswith(b"0\r\n\r\n")


async def test_a_client_that_leaves_cancels_its_query_behind_middlewares(app):
    app.link.handler = lambda _asked: asyncio.Event().wait()
    connection = connected(app.rebuild(middlewares=[a("Tag")]).front)
    connection.say(GET)
    await turn_over()
    assert (len(app.link.asked), app.link.cancelled) == (1, 0)
    await connection.end()
    assert app.link.cancelled == 1


async def test_one_that_ends_with_its_client_is_no_error(app, caplog):
    connection = connected(app.rebuild(middlewares=[a("waiting")]).front)
    connection.say(GET.replace(b"Host", b"X-Request-Disconnect-Disabled: ?1\r\nHost"))
    await turn_over()
    await connection.end()
    assert [entry["status"] for entry in app.log()] == [499]
    assert not caplog.records


# --- bad ones -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("middleware", "message"),
    [
        ("nowhere.to_be:Found", "'nowhere.to_be:Found' cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:Missing", f"'{HERE}:Missing' cannot be imported: AttributeError"),
        (f"{HERE}:NO_FUNCTION", "is of the type int, expected a class or a function"),
        (a("Tag", colour="red"), "cannot be made with the options {'colour': 'red'}: TypeError"),
        (f"{HERE}:FailsWhenMade", "ValueError: no licence\nfor this"),
    ],
)
def test_one_that_cannot_be_made_is_named_with_the_reason(app, middleware, message):
    with pytest.raises(InvalidRequestError) as raised:
        around(app.front, options(middlewares=[middleware]))
    assert message in str(raised.value)


def test_a_front_whose_middleware_cannot_be_imported_says_so_and_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "greenroom.http_front.server"],
        env={
            "GREENROOM_STATE_DIR": str(tmp_path),
            "GREENROOM_HTTP_PORT": "0",
            "GREENROOM_HTTP_MIDDLEWARES": "nowhere.to_be:Found",
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 4, "as gunicorn ends where an application cannot be loaded"
    *_, line = done.stderr.splitlines()
    assert line.startswith("the middleware 'nowhere.to_be:Found' cannot be imported: ")


@pytest.mark.parametrize(
    "given",
    [
        GZIP,
        [GZIP],
        [(GZIP, {})],
        f'[["{GZIP}", {{}}]]',
        [{"path": GZIP}],
        [Middleware(GZipMiddleware)],
    ],
)
def test_a_middleware_can_be_named_in_several_ways(given):
    (middleware,) = options(middlewares=given).middlewares
    assert (middleware.path, middleware.options) == (GZIP, {})


@pytest.mark.parametrize(
    ("given", "origins"),
    [
        (True, ("*",)),
        ("*", ("*",)),
        ("true", ("*",)),
        ([ORIGIN], (ORIGIN,)),
        (f"{ORIGIN}, https://b", (ORIGIN, "https://b")),
        (json.dumps({"allow_origins": [ORIGIN]}), (ORIGIN,)),
    ],
)
def test_cors_can_be_named_in_several_ways(given, origins):
    assert options(cors=given).cors.allow_origins == origins


@pytest.mark.parametrize("given", [None, False, "false"])
def test_cors_is_off_unless_asked_for(given):
    assert options(cors=given).cors is None
    assert options().cors is None


def test_the_settings_reach_other_processes_by_environment(tmp_path):
    given = HTTPOptions(middlewares=[a("Tag", word="x")], cors=[ORIGIN])
    settings = read_settings({}, state_dir=tmp_path).with_options(given)[0]
    again = read_settings(settings.to_environ())
    assert again.http.middlewares == settings.http.middlewares
    assert again.http.cors == settings.http.cors
    assert again.http.middlewares_dir == str(Path.cwd())
    assert middlewares.Tag.__name__ in settings.to_environ()["GREENROOM_HTTP_MIDDLEWARES"]
