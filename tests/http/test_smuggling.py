"""Requests that two servers might read in two ways: each is refused, or read in the only right one.

Every one is followed, on the same connection, by a second request, as an attacker would hide it.
Where the end of the first is in doubt, the connection is closed, and the second is never seen.
"""

import pytest

from tests.http.doubtful import (
    ABC,
    OPENING,
    READ_IN_ONE_WAY,
    REFUSED,
    REFUSED_ALONE,
    SECOND,
    get,
    opening,
)
from tests.http.wire import exchange, head
from tests.support.asking import statuses

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _nothing_has_failed(caplog):
    yield
    assert not [record for record in caplog.records if record.exc_info]


def asked(app):
    """Return the path and body of each query."""
    return [(each.path, each.call.body) for each in app.link.asked]


@pytest.mark.parametrize("request_bytes", REFUSED.values(), ids=REFUSED)
async def test_it_is_refused_and_what_follows_is_not_read(app, request_bytes):
    received = await exchange(app.front, request_bytes + SECOND)
    (status,) = statuses(received)
    assert status in {400, 426, 501, 505}
    assert b"\r\nconnection: close\r\n" in received
    assert asked(app) == []


async def test_a_head_that_ends_without_an_empty_line_is_refused_before_more_comes(app):
    written = await exchange(app.front, b"GET /first\n\r\n", SECOND)
    assert statuses(written) == [400]
    assert b"empty line" in written


@pytest.mark.parametrize("request_bytes", REFUSED_ALONE.values(), ids=REFUSED_ALONE)
async def test_it_is_refused_and_what_follows_is_read(app, request_bytes):
    assert statuses(await exchange(app.front, request_bytes + SECOND)) == [400, 200]


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut behind its head"])
@pytest.mark.parametrize(("request_bytes", "body"), READ_IN_ONE_WAY.values(), ids=READ_IN_ONE_WAY)
async def test_it_is_read_in_the_right_way_and_so_is_what_follows(app, request_bytes, body, is_cut):
    at = (request_bytes.index(b"\r\n\r\n") + 4) * is_cut
    received = await exchange(app.front, request_bytes[:at], request_bytes[at:] + SECOND)
    assert statuses(received.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")) == [200, 200]
    assert asked(app) == [("/first", body), ("/second", b"")]


@pytest.mark.parametrize("more", [(), (b"Content-Length: 0",)])
async def test_an_opening_towards_a_plain_route_is_answered_as_that_and_closed(app, more):
    received = await exchange(app.front, opening(*OPENING, *more) + SECOND)
    assert statuses(received) == [200]
    assert b"connection: close" in received


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /first HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /first HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, close\r\n\r\n",
        b"GET /first HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"POST /first HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /first HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
    ],
)
async def test_what_follows_the_last_request_of_a_connection_is_not_read(app, request_bytes):
    assert statuses(await exchange(app.front, request_bytes + SECOND)) == [200]
    assert len(asked(app)) == 1


CHUNKED = head(b"POST", b"/first", b"Transfer-Encoding: chunked") + ABC + b"0\r\n"
TRAILERS = (
    b"X-Remote-User: root\r\nAuthorization: x\r\nX-Serve-Call-Method: wipe\r\n"
    b"X-Request-Timeout-Seconds: nonsense\r\nExpect: 100-continue\r\nHost: other\r\n\r\n"
)


@pytest.mark.parametrize("cut", [0, 1, len(TRAILERS) // 2, len(TRAILERS)])
async def test_trailers_never_become_headers(app, cut):
    received = await exchange(app.front, CHUNKED + TRAILERS[:cut], TRAILERS[cut:] + SECOND)
    assert statuses(received) == [200, 200]
    names = [[name for name, _ in each.call.headers] for each in app.link.asked]
    assert names == [[b"host", b"transfer-encoding"], [b"host", b"connection"]]


ODD_PATHS = (
    *(b"/sec/../first", b"/sec/%2e%2e/first", b"/sec%2f..%2ffirst", b"/first/..", b"/./first"),
    *(b"/first/.", b"//first", b"/sec//first", b"/sec/%2Ffirst", b"/-/../first", b"/-//healthz"),
    b"http://x/sec/../first",
)


@pytest.mark.parametrize("target", ODD_PATHS)
async def test_a_path_that_servers_resolve_differently_is_refused(app, target):
    assert statuses(await exchange(app.front, get(target) + SECOND)) == [400, 200]
    assert statuses(await exchange(app.front, head(b"GET", target, *OPENING)))[0] == 400
    assert asked(app) == [("/second", b"")]


@pytest.mark.parametrize(
    "target", [b"/...", b"/.first", b"/first..", b"/a.b/", b"/first?a=/../b//"]
)
async def test_a_path_with_other_dots_is_not(app, target):
    assert statuses(await exchange(app.front, get(target) + SECOND)) == [200, 200]


@pytest.mark.parametrize(
    ("line", "sent"), [(b"//", b""), (b"/-/healthz", b""), (b"/-/healthz", b"a")]
)
async def test_a_body_that_no_100_asked_for_may_never_come_so_what_follows_is_not_read(
    app, line, sent
):
    expecting = b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n"
    head = b"GET %s HTTP/1.1\r\nHost: x\r\n" % line + expecting
    received = await exchange(app.front, head, sent + SECOND)
    assert len(statuses(received)) == 1
    assert b"\r\nconnection: close\r\n" in received
    assert asked(app) == []
