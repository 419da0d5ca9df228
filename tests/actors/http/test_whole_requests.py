"""The request that a handler gets when all of the body is here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from greenroom.actors.messages.queries import HttpCall
from greenroom.actors.replica.responses import make_request

pytestmark = pytest.mark.anyio
FORM = (b"content-type", b"application/x-www-form-urlencoded")


def request(body: bytes) -> Request:
    call = HttpCall("POST", "/", b"/", b"", (FORM,), body, "http", "1.1", None, None, "")
    reply: Any = SimpleNamespace(upload=None, assignment=SimpleNamespace(route="/"))
    return make_request(call, reply)


async def test_its_body_can_be_read_again_in_every_way() -> None:
    asked = request(b"a=1")
    assert await asked.body() == await asked.body() == b"a=1"
    assert dict(await asked.form()) == {"a": "1"}


async def test_json_comes_from_the_body() -> None:
    asked = request(b'{"a": 1}')
    assert await asked.json() == await asked.json() == {"a": 1}
    assert await asked.body() == b'{"a": 1}'


async def test_it_can_be_read_as_a_stream() -> None:
    assert b"".join([part async for part in request(b"content").stream()]) == b"content"


async def test_an_empty_one_is_empty() -> None:
    asked = request(b"")
    assert await asked.body() == b"".join([part async for part in asked.stream()]) == b""
