"""What the apps of all protocols do: they are a class's, call it, read bodies, tell of errors."""

from __future__ import annotations

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

from greenroom.actors.replica import context as user_context, logging as user_logging
from greenroom.actors.replica.asgi import AppSource
from greenroom.actors.replica.servable import ASGI_APP
from greenroom.core.errors import (
    PASSED_ON,
    BodyTooLargeError,
    GreenroomError,
    MethodNotAllowedError,
)
from greenroom.serve.decorators.per_instance import check_class

C = TypeVar("C", bound=type)
Answerer = Callable[[Request], Awaitable[Response]]


def give_app(cls: C, decorator: str, methods: tuple[str, ...], make: Callable[[], Any]) -> C:
    """Have the app that ``make`` makes in each replica answer for a class.

    TypeError for what is no class, or has none of the methods, or one that is not callable.
    """
    check_class(decorator, cls)
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


def describe_failure(
    error: Exception, *own: type[GreenroomError]
) -> tuple[int, str, dict[str, str]]:
    """Return status, text and headers for an error; user code's is logged, and not described.

    A client is told of errors of the kinds ``own`` as of those that every handler passes on.
    """
    if isinstance(error, HTTPException):
        return error.status_code, error.detail, dict(error.headers or {})
    if not (isinstance(error, GreenroomError) and isinstance(error, (*PASSED_ON, *own))):
        _log(error)
        return 500, "the deployment raised an exception", {}
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, MethodNotAllowedError):
        headers["allow"] = ", ".join(error.allowed)
    return error.http_status, str(error), headers


def _log(error: BaseException) -> None:
    query = user_context.running.get()
    if query is not None:
        user_logging.log_failure(query.assignment.query, error)
    else:
        user_logging.our_logger().error("a request failed", exc_info=error)


def make_app(
    answers: Mapping[str, Answerer], failed: Callable[[Exception], Response], unknown: str = ""
) -> Starlette:
    """Make an app of what answers each "METHOD,METHOD /path".

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
        routes.append(Route(path, guarded(answer), methods=method.split(",")))
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
