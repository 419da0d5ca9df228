"""What is believed of X-Forwarded-For and X-Forwarded-Proto."""

import pytest

from greenroom.http_front.protocol import TrustedProxies

PROXY = ("127.0.0.1", 5000)


def told(*headers, trusted=("127.0.0.1", "::1", "10.0.0.0/8"), client=PROXY, kind="http"):
    scope = {"type": kind, "client": client, "scheme": "http", "headers": list(headers)}
    TrustedProxies(trusted).apply(scope)
    return scope["client"], scope["scheme"]


def hops(value):
    return (b"x-forwarded-for", value)


@pytest.mark.parametrize(
    ("value", "client"),
    [
        (b"9.9.9.9", ("9.9.9.9", 0)),
        (b"1.1.1.1, 9.9.9.9", ("9.9.9.9", 0)),
        (b"9.9.9.9, 10.1.2.3, 127.0.0.1", ("9.9.9.9", 0)),
        (b"10.0.0.1, 10.0.0.2", ("10.0.0.1", 0)),
        (b"9.9.9.9:77", ("9.9.9.9", 77)),
        (b"2001:db8::1", ("2001:db8::1", 0)),
        (b"[2001:db8::1]:77", ("2001:db8::1", 77)),
        (b" 9.9.9.9 ", ("9.9.9.9", 0)),
        (b"9.9.9.9:" + b"7" * 5000, ("9.9.9.9", 0)),
    ],
)
def test_the_client_is_the_last_hop_that_is_no_proxy(value, client):
    assert told(hops(value))[0] == client


@pytest.mark.parametrize(
    "value", [b"", b"unknown", b"\xc3\xa9", b'","forged":"yes', b"9.9.9.9, \x1b[2J", b"1.2.3", b","]
)
def test_what_is_no_address_changes_nothing(value):
    assert told(hops(value))[0] == PROXY


def test_several_lines_are_one_list():
    assert told(hops(b"9.9.9.9"), hops(b"10.0.0.1"))[0] == ("9.9.9.9", 0)


@pytest.mark.parametrize(
    ("kind", "value", "scheme"),
    [
        ("http", b"https", "https"),
        ("websocket", b"https", "wss"),
        ("websocket", b"wss", "wss"),
        ("http", b"gopher", "http"),
        ("http", b"", "http"),
    ],
)
def test_the_scheme_is_one_of_https_or_stays(kind, value, scheme):
    assert told((b"x-forwarded-proto", value), kind=kind)[1] == scheme


def test_a_stranger_is_not_believed_unless_everybody_is():
    said = hops(b"9.9.9.9"), (b"x-forwarded-proto", b"https")
    stranger = ("8.8.8.8", 1)
    assert told(*said, client=stranger) == (stranger, "http")
    assert told(*said, client=None) == (None, "http")
    assert told(*said, client=stranger, trusted=["*"]) == (("9.9.9.9", 0), "https")
