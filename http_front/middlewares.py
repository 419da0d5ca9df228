"""ASGI middlewares of the host's own choice around every request, CORS outermost.

They stand between the access log, which sees what leaves them, and Falcon, which has all that looks
at the request, so a refusal for its size passes through them too. An error of theirs is answered
with 500, or cuts the connection where the response has begun.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from greenroom.core.config import CorsOptions, HTTPOptions
from greenroom.core.errors import InvalidRequestError
from greenroom.http_front.asgi import App, Event, Headers, Receive, Scope, Send
from greenroom.http_front.request import CLIENT_LEFT, REQUEST_KEY, Request


def around(app: App, options: HTTPOptions) -> App:
    """Return ``app`` with the middlewares around it, and checks around each of them.

    Raises InvalidRequestError naming the one that cannot be imported or made, and the reason.
    """
    return partial(_outermost, _wrapped(options, partial(_innermost, app)))


async def _outermost(chain: App, scope: Scope, receive: Receive, send: Send) -> None:
    await chain(scope, receive, send)
    request: Request = scope[REQUEST_KEY]
    if not request.status:
        if not request.is_disconnected:
            raise RuntimeError("a middleware returned without a response")
        request.status = CLIENT_LEFT


async def _innermost(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    async def send_bytes(event: Event) -> None:
        if isinstance(event.get("body"), memoryview):
            event["body"] = bytes(event["body"])  # ASGI knows bytes only
        await send(event)

    await app({**scope}, receive, send_bytes)


class _Watched:
    """One of the layers; when it raises amid its response, those outside of it cannot end that."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def watched(event: Event) -> None:
            nonlocal has_begun
            await send(event)
            has_begun = True

        try:
            await self._app(scope, receive, watched)
        except BaseException as error:
            if has_begun:  # Starlette's BaseHTTPMiddleware would end it as a good one
                scope[REQUEST_KEY].broken_by = error
            raise


def _wrapped(options: HTTPOptions, app: App) -> App:
    """Put the middlewares around ``app``, the first one outermost, and CORS around all."""
    folder = options.middlewares_dir
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)  # last: its modules must not take the place of installed ones
    for each in reversed(options.middlewares):
        make = _imported(each.path)
        try:
            app = make(_Watched(app), **each.options)
        except Exception as error:
            raise InvalidRequestError(
                f"the middleware {each.path!r} cannot be made with the options {each.options}: "
                f"{type(error).__name__}: {error}"
            ) from error
    if options.cors is not None:
        app = _cors_around(app, options.cors)
    return app


def _cors_around(app: App, options: CorsOptions) -> App:
    from starlette.middleware import cors  # noqa: PLC0415  # few need it

    outermost: Any = cors.CORSMiddleware  # Starlette types its scopes otherwise
    return outermost(app, **options.model_dump())  # type: ignore[no-any-return]


class CorsHeaders:
    """Adds the headers of CORS to those of a response, unless it is one to a preflight.

    Starlette's middleware does it, around an app that waits for nothing: no event loop is needed.
    """

    def __init__(self, options: CorsOptions) -> None:
        self._app: Any = _cors_around(self._respond, options)
        self._headers: Headers = []

    def added(self, scope: Scope, headers: Headers) -> Headers:
        """Return the headers of the response to a request, with those of CORS."""
        self._headers = headers
        with contextlib.suppress(StopIteration):
            self._app(scope, None, self._take).send(None)
        return self._headers

    async def _respond(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def _take(self, event: Event) -> None:
        self._headers = event["headers"]


def _imported(path: str) -> Callable[..., App]:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # the module's own code may raise anything
        raise InvalidRequestError(
            f"the middleware {path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise InvalidRequestError(
            f"the middleware {path!r} is of the type {type(found).__name__}, expected "
            "a class or a function that takes the app to wrap"
        )
    return found  # type: ignore[no-any-return]
