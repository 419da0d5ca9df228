"""Between HTTP as messages carry it and what user code sees: requests in, responses out."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from understudy.actors.messages import END, HttpAnswer, HttpCall, StreamEnded
from understudy.actors.streams import Parts
from understudy.actors.user_code import Reply
from understudy.core.errors import UnsupportedResultError

_JSON = ((b"content-type", b"application/json"),)
_TEXT = ((b"content-type", b"text/plain; charset=utf-8"),)
_BYTES = ((b"content-type", b"application/octet-stream"),)


def make_scope(call: HttpCall, route: str) -> dict[str, Any]:
    """Make what an ASGI app sees of a request; an endpoint's route is part of the root path."""
    prefix = "" if route == "/" else route
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": call.http_version,
        "method": call.method,
        "scheme": call.scheme,
        "path": call.path,
        "raw_path": call.raw_path,
        "query_string": call.query_string,
        "root_path": call.root_path + prefix,
        "headers": list(call.headers),
        "client": call.client,
        "server": call.server,
        "state": {},
    }


def make_request(call: HttpCall, reply: Reply) -> Request:
    """Make the request that a handler gets; its body is here, or comes in parts."""
    scope = make_scope(call, reply.assignment.route)
    return Request(scope, Body(call.body, reply.feed).receive)


class Body:
    """A request's body: what came with the query, then what follows it."""

    def __init__(self, beginning: bytes, feed: Parts | None) -> None:
        self._beginning: bytes | None = beginning
        self._feed = feed

    async def receive(self) -> Message:
        """Return the next part; after the last, wait for a client that is still there."""
        beginning, self._beginning = self._beginning, None
        if beginning or (beginning is not None and self._feed is None):
            more = self._feed is not None
            return {"type": "http.request", "body": beginning, "more_body": more}
        part = None if self._feed is None else await self._feed.next()
        while part is None:
            await asyncio.get_running_loop().create_future()
        if part.ends == END:
            self._feed = None
        return {"type": "http.request", "body": part.data, "more_body": self._feed is not None}


async def give_answer(reply: Reply, result: Any, request: Request) -> HttpAnswer | None:
    """Turn what a handler returned into an answer; None when it has been given in parts.

    str is text, bytes are bytes, a Starlette response is itself with its background tasks, the
    parts of an iterator leave as they are made, and anything else is JSON. Raises
    UnsupportedResultError naming the type that is none of these.
    """
    query_id = reply.assignment.query.id
    if isinstance(result, Response):
        return await _give_response(reply, result, request)
    if isinstance(result, str):
        return HttpAnswer(query_id, 200, _TEXT, result.encode())
    if isinstance(result, bytes | bytearray | memoryview):
        return HttpAnswer(query_id, 200, _BYTES, bytes(result))
    if hasattr(result, "__aiter__"):
        await _give_parts(reply, result)
        return None
    try:
        body = json.dumps(result, default=_jsonable, separators=(",", ":"), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise UnsupportedResultError(
            f"cannot turn a {type(result).__name__} into an HTTP response ({error}); return str, "
            "bytes, something JSON-able, a generator or a Starlette response"
        ) from error
    return HttpAnswer(query_id, 200, _JSON, body.encode())


async def _give_parts(reply: Reply, parts: Any) -> None:
    """Send str as text or bytes as they are; the first part says which it is."""
    has_begun = False
    try:
        async for part in parts:
            if not isinstance(part, str | bytes | bytearray | memoryview):
                raise UnsupportedResultError(
                    f"a generator yielded a {type(part).__name__}; yield str or bytes"
                )
            if not has_begun:
                reply.begin(200, _TEXT if isinstance(part, str) else _BYTES)
                has_begun = True
            await reply.send(part.encode() if isinstance(part, str) else bytes(part))
    finally:
        if hasattr(parts, "aclose"):
            await parts.aclose()
    if not has_begun:
        reply.begin(200, _TEXT)
    reply.answer(StreamEnded(reply.assignment.query.id, 200))


def from_http_exception(query_id: int, error: HTTPException) -> HttpAnswer:
    """Answer with the status and detail of a Starlette HTTPException, as Starlette does."""
    headers = tuple((k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items())
    body = b"" if error.status_code in {204, 304} else error.detail.encode()
    return HttpAnswer(query_id, error.status_code, headers + _TEXT, body)


async def _give_response(reply: Reply, response: Response, request: Request) -> HttpAnswer | None:
    is_whole = not isinstance(response, StreamingResponse) and response.background is None
    if is_whole and hasattr(response, "body"):  # a FileResponse reads its file when it is called
        query_id, headers = reply.assignment.query.id, tuple(response.raw_headers)
        return HttpAnswer(query_id, response.status_code, headers, bytes(response.body))
    asgi = AsgiReply(reply)
    await response(request.scope, request.receive, asgi.send)
    asgi.check_complete()
    return None


class AsgiReply:
    """The ``send`` of an ASGI app: what comes whole at once is an answer, anything else parts."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._query_id = reply.assignment.query.id
        self._status = 0
        self._headers: tuple[tuple[bytes, bytes], ...] = ()
        self._has_begun = False
        self._is_complete = False

    async def send(self, event: Message) -> None:
        """Take an event of the response."""
        kind = event["type"]
        if kind == "http.response.start":
            self._status = event["status"]
            self._headers = tuple((bytes(k), bytes(v)) for k, v in event.get("headers", ()))
        elif kind == "http.response.body" and not self._is_complete:
            await self._body(bytes(event.get("body", b"")), more=event.get("more_body", False))

    async def _body(self, body: bytes, *, more: bool) -> None:
        reply, query_id = self._reply, self._query_id
        if not (more or self._has_begun):
            self._is_complete = True
            reply.answer(HttpAnswer(query_id, self._status, self._headers, body))
            return
        if not self._has_begun:
            self._has_begun = True
            reply.begin(self._status, self._headers)
        if body:
            await reply.send(body)
        if not more:
            self._is_complete = True
            reply.answer(StreamEnded(query_id, self._status))

    def check_complete(self) -> None:
        """Raise UnsupportedResultError when the app has returned before the end."""
        if not self._is_complete:
            raise UnsupportedResultError("the response ended without its last part")


def _jsonable(value: Any) -> Any:
    # numpy scalars and arrays, without importing numpy
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON-able")
