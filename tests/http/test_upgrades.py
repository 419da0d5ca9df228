"""Requests that ask for another protocol: where they end is what their length says, as ever.

Each is followed by a second request on the same connection, as an attacker would hide it in a body.
"""

import re
import socket
from pathlib import Path

import pytest

from tests.http.wire import OPENING, exchange, head
from tests.support.asking import statuses
from tests.support.programs import needed
from tests.support.systems import free_port

pytestmark = pytest.mark.anyio

SECOND = b"GET /second HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADES = {
    "foo": (b"Connection: upgrade", b"Upgrade: foo"),
    "h2c": (
        b"Connection: Upgrade, HTTP2-Settings",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA",
    ),
    "several": (b"Connection: keep-alive, Upgrade", b"Upgrade: TLS/1.0, websocket"),
    "a websocket by POST": OPENING,
}


def framed(body, coding):
    if coding == "length":
        return b"Content-Length: %d" % len(body), body
    return b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def asked(app):
    """Return the bodies of all queries, by their paths."""
    return {each.path: each.call.body for each in app.link.asked}


@pytest.mark.parametrize("coding", ["length", "chunks"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["at once", "body in a second segment"])
@pytest.mark.parametrize("lines", UPGRADES.values(), ids=UPGRADES)
async def test_one_with_a_body_is_served_as_the_plain_request_that_it_is(
    app, lines, is_cut, coding
):
    line, body = framed(HIDDEN, coding)
    first = head(b"POST", b"/first", *lines, line)
    segments = (first, body + SECOND) if is_cut else (first + body + SECOND,)
    assert statuses(await exchange(app.front, *segments)) == [200, 200]
    assert asked(app) == {"/first": HIDDEN, "/second": b""}


@pytest.mark.parametrize("lines", [UPGRADES["foo"], UPGRADES["h2c"]])
async def test_one_without_a_body_is_served_and_what_follows_is_not_lost(app, lines):
    await exchange(app.front, head(b"GET", b"/first", *lines) + SECOND)
    assert asked(app) == {"/first": b"", "/second": b""}


@pytest.mark.parametrize("coding", ["length", "chunks"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["at once", "body in a second segment"])
async def test_a_websockets_opening_with_a_body_is_refused_and_closed(app, is_cut, coding):
    line, body = framed(HIDDEN, coding)
    first = head(b"GET", b"/opening", *OPENING, line)
    segments = (first, body + SECOND) if is_cut else (first + body + SECOND,)
    received = await exchange(app.front, *segments)
    assert statuses(received) == [400]
    assert b"connection: close" in received
    assert not asked(app)


async def test_an_opening_towards_a_plain_route_is_answered_as_that_and_closed(app):
    received = await exchange(app.front, head(b"GET", b"/plain", *OPENING) + HIDDEN)
    assert statuses(received) == [200]
    assert b"connection: close" in received
    assert "/hidden" not in asked(app)


async def test_an_empty_body_is_none(app):
    received = await exchange(app.front, head(b"GET", b"/plain", *OPENING, b"Content-Length: 0"))
    assert statuses(received) == [200]


FAILING = {
    "no version": OPENING[:2] + OPENING[3:],
    "an old version": (*OPENING[:2], b"Sec-WebSocket-Version: 8", OPENING[3]),
    "no key": OPENING[:3],
    "a short key": (*OPENING[:3], b"Sec-WebSocket-Key: short"),
    "two keys": (*OPENING, OPENING[3]),
    "two origins": (*OPENING, b"Origin: a", b"Origin: b"),
    "bytes in a key": (*OPENING[:3], b"Sec-WebSocket-Key: \xff\xfe"),
}


@pytest.mark.parametrize("lines", FAILING.values(), ids=FAILING)
async def test_an_opening_whose_handshake_fails_is_answered_and_closed(app, lines):
    (status,) = statuses(await exchange(app.front, head(b"GET", b"/failing", *lines) + HIDDEN))
    assert status in {400, 426}
    assert "/hidden" not in asked(app)


async def test_a_tunnel_is_refused_and_closed(app):
    request = b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\n\r\n"
    assert statuses(await exchange(app.front, request + HIDDEN)) == [501]
    assert "/hidden" not in asked(app)


# --- behind a proxy of another maker --------------------------------------------------------------

HTTP_PAGE = Path(__file__).parents[2] / "docs/http.md"
CONFIG = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
    upstream front {{ server 127.0.0.1:{front}; keepalive 1; }}
    server {{
        listen 127.0.0.1:{port};
        location /shut {{ return 403; }}
        {pages}
        location / {{
            proxy_pass http://front;
            proxy_http_version 1.1;
            proxy_request_buffering off;
            proxy_set_header Host $host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
        }}
    }}
}}
"""


def paths(received):
    return re.findall(rb'"path": "(.*?)".*?"body_size": (\d+)', received)


def documented(port):
    """Return what the page on HTTP has for an nginx that keeps our pages to itself."""
    _, _, lines = HTTP_PAGE.read_text().partition("```nginx\n")
    about_pages, found, _ = lines.partition("location / {")
    assert found
    return about_pages.replace("127.0.0.1:8000", f"127.0.0.1:{port}")


@pytest.fixture
def proxied(front, tmp_path, start_nginx):
    """Give the port of an nginx in front of the front."""
    nginx, port = needed("nginx", "nginx-light"), free_port()
    config, log = tmp_path / "nginx.conf", tmp_path / "error.log"
    pages = documented(front.port)
    config.write_text(CONFIG.format(folder=tmp_path, front=front.port, port=port, pages=pages))
    start_nginx([nginx, "-p", str(tmp_path), "-c", str(config), "-e", str(log)], port)
    return port


def through(port, *segments):
    """Send segments and read one answer with a length."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for segment in segments:
            connection.sendall(segment)
        with connection.makefile("rb") as answer:
            lines = list(iter(answer.readline, b"\r\n"))
            length = next(line for line in lines if line.lower().startswith(b"content-length"))
            return lines[0], answer.read(int(length.split(b":")[1]))


