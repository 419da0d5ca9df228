"""Between HTTP as messages carry it and what user code sees: requests in, responses out."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from understudy.actors.messages import HttpAnswer, HttpCall
from understudy.core.errors import UnsupportedResultError

_JSON = ((b"content-type", b"application/json"),)
_TEXT = ((b"content-type", b"text/plain; charset=utf-8"),)
_BYTES = ((b"content-type", b"application/octet-stream"),)


def make_request(call: HttpCall, route: str) -> Request:
    """Make the request that a handler gets; its body is already here."""
    prefix = "" if route == "/" else route
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
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
    body: bytes | None = call.body

    async def receive() -> dict[str, Any]:
        nonlocal body
        if body is None:
            await asyncio.get_running_loop().create_future()  # the client is still there
        chunk, body = body, None
        return {"type": "http.request", "body": chunk, "more_body": False}

    return Request(scope, receive)


async def make_answer(query_id: int, result: Any, request: Request) -> HttpAnswer:
    """Turn what a handler returned into an answer.

    str is text, bytes are bytes, a Starlette response is itself with its background tasks, anything
    else is JSON. Raises UnsupportedResultError naming the type that is none of these.
    """
    if isinstance(result, Response):
        return await _from_response(query_id, result, request)
    if isinstance(result, str):
        return HttpAnswer(query_id, 200, _TEXT, result.encode())
    if isinstance(result, bytes | bytearray | memoryview):
        return HttpAnswer(query_id, 200, _BYTES, bytes(result))
    try:
        body = json.dumps(result, default=_jsonable, separators=(",", ":"), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise UnsupportedResultError(
            f"cannot turn a {type(result).__name__} into an HTTP response ({error}); return str, "
            "bytes, something JSON-able or a Starlette response"
        ) from error
    return HttpAnswer(query_id, 200, _JSON, body.encode())


def from_http_exception(query_id: int, error: HTTPException) -> HttpAnswer:
    """Answer with the status and detail of a Starlette HTTPException, as Starlette does."""
    headers = tuple((k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items())
    body = b"" if error.status_code in {204, 304} else error.detail.encode()
    return HttpAnswer(query_id, error.status_code, headers + _TEXT, body)


async def _from_response(query_id: int, response: Response, request: Request) -> HttpAnswer:
    if isinstance(response, StreamingResponse) or response.background is not None:
        return await _run_response(query_id, response, request)
    body = bytes(response.body) if hasattr(response, "body") else None
    if body is None:  # FileResponse reads its file when it is called
        return await _run_response(query_id, response, request)
    return HttpAnswer(query_id, response.status_code, tuple(response.raw_headers), body)


async def _run_response(query_id: int, response: Response, request: Request) -> HttpAnswer:
    start: dict[str, Any] = {}
    chunks: list[bytes] = []

    async def send(event: Message) -> None:
        if event["type"] == "http.response.start":
            start.update(event)
        elif event["type"] == "http.response.body":
            chunks.append(bytes(event.get("body", b"")))

    await response(request.scope, request.receive, send)
    headers = tuple((bytes(k), bytes(v)) for k, v in start.get("headers", ()))
    return HttpAnswer(query_id, start["status"], headers, b"".join(chunks))


def _jsonable(value: Any) -> Any:
    # numpy scalars and arrays, without importing numpy
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON-able")
