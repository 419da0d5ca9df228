"""Whose X-Forwarded-... is believed, by the setting, and behind the balancer in deploy/."""

import socket

import pytest

from greenroom.core.config import HTTPOptions
from greenroom.core.validation import validated
from tests.support.balancer import balancer_command
from tests.support.systems import free_port

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
