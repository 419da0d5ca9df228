"""From a query's answer to an HTTP response: the table of what a client sees, without I/O.

Replies are made here and nowhere else, so nothing that user code returns can break the framing of
the connection, and no traceback leaves the house.
"""

from __future__ import annotations

import json
import logging
import math
import re
from functools import lru_cache

from greenroom.actors.messages.queries import FailedAnswer, HttpAnswer
from greenroom.core.errors import (
    ERRORS_BY_KIND,
    GreenroomError,
    MethodNotAllowedError,
    RouteNotFoundError,
)
from greenroom.http_front.exchange import Exchange, Headers, Reply

_logger = logging.getLogger(__name__)

TEXT = (b"content-type", b"text/plain; charset=utf-8")
JSON = (b"content-type", b"application/json")

# Between us and the client these say how the connection is used, which is not user code's business.
# Content-Length and X-Request-ID are ours to set.
_NOT_PASSED_ON = frozenset(
    {
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
    }
)
WITHOUT_BODY = frozenset({204, 205, 304})

_is_token = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_forbidden_in_value = re.compile(rb"[^\t\x20-\x7e\x80-\xff]").search


class BadHeaderError(Exception):
    """User code returned a header that would break the response; the text names it."""


def reply_to(answer: HttpAnswer | FailedAnswer, exchange: Exchange) -> Reply:
    """Turn the answer to this exchange's query into the response."""
    if isinstance(answer, FailedAnswer):
        return failed_reply(answer, exchange)
    try:
        return _user_reply(answer, exchange.method)
    except BadHeaderError as error:
        return error_reply(500, "UnsupportedResultError", str(error), exchange)


def _user_reply(answer: HttpAnswer, method: str) -> Reply:
    _, status, answer_headers, body = answer
    check_status(status)
    headers = passed_on(answer_headers)
    if status in WITHOUT_BODY:
        if status == 205:  # it has to say that it has none (RFC 9110, 15.3.6)
            headers.append((b"content-length", b"0"))
        return Reply(status, headers, b"")
    length = b"%d" % len(body)
    if method == "HEAD" and not body:
        length = declared_length(answer_headers) or length
    headers.append((b"content-length", length))
    return Reply(status, headers, body)


def check_status(status: int) -> None:
    """Raise BadHeaderError for a status that is none of a response's."""
    if not 200 <= status <= 599:
        raise BadHeaderError(f"user code returned the status {status!r}, expected 200 to 599")


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
    """Tell whether a header can be sent without breaking the response."""
    return _header_name(name) is not None and not _forbidden_in_value(value)


@lru_cache(maxsize=1024)
def _header_name(name: bytes) -> bytes | None:
    return name.lower() if _is_token(name) else None


def declared_length(headers: tuple[tuple[bytes, bytes], ...]) -> bytes | None:
    """Return the Content-Length that user code declares, if it is one."""
    for name, value in headers:
        if name.lower() == b"content-length" and value.isdigit():
            return value
    return None


def failure_of(error: GreenroomError) -> FailedAnswer:
    """Return an error that was raised here as if it had come as the answer."""
    return FailedAnswer(0, type(error).__name__, str(error), error.retry_after_s)


def failed_reply(answer: FailedAnswer, exchange: Exchange) -> Reply:
    """Turn a failure into its row of the HTTP table."""
    error = ERRORS_BY_KIND.get(answer.kind, GreenroomError)
    text = answer.text
    extra: Headers = []
    if issubclass(error, RouteNotFoundError):
        text = f"Path '{exchange.full_path}' not found. Ping /-/routes for available routes."
    elif issubclass(error, MethodNotAllowedError):
        extra.append((b"allow", ", ".join(answer.allowed).encode("latin-1", "replace")))
    elif error.http_status == 503:
        extra.append(retry_after(answer.retry_after_s or error.retry_after_s))
    return error_reply(error.http_status, answer.kind, text, exchange, extra)


def retry_after(seconds: float | None) -> tuple[bytes, bytes]:
    """Return a Retry-After header: whole seconds, at least one."""
    return b"retry-after", b"%d" % max(1, math.ceil(seconds or 1))


def unexpected(exchange: Exchange, error: Exception) -> Reply:
    """Log what should not have happened; the client is told no more than that it did."""
    _logger.error("request %s failed", exchange.request_id, exc_info=error)
    return error_reply(500, "GreenroomError", "Internal Server Error", exchange)


def error_reply(
    status: int, kind: str, text: str, exchange: Exchange, extra: Headers | None = None
) -> Reply:
    """Make an error's response: JSON where the client asks for it, else text."""
    text = text.partition("Traceback (most recent call last)")[0].strip() or kind
    if b"application/json" in exchange.head.get(b"accept", b""):
        fields = {"error": kind, "message": text, "request_id": exchange.request_id}
        return _whole(status, JSON, json.dumps(fields), extra)
    if status >= 500:
        text = f"{text}\nRequest ID: {exchange.request_id}"
    return _whole(status, TEXT, text, extra)


def _whole(status: int, kind: tuple[bytes, bytes], text: str, extra: Headers | None) -> Reply:
    body = text.encode("utf-8", "replace")
    headers = [kind, (b"content-length", b"%d" % len(body)), *(extra or ())]
    return Reply(status, headers, body)
