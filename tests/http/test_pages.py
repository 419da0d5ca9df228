"""The pages under ``/-/`` at a place of their own."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from greenroom.actors.runtime.http_port import bind_http
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.config import HTTPOptions
from greenroom.core.errors import InvalidRequestError, StartError
from greenroom.core.validation import validated
from tests.support.systems import free_port

PAGES = ("/-/healthz", "/-/readyz", "/-/routes", "/-/metrics")
HEALTH = PAGES[:2]
UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.fixture(name="free_port")
def make_free_port() -> int:
    return free_port()


def status(address: tuple[str, int], target: str, headers: str = "", method: str = "GET") -> int:
    """Ask on the wire; 0 where nobody listens."""
    try:
        with socket.create_connection(address, timeout=20) as connection:
            request = f"{method} {target} HTTP/1.1\r\nHost: x\r\n{headers}\r\n"
            connection.sendall(request.replace("Host: x\r\n", f"Host: {address[0]}\r\n").encode())
            return int(connection.recv(65536).split()[1])
    except (ConnectionRefusedError, ConnectionResetError):
        return 0


def statuses(address: tuple[str, int], *targets: str) -> dict[str, int]:
    return {target: status(address, target) for target in targets}


def test_at_a_port_of_their_own_they_are_alone_and_only_health_is_left_elsewhere(
    start_front, free_port
):
    front = start_front(GREENROOM_HTTP_PAGES_PORT=str(free_port))
    own, public = ("127.0.0.1", free_port), ("127.0.0.1", front.port)
    assert statuses(own, *PAGES) == dict.fromkeys(PAGES, 200)
    found = statuses(public, *PAGES, "/echo")
    assert found == {page: 200 if page in HEALTH else 404 for page in PAGES} | {"/echo": 200}
    assert statuses(own, "/echo", "/", "/-/nothing") == {"/echo": 404, "/": 404, "/-/nothing": 404}
    assert status(own, "/echo", "Content-Length: 1\r\n\r\nx", "POST") == 404
    assert status(own, "/echo", UPGRADE) == 404
    assert status(own, "/-/metrics", method="DELETE") == 405
    assert front.logged("/-/nothing")["status"] == 404


def test_at_an_address_of_their_own_below_a_root_path_and_past_middlewares(start_front):
    nobody = ["starlette.middleware.trustedhost:TrustedHostMiddleware", {"allowed_hosts": []}]
    front = start_front(
        GREENROOM_HTTP_PAGES_HOST="127.0.0.2",
        GREENROOM_HTTP_ROOT_PATH="/gate",
        GREENROOM_HTTP_MIDDLEWARES=json.dumps([nobody]),
    )
    own, public = ("127.0.0.2", front.port), ("127.0.0.1", front.port)
    for target in ("/-/metrics", "/gate/-/metrics"):
        assert (status(own, target), status(public, target)) == (200, 400)
    assert (status(public, "/gate/-/healthz"), status(public, "/gate/echo")) == (200, 400)


def test_each_worker_has_them_and_a_new_one_too(start_front, free_port, until):
    front = start_front(GREENROOM_HTTP_PAGES_PORT=str(free_port), GREENROOM_HTTP_WORKERS="2")
    until("both workers are there", lambda: len(front.workers()) == 2)
    old = front.workers()
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    until("there are new ones", lambda: len(set(front.workers()) - set(old)) == 2)
    until("one has it", lambda: status(("127.0.0.1", free_port), "/-/metrics") == 200)


def test_a_port_in_use_keeps_only_the_pages_away_until_it_is_free(start_front, until):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        front = start_front(GREENROOM_HTTP_PAGES_PORT=str(port))
        assert front.ask("/echo").status == 200
        message = f"the pages under /-/ cannot be served: port {port} on 127.0.0.1 cannot be had"
        until("it says so", lambda: message in front.stderr_path.read_text())
    until("they are there", lambda: status(("127.0.0.1", port), "/-/metrics") == 200)


def test_tokens_are_taken_without_tls_only_where_this_host_alone_connects(start_front, free_port):
    start_front(GREENROOM_HTTP_PAGES_HOST="0.0.0.0", GREENROOM_HTTP_PAGES_PORT=str(free_port))
    found = statuses(("127.0.0.1", free_port), "/-/dashboard", "/api/v1/get_status", "/-/metrics")
    assert list(found.values()) == [403, 403, 200]


def test_a_port_in_use_is_an_error_of_the_start(tmp_path: Path, free_port):
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # also of what would share it
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            port = holder.getsockname()[1]
            settings = read_settings(
                {}, state_dir=tmp_path, http_port=free_port, http_pages_port=port
            )
            message = (
                f"HTTP port {port} on 127.0.0.1 is in use by pid {os.getpid()} .*--http-pages-port"
            )
            with pytest.raises(StartError, match=message):
                bind_http(settings)
    bind_http(settings).close()


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({}, None),
        ({"pages_port": 8001}, ("127.0.0.1", 8001)),
        ({"host": "0.0.0.0", "pages_port": "8001"}, ("127.0.0.1", 8001)),
        ({"pages_host": "10.0.0.1"}, ("10.0.0.1", 8000)),
        ({"pages_host": "::1", "pages_port": 1}, ("::1", 1)),
    ],
)
def test_where_they_are_is_said_by_port_address_or_both(options, address):
    assert validated(HTTPOptions, options).pages_address == address


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pages_port": 8000}, "pages_port=8000: expected an address other than .* 127.0.0.1:8000"),
        ({"pages_host": "127.0.0.1"}, "expected an address other than"),
        ({"port": 0, "pages_host": "127.0.0.2"}, "pages_port: must be given where port is 0"),
        ({"pages_port": 0}, "pages_port=0"),
        ({"pages_port": 65536}, "pages_port=65536"),
    ],
)
def test_a_place_that_is_none_of_their_own_is_refused(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        validated(HTTPOptions, options)
