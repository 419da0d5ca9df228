"""Behind nginx: what a proxy forbids stays so, and whose X-Forwarded-... is believed."""

import re
import socket
from pathlib import Path

import pytest

from greenroom.core.config import HTTPOptions
from greenroom.core.validation import validated
from tests.http.doubtful import UPGRADES
from tests.http.wire import head
from tests.support.balancer import balancer_command
from tests.support.programs import needed
from tests.support.systems import free_port

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


@pytest.mark.parametrize("name", ["foo", "h2c"])
def test_no_other_client_of_a_proxy_gets_the_answer_to_a_hidden_request(front, proxied, name):
    hidden = head(b"GET", b"/hidden")
    length = b"Content-Length: %d" % len(hidden)
    for _ in range(3):
        request = head(b"POST", b"/attack", *UPGRADES[name], length)
        status, answer = through(proxied, request, hidden)
        assert b" 200 " in status
        assert paths(answer) == [(b"/attack", b"%d" % len(hidden))]
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


# --- whose X-Forwarded-For is believed ----------------------------------------------------------

OWN, CLIENT = "127.0.0.5", "127.0.0.9"


@pytest.fixture
def balancer(tmp_path, start_nginx):
    """Give a function that puts the balancer in front of a port, and returns its own."""

    def start(front_port):
        port = free_port()
        fronts, listen = [f"127.0.0.1:{front_port}"], f"127.0.0.1:{port}"
        more = {"main": "master_process off;\n", "more": f"proxy_bind {OWN};"}
        log = tmp_path / "error.log"
        start_nginx(balancer_command(tmp_path, fronts, listen, log, **more), port)
        return port

    return start


def ask(port, path, *lines):
    """Ask from the client's address; return the response."""
    address = ("127.0.0.1", port)
    with socket.create_connection(address, 20, source_address=(CLIENT, 0)) as connection:
        said = "".join(f"{line}\r\n" for line in lines)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{said}\r\n".encode())
        return connection.recv(65536)


FORGED = ("X-Forwarded-For: 1.2.3.4", "X-Real-IP: 1.2.3.4", "Forwarded: for=1.2.3.4")


def test_behind_the_balancer_the_client_is_who_connects_to_it_and_past_it_nobody_is_believed(
    start_front, balancer
):
    front = start_front(GREENROOM_HTTP_TRUSTED_PROXIES="127.0.0.4/30")  # of which OWN is one
    port = balancer(front.port)
    assert ask(port, "/seen-by", *FORGED).startswith(b"HTTP/1.1 200 ")
    ask(front.port, "/direct", *FORGED)
    for path in ("/seen-by", "/direct"):
        assert front.logged(path)["client"].split(":")[0] == CLIENT
    assert ask(port, "/-/healthz").startswith(b"HTTP/1.1 200 ")
    assert ask(port, "/-/metrics").startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    ("given", "trusted"),
    [
        ("none", ()),
        (None, ()),
        ("*", ("*",)),
        ("10.0.0.0/8, ::1", ("10.0.0.0/8", "::1")),
        (["10.0.0.1"], ("10.0.0.1",)),
    ],
)
def test_they_are_named_as_addresses_and_networks(given, trusted):
    assert validated(HTTPOptions, {"trusted_proxies": given}).trusted_proxies == trusted
