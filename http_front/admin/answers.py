"""How the admin API's resources answer: JSON, and problems.

Problems are documents of RFC 9457, with the texts that a Python client gets.
"""

from __future__ import annotations

from typing import Any

import falcon.asgi
from pydantic_core import to_json

from greenroom.core.errors import GreenroomError, NotRunningError, UnauthorizedError
from greenroom.http_front.request import REQUEST_KEY, Request

RETRY_AFTER_S = 5
PROBLEM = "application/problem+json"


def asked(req: Any) -> Request:
    """Return the request that Falcon's stands for, which would log and decode what is not ours."""
    request: Request = req.scope[REQUEST_KEY]
    return request


async def body_of(request: Request, max_bytes: int) -> bytes:
    """Return a request's body; BodyTooLargeError where it has more than ``max_bytes``."""
    return b"" if request.body is None else await request.body.whole(max_bytes)


def write(resp: falcon.asgi.Response, answer: Any, *, is_accepted: bool = False) -> None:
    """Answer with JSON; ``is_accepted``: goals are still to be waited for."""
    resp.status = falcon.HTTP_202 if is_accepted else falcon.HTTP_200
    resp.content_type = "application/json"
    resp.data = to_json(answer, inf_nan_mode="null", bytes_mode="base64", fallback=str)


# --- Problems (RFC 9457) --------------------------------------------------------------------------


def write_problem(resp: falcon.asgi.Response, status: int, kind: str, detail: str) -> None:
    """Answer with a problem; a traceback stays here."""
    resp.status = status
    resp.content_type = PROBLEM
    fields = {
        "type": f"urn:greenroom:problem:{kind}",
        "title": kind,
        "status": status,
        "detail": detail.partition("Traceback (most recent call last)")[0].strip() or kind,
    }
    resp.data = to_json(fields)


async def answer_our_error(
    _req: Any, resp: falcon.asgi.Response, error: GreenroomError, _: dict[str, Any]
) -> None:
    """Answer with what was raised, by Falcon's way."""
    write_problem(resp, error.http_status, type(error).__name__, str(error))
    if isinstance(error, UnauthorizedError):
        resp.set_header("www-authenticate", 'Bearer realm="greenroom"')
    if isinstance(error, NotRunningError):
        resp.set_header("retry-after", str(RETRY_AFTER_S))


async def answer_timeout(
    _req: Any, resp: falcon.asgi.Response, error: TimeoutError, _: dict[str, Any]
) -> None:
    """Answer that the controller did not, in time."""
    detail = f"{error}: send it again, which changes nothing then"
    write_problem(resp, 504, "TimeoutError", detail)


def serialize(_req: Any, resp: Any, error: falcon.HTTPError) -> None:
    """Give Falcon's own errors, 404 and 405, the same form."""
    text = error.description or error.title or str(error.status)
    write_problem(resp, error.status_code, type(error).__name__.removeprefix("HTTP"), text)
