"""From a query's answer to an HTTP response: the table of what a client sees, without I/O.

Replies are made here and nowhere else, so nothing that user code returns can break the framing of
the connection, and no traceback leaves the system.
"""

from __future__ import annotations

import http
import json
import logging
import math
import re
from collections.abc import AsyncIterator, Iterable
from functools import lru_cache
from typing import Any

import falcon
from pydantic_core import to_json

from greenroom.actors.caller.streams import Stream, StreamFailedError
from greenroom.actors.messages.queries import FailedAnswer, HttpAnswer, Pieces
from greenroom.core.errors import (
    ERRORS_BY_KIND,
    GreenroomError,
    MethodNotAllowedError,
    RouteNotFoundError,
    UnauthorizedError,
)
from greenroom.http_front.asgi import Header, Headers, Send
from greenroom.http_front.request import Reply, Request

_logger = logging.getLogger(__name__)

Answer = HttpAnswer | FailedAnswer | Stream

TEXT = b"text/plain; charset=utf-8"
JSON = b"application/json"
PROBLEM = b"application/problem+json"

# These say how the connection is used, which is not user code's business. Content-Length, Date and
# X-Request-ID are ours to set.
_NOT_PASSED_ON = frozenset(
    {
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
    }
)
_WITHOUT_BODY = frozenset({204, 205, 304})

_is_token = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_forbidden_in_value = re.compile(rb"[^\t\x20-\x7e\x80-\xff]").search


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())


STATUS_LINES = {status: _status_line(status) for status in range(100, 1000)}


def response_head(status: int, headers: Headers, default_head: bytes) -> bytes:
    """Return the lines of a response's head; ``default_head`` are those that all have."""
    lines = [STATUS_LINES[status], default_head]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


class BadHeaderError(Exception):
    """User code returned a header that would break the response; the text names it."""


# --- Answers --------------------------------------------------------------------------------------


def reply_to(answer: Answer, request: Request) -> Reply:
    """Turn the answer to a request's query into the response."""
    if isinstance(answer, FailedAnswer):
        return failed_reply(answer, request)
    try:
        if isinstance(answer, Stream):
            return _streamed_reply(answer, request.head.method)
        return _whole_reply(answer, request.head.method)
    except BadHeaderError as error:
        if isinstance(answer, Stream):
            answer.close()
        return error_reply(500, "UnsupportedResultError", str(error), request)


def _whole_reply(answer: HttpAnswer, method: str) -> Reply:
    _, status, answer_headers, body = answer
    _check_status(status)
    headers = passed_on(answer_headers)
    if status in _WITHOUT_BODY:
        if status == 205:  # it has to say that it has none (RFC 9110, 15.3.6)
            headers.append((b"content-length", b"0"))
        return Reply(status, headers, b"")
    length = b"%d" % len(body)
    if method == "HEAD":
        if not body:
            length = declared_length(answer_headers) or length
        body = b""
    headers.append((b"content-length", length))
    return Reply(status, headers, _each(body) if isinstance(body, Pieces) else body)


async def _each(pieces: Pieces) -> AsyncIterator[memoryview]:
    for piece in pieces:
        yield piece


def _streamed_reply(stream: Stream, method: str) -> Reply:
    _check_status(stream.status)
    headers = passed_on(stream.headers)
    length = declared_length(stream.headers)
    if length is not None:
        headers.append((b"content-length", length))
    if method == "HEAD" or stream.status in _WITHOUT_BODY:
        stream.close()
        return Reply(stream.status, headers, b"")
    return Reply(stream.status, headers, StreamedBody(stream, length))


class StreamedBody:
    """The parts of a stream, held to the length that it declares; an async iterator.

    StreamFailedError when it breaks off.
    """

    def __init__(self, stream: Stream, length: bytes | None) -> None:
        self._stream = stream
        self._left = None if length is None else int(length)

    def __aiter__(self) -> StreamedBody:
        return self

    async def __anext__(self) -> bytes:
        data = await self._stream.next_bytes()
        if data is None:
            if self._left:
                raise StreamFailedError("the parts are not as long as their Content-Length")
            raise StopAsyncIteration
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise StreamFailedError("the parts are longer than their Content-Length")
        return data

    def end(self) -> None:
        """Want no more parts; harmless when there are none.

        A client that has all of a declared length may leave before the stream ends. That is no
        reason to cancel what user code does after it.
        """
        if self._left == 0:
            self._stream.leave()
        else:
            self._stream.close()


async def send_reply(reply: Reply, request: Request, send: Send) -> None:
    """Send a response; each part leaves when the client has taken those before it."""
    kind = "websocket.http.response" if request.head.is_socket else "http.response"
    await send({"type": f"{kind}.start", "status": reply.status, "headers": reply.headers})
    if isinstance(reply.body, bytes):
        await send({"type": f"{kind}.body", "body": reply.body})
        return
    async for part in reply.body:
        await send({"type": f"{kind}.body", "body": part, "more_body": True})
    await send({"type": f"{kind}.body", "body": b""})


def end_body(reply: Reply | None) -> None:
    """Release the body of a response that was sent, or never will be."""
    if reply is not None and isinstance(reply.body, StreamedBody):
        reply.body.end()


