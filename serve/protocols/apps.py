"""What the apps of all protocols do: they are a class's, call its methods, and read bodies."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from greenroom.actors.replica import context as user_context
from greenroom.actors.replica.asgi import AppSource
from greenroom.actors.replica.servable import ASGI_APP
from greenroom.core.errors import BodyTooLargeError
from greenroom.serve.deployments import Deployment

C = TypeVar("C", bound=type)
Answerer = Callable[[Request], Awaitable[Response]]


def give_app(cls: C, decorator: str, methods: tuple[str, ...], make: Callable[[], Any]) -> C:
    """Have the app that ``make`` makes in each replica answer for a class.

    TypeError for what is no class, or has none of the methods, or one that is not callable.
    """
    if isinstance(cls, Deployment):
        raise TypeError(f"put @{decorator} below @serve.deployment, next to the class")
    if not inspect.isclass(cls):
        raise TypeError(f"@{decorator} is for classes, not for {cls!r}")
    if not any(callable(getattr(cls, name, None)) for name in methods):
        names = ", ".join(methods)
        raise TypeError(f"@{decorator}: {cls.__name__} has none of the methods {names}")
    setattr(cls, ASGI_APP, AppSource(make))
    return cls


def instance() -> Any:
    """Return the instance whose app this is."""
    replica = user_context.replica_context()
    assert replica is not None, "apps run in replicas"
    return replica.servable_object


async def read_body(request: Request, limit: float = math.inf) -> bytes:
    """Return the body; BodyTooLargeError when it is over ``limit`` bytes."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLargeError(f"the body is over {limit} bytes; send less")
        parts.append(part)
    return b"".join(parts)


def make_app(
    answers: Mapping[str, Answerer], failed: Callable[[Exception], Response], unknown: str = ""
) -> Starlette:
    """Make an app of what answers each "METHOD /path".

    ``failed`` answers for what raises. For other paths it gets an HTTPException, with the text
    ``unknown``, where there is one, in place of "Not Found".
    """

    def guarded(answer: Answerer) -> Answerer:
        async def handle(request: Request) -> Response:
            try:
                return await answer(request)
            except Exception as error:
                return failed(error)

        return handle

    async def refuse(_request: Request, error: Exception) -> Response:
        if unknown and isinstance(error, HTTPException) and error.status_code == 404:
            error.detail = unknown
        return failed(error)

    routes = []
    for place, answer in answers.items():
        method, _, path = place.partition(" ")
        routes.append(Route(path, guarded(answer), methods=[method]))
    return Starlette(routes=routes, exception_handlers={HTTPException: refuse})


class ClosingStream(StreamingResponse):
    """Sends what a generator yields, and closes it however that ends: the client may leave."""

    def __init__(self, parts: AsyncGenerator[str, None], media_type: str) -> None:
        super().__init__(parts, media_type=media_type, headers={"cache-control": "no-cache"})
        self._parts = parts

    async def stream_response(self, send: Send) -> None:
        """Send all parts."""
        async with aclosing(self._parts):
            await super().stream_response(send)
