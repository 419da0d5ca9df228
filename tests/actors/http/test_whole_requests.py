"""The request that a handler gets when all of the body is here."""

from __future__ import annotations

import json
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


async def test_its_body_can_be_read_again_in_every_way():
    asked = request(b"a=1")
    assert await asked.body() == await asked.body() == b"a=1"
    assert dict(await asked.form()) == {"a": "1"}


async def test_json_comes_from_the_body():
    asked = request(b'{"a": 1}')
    assert await asked.json() is await asked.json()
    assert await asked.json() == {"a": 1}
    assert await asked.body() == b'{"a": 1}'


@pytest.mark.parametrize(
    "text", ["[NaN]", '"\\ud800"', "1e400", "123456789012345678901234567890", '{"a":1,"a":-0}']
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
async def test_json_is_what_pythons_own_makes_of_it(text, encoding):
    found = await request(text.encode(encoding)).json()
    assert repr(found) == repr(json.loads(text))


@pytest.mark.parametrize("body", [b"", b"{", b"[1,]", b"\xff", b'"\n"', b"01"])
async def test_what_is_no_json_is_an_error_of_pythons_own(body):
    with pytest.raises(ValueError, match=r"line 1|decode"):
        await request(body).json()


async def test_it_can_be_read_as_a_stream():
    assert b"".join([part async for part in request(b"content").stream()]) == b"content"


async def test_an_empty_one_is_empty():
    asked = request(b"")
    assert await asked.body() == b"".join([part async for part in asked.stream()]) == b""
