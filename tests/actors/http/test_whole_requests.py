"""The request that a handler gets when all of the body is here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request

from greenroom.actors.messages.queries import HttpCall
from greenroom.actors.replica.responses import make_request

FORM = (b"content-type", b"application/x-www-form-urlencoded")


def read(body: bytes, reading: Callable[[Request], Coroutine[Any, Any, Any]]) -> Any:
    call = HttpCall("POST", "/", b"/", b"", (FORM,), body, "http", "1.1", None, None, "")
    reply: Any = SimpleNamespace(feed=None, assignment=SimpleNamespace(route="/"))
    return asyncio.run(reading(make_request(call, reply)))


def test_its_body_can_be_read_again_in_every_way() -> None:
    async def reading(request: Request) -> Any:
        body, again = await request.body(), await request.body()
        return body, again, dict(await request.form())

    assert read(b"a=1", reading) == (b"a=1", b"a=1", {"a": "1"})


def test_json_comes_from_the_body() -> None:
    async def reading(request: Request) -> Any:
        return [await request.json(), await request.json(), await request.body()]

    assert read(b'{"a": 1}', reading) == [{"a": 1}, {"a": 1}, b'{"a": 1}']


def test_it_can_be_read_as_a_stream() -> None:
    async def reading(request: Request) -> Any:
        return b"".join([part async for part in request.stream()])

    assert read(b"content", reading) == b"content"


def test_an_empty_one_is_empty() -> None:
    async def reading(request: Request) -> Any:
        return await request.body(), b"".join([part async for part in request.stream()])

    assert read(b"", reading) == (b"", b"")
