"""ASGI middlewares for the tests: well-behaved ones, and such as break what they touch."""

from __future__ import annotations

import contextlib
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response

NO_FUNCTION = 1
BAD_STATUSES = {"status 1000": 1000, "status 99": 99, "status as text": "404"}
BAD_BODIES = {"number": 5, "text": "text", "long text": "text" * 100_000, "list": [b"part"]}


def untouched(app: Any) -> Any:
    return app


class Tag:
    """Adds its word to the header ``x-tags`` of the request and of the response."""

    def __init__(self, app: Any, word: str = "tag") -> None:
        self.app = app
        self.word = word.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope = {**scope, "headers": [*scope["headers"], (b"x-tags", self.word)]}

        async def tagged(event: Any) -> None:
            if event["type"] in {"http.response.start", "websocket.accept"}:
                event = {**event, "headers": [*event["headers"], (b"x-tags", self.word)]}
            await send(event)

        await self.app(scope, receive, tagged)


class Guard:
    """Answers 401 itself unless the request has the password."""

    def __init__(self, app: Any, password: str) -> None:
        self.app = app
        self.password = password.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if dict(scope["headers"]).get(b"authorization") == self.password:
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"no"})


class Buffer:
    """Reads a body before the app inside does."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        events = [await receive()]
        while events[-1].get("more_body"):
            events.append(await receive())

        async def kept() -> Any:
            return events.pop(0) if events else await receive()

        await self.app(scope, kept, send)


class Stamp(BaseHTTPMiddleware):
    """Starlette's own base, which runs what is inside of it as a task of its own."""

    async def dispatch(self, request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers["x-stamp"] = request.method
        return response


def _unsendable(event: Any, how: str) -> Any:
    if how not in BAD_STATUSES | BAD_BODIES:
        return event
    if event["type"] == "http.response.start":
        return {**event, "status": BAD_STATUSES.get(how, event["status"]), "headers": []}
    return {**event, "body": BAD_BODIES.get(how, event["body"])}


def breaking(app: Any, how: str) -> Any:
    """Break the answer in one of several ways."""

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        async def changed(event: Any) -> None:
            is_start = event["type"] == "http.response.start"
            is_end = not (is_start or event.get("more_body"))
            if how == "header" and is_start:
                event = {**event, "headers": [*event["headers"], (b"x-bad", b"1\r\nx-evil: 1")]}
            if how == "length" and is_end:
                event = {**event, "body": event["body"] + b"more than was announced"}
            if how == "short" and not is_start:
                event = {**event, "body": event["body"][1:]}
            if how == "end" and is_end:
                event = {**event, "more_body": True}
            if how == "raises midway" and is_end:
                raise RuntimeError("midway")
            await send(_unsendable(event, how))

        if how == "raises":
            raise RuntimeError("a secret in the exception's text")
        if how == "silent":
            return
        await app(scope, receive, changed)

    return broken


def second_try(_app: Any, *, midway: bool) -> Any:
    """Answer with fewer bytes than announced, and send on when that is refused."""

    async def answering(_scope: Any, _receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200}
        part = {"type": "http.response.body", "body": b"four"}
        await send({**start, "headers": [(b"content-length", b"12")]})
        if midway:
            await send({**part, "more_body": True})
        with contextlib.suppress(RuntimeError):
            await send(part)
        if not midway:
            await send(start)
        await send(part)

    return answering


def waiting(_app: Any) -> Any:
    """Begin an answer, and end when the client has left."""

    async def answering(_scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        while (await receive())["type"] != "http.disconnect":
            pass

    return answering


def unfinished(app: Any) -> Any:
    """Pass on all but the end of the answer, whose length nobody knows, and raise."""

    async def passing_on(scope: Any, receive: Any, send: Any) -> None:
        async def changed(event: Any) -> None:
            kept = [each for each in event.get("headers", ()) if each[0] != b"content-length"]
            await send({**event, "headers": kept, "more_body": True})

        await app(scope, receive, changed)
        raise RuntimeError("before the end")

    return passing_on


class FailsWhenMade:
    def __init__(self, app: Any) -> None:
        raise ValueError("no licence\nfor this")
