"""Webhooks: which URLs may be called, how a callback is signed, and what counts as taken."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from typing import Any

import pytest

from greenroom.core.errors import InvalidRequestError
from greenroom.serve.tasks.callbacks import (
    CallbackRefusedError,
    call_back,
    is_public,
    origin_of,
    signature,
    target_of,
)

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("url", "allowed", "message"),
    [
        ("https://a.example/x", (), "callbacks are off"),
        ("https://b.example/x", ("a.example",), "callback_hosts"),
        ("https://a.example:444/x", ("a.example:443",), "callback_hosts"),
        ("http://b.example/x", ("*",), "https"),
        ("ftp://a.example/x", ("a.example",), "https"),
        ("https://u:p@a.example/x", ("*",), "without a user"),
        ("https:///x", ("*",), "must be a URL"),
        ("https://a.example:x/", ("*",), "must be a URL"),
        ("https://a.example/\r\nhost: b", ("*",), "must be a URL"),
        ("https://a.example/a b", ("*",), "must be a URL"),
        ("https://a.example/" + "x" * 2000, ("*",), "2000 characters"),
    ],
)
def test_urls_that_are_not_allowed_are_refused(url, allowed, message):
    with pytest.raises(InvalidRequestError, match=message):
        target_of(url, allowed, SECRET)


def test_callbacks_without_a_secret_are_refused():
    with pytest.raises(InvalidRequestError, match="set GREENROOM_CALLBACK_SECRET"):
        target_of("https://a.example/", ("*",), "")


def test_plain_http_is_for_hosts_that_are_named():
    target = target_of("http://A.example/x?y=1", ("a.example", "*"), SECRET)
    assert tuple(target) == ("http", "a.example", 80, "/x?y=1", True)
    assert target_of("https://b.example", ("*",), SECRET)[2:] == (443, "/", False)


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://a.example/x", "a.example:443"),
        ("http://a.example:81/x", "A.example:81"),
        ("http://[::1]:81/x", "[::1]:81"),
    ],
)
def test_a_host_may_be_named_with_its_port(url, allowed):
    assert target_of(url, (allowed,), SECRET).is_named


def test_of_a_callback_its_origin_is_shown():
    assert origin_of("https://a.example:81/x?token=s3cret") == "https://a.example:81/***"
    assert origin_of("") == ""


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("224.0.0.1", "::1", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"),
        *("2002:7f00:1::", "2001:0:1::", "ff02::1", "::"),
    ],
)
def test_an_address_that_is_not_of_the_internet_is_not_public(address):
    assert not is_public(address)


def test_addresses_of_the_internet_are_public():
    assert is_public("1.1.1.1")
    assert is_public("2606:4700::1111")


def test_signatures_are_those_of_standard_webhooks():
    key = base64.b64encode(b"key").decode()
    wanted = base64.b64encode(hmac.new(b"key", b"id.7.{}", hashlib.sha256).digest()).decode()
    assert signature(f"whsec_{key}", "id", 7, b"{}") == f"v1,{wanted}"
    assert signature("key", "id", 7, b"{}") == f"v1,{wanted}"


async def called(answer: bytes, **target: Any) -> tuple[bytes, BaseException | None]:
    """Call a server here, which answers so; return what it got and what was raised."""
    got = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readuntil(b"\r\n\r\n"))
        got.extend(await reader.readexactly(len(json.dumps({"id": "j"}))))
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        to = target_of(f"http://127.0.0.1:{port}/done?a=1", ("127.0.0.1",), SECRET)
        try:
            await call_back(to._replace(**target), SECRET, {"id": "j"}, 1234.5)
        except CallbackRefusedError as error:
            return bytes(got), error
    return bytes(got), None


def test_a_callback_posts_the_job_with_its_signature():
    got, error = asyncio.run(called(b"HTTP/1.1 204 No Content\r\n\r\n"))
    assert error is None
    head, _, body = got.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /done?a=1 HTTP/1.1"
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert (headers["webhook-id"], headers["webhook-timestamp"]) == ("j", "1234")
    assert headers["webhook-signature"] == signature(SECRET, "j", 1234, body)
    assert json.loads(body) == {"id": "j"}


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 302 Found\r\nlocation: http://10.0.0.1/\r\n\r\n", b"HTTP/1.1 500 No\r\n", b""],
)
def test_any_other_answer_is_a_callback_not_taken(answer):
    assert isinstance(asyncio.run(called(answer))[1], CallbackRefusedError)


def test_a_name_with_a_private_address_is_not_called_unless_it_is_named():
    got, error = asyncio.run(called(b"HTTP/1.1 200 OK\r\n\r\n", host="localhost", is_named=False))
    assert not got
    assert "not public" in str(error)