@pytest.mark.parametrize("lines", [UPGRADES["foo"], UPGRADES["h2c"]], ids=["foo", "h2c"])
def test_no_other_client_of_a_proxy_gets_the_answer_to_a_hidden_request(front, proxied, lines):
    line, body = framed(HIDDEN, "length")
    for _ in range(3):
        status, answer = through(proxied, head(b"POST", b"/attack", *lines, line), body)
        assert b" 200 " in status
        assert paths(answer) == [(b"/attack", b"%d" % len(body))]
        status, answer = through(proxied, head(b"GET", b"/victim"))
        assert paths(answer) == [(b"/victim", b"0")]
    assert "/hidden" not in front.ask("/seen").json["asked_paths"]


@pytest.mark.parametrize(
    "target",
    [b"/shut/../evil/x", b"/shut/%2e%2e/evil/x", b"/shut%2f..%2fevil/x", b"/shut/%2e/../evil"],
)
def test_a_path_that_a_proxy_resolves_reaches_nothing_that_it_forbids(front, proxied, target):
    assert b" 403 " in through(proxied, head(b"GET", b"/shut/x"))[0]
    assert b" 400 " in through(proxied, head(b"GET", target))[0]
    assert not [path for path in front.ask("/seen").json["asked_paths"] if path.startswith("/shut")]


@pytest.mark.parametrize(
    "target",
    [
        *(b"/-/metrics", b"/-/dashboard", b"/-/routes", b"/-/readyz", b"/-/api/openapi.json"),
        *(b"/%2D/metrics", b"//-/metrics", b"/x/../-/metrics", b"/-%2fmetrics", b"/-/healthz/"),
    ],
)
def test_of_our_pages_a_proxy_as_documented_passes_on_health_alone(proxied, target):
    assert b" 200 " in through(proxied, head(b"GET", b"/-/healthz"))[0]
    assert b" 404 " in through(proxied, head(b"GET", target))[0]
