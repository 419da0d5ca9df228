"""What the client of an app of ours reads about an error."""

from __future__ import annotations

import logging
import math

from starlette.exceptions import HTTPException

from greenroom.actors.replica import context as user_context, logging as user_logging
from greenroom.core.errors import PASSED_ON, GreenroomError, MethodNotAllowedError


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
        logging.getLogger(user_logging.OURS).error("a request failed", exc_info=error)