# --- Headers --------------------------------------------------------------------------------------


def _check_status(status: int) -> None:
    if not 200 <= status <= 999:
        raise BadHeaderError(f"user code returned the status {status!r}, expected 200 to 999")


def passed_on(answer_headers: tuple[tuple[bytes, bytes], ...]) -> Headers:
    """Return the headers a client may see, names in lower case; raises BadHeaderError."""
    headers: Headers = []
    connection = b""
    for name, value in answer_headers:
        lowered = _header_name(name)
        if lowered is None or _forbidden_in_value(value):
            # Without the value: it may be a secret.
            raise BadHeaderError(f"user code returned the invalid response header {name!r}")
        if lowered not in _NOT_PASSED_ON:
            headers.append((lowered, value))
        elif lowered == b"connection":
            connection += b"," + value
    if connection:
        named = {option.strip().lower() for option in connection.split(b",")}
        headers = [header for header in headers if header[0] not in named]
    return headers


def is_valid_header(name: bytes, value: bytes) -> bool:
    """Return whether a header can be sent without breaking the response."""
    return _header_name(name) is not None and not _forbidden_in_value(value)


@lru_cache(maxsize=1024)
def _header_name(name: bytes) -> bytes | None:
    return name.lower() if _is_token(name) else None


def declared_length(headers: tuple[tuple[bytes, bytes], ...]) -> bytes | None:
    """Return the Content-Length among the headers, if it is a number."""
    for name, value in headers:
        if name.lower() == b"content-length" and value.isdigit():
            return value
    return None


# --- Our own ------------------------------------------------------------------------------------


def own_reply(
    request: Request, content: bytes, kind: bytes, *extra: Header, status: int = 200
) -> Reply:
    """Return a response of our own: content of a kind, which a HEAD does not get."""
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(content)), *extra]
    if request.is_admin:  # no one keeps or guesses at it
        headers += ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
    return Reply(status, headers, b"" if request.head.method == "HEAD" else content)


def json_reply(request: Request, answer: Any, *, is_accepted: bool = False) -> Reply:
    """Return an answer as JSON; ``is_accepted``: goals are still to be waited for."""
    content = to_json(answer, inf_nan_mode="null", bytes_mode="base64", fallback=str)
    return own_reply(request, content, JSON, status=202 if is_accepted else 200)


def reply_for(error: Exception, request: Request) -> Reply:
    """Return the response for what was raised in this worker.

    What should not have happened is logged; the client learns no more than that it did.
    """
    if isinstance(error, GreenroomError):
        failed = FailedAnswer(0, type(error).__name__, str(error), error.retry_after_s)
        return failed_reply(failed, request)
    if isinstance(error, falcon.HTTPError):
        kind, text = type(error).__name__.removeprefix("HTTP"), error.description or error.title
        allowed = dict(error.headers or {}).get("Allow")
        extra = [(b"allow", allowed.encode())] if allowed else []
        return error_reply(error.status_code, kind, str(text or error.status), request, extra)
    if isinstance(error, TimeoutError) and request.is_admin:
        text = f"{error}: send it again, which changes nothing then"
        return error_reply(504, "TimeoutError", text, request)
    _logger.error("request %s failed", request.id, exc_info=error)
    return error_reply(500, "GreenroomError", "Internal Server Error", request)


def failed_reply(answer: FailedAnswer, request: Request) -> Reply:
    """Turn a failure into its row of the HTTP table."""
    error = ERRORS_BY_KIND.get(answer.kind, GreenroomError)
    text = answer.text
    extra: Headers = [*answer.headers]
    if issubclass(error, RouteNotFoundError):
        pages = "Ping /-/routes for available routes"
        if request.is_admin:
            pages = "GET /-/api/v1 has all of them"
        text = f"Path '{request.head.full_path}' not found. {pages}."
    elif issubclass(error, MethodNotAllowedError):
        extra.append((b"allow", ", ".join(answer.allowed).encode("latin-1", "replace")))
    elif issubclass(error, UnauthorizedError):
        extra.append((b"www-authenticate", b'Bearer realm="greenroom"'))
    elif error.http_status == 503:
        seconds = answer.retry_after_s or error.retry_after_s or 1
        extra.append((b"retry-after", b"%d" % max(1, math.ceil(seconds))))
    return error_reply(error.http_status, answer.kind, text, request, extra)


def error_reply(
    status: int, kind: str, text: str, request: Request, extra: Iterable[Header] = ()
) -> Reply:
    """Make an error's response: JSON where the client asks for it, else text.

    The admin API has problem documents (RFC 9457).
    """
    text = text.partition("Traceback (most recent call last)")[0].strip() or kind
    content_type = TEXT
    if request.is_admin:
        content_type = PROBLEM
        urn = f"urn:greenroom:problem:{kind}"
        text = json.dumps({"type": urn, "title": kind, "status": status, "detail": text})
    elif b"application/json" in request.head.named.get(b"accept", b""):
        content_type = JSON
        text = json.dumps({"error": kind, "message": text, "request_id": request.id})
    elif status >= 500:
        text = f"{text}\nRequest ID: {request.id}"
    return own_reply(request, text.encode("utf-8", "replace"), content_type, *extra, status=status)
