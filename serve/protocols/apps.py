"""What the apps of all protocols do: they are a class's, call its methods, and read bodies."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from greenroom.actors.replica import context as user_context, logging as user_logging
from greenroom.actors.replica.asgi import AppSource
from greenroom.actors.replica.user_code import ASGI_APP
from greenroom.core.errors import BodyTooLargeError
from greenroom.serve.deployments import Deployment

C = TypeVar("C", bound=type)


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


def log_failure(error: BaseException) -> None:
    """Log what user code raised, with the request's id; the client is not informed."""
    query = user_context.running.get()
    if query is not None:
        user_logging.log_failure(query.assignment.query, error)
    else:
        logging.getLogger(user_logging.OURS).error("a request failed", exc_info=error)


class ClosingStream(StreamingResponse):
    """Sends what a generator yields, and closes it however that ends: the client may leave."""

    def __init__(self, parts: AsyncGenerator[str, None], media_type: str) -> None:
        super().__init__(parts, media_type=media_type, headers={"cache-control": "no-cache"})
        self._parts = parts

    async def stream_response(self, send: Send) -> None:
        """Send all parts."""
        async with aclosing(self._parts):
            await super().stream_response(send)
