"""Every error that Greenroom raises on purpose, in one tree.

A subclass exists where a catcher would act differently. Each carries the HTTP status that the front
answers with, and ``retry_after_s`` where trying again later can help. ``kind`` names the class in
messages between processes, where exceptions themselves do not travel reliably.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

GRPC_STATUSES = (
    *("CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND"),
    *("ALREADY_EXISTS", "PERMISSION_DENIED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED"),
    *("FAILED_PRECONDITION", "ABORTED", "UNIMPLEMENTED", "OUT_OF_RANGE", "INTERNAL"),
    *("UNAVAILABLE", "DATA_LOSS"),
)


class GreenroomError(Exception):
    """Root of all errors of Greenroom's own; user code's exceptions keep their own types."""

    http_status: ClassVar[int] = 500
    retry_after_s: float | None = None

    @property
    def message(self) -> str:
        """The text, under the name that Ray Serve has for it."""
        return str(self)

    @property
    def status_code(self) -> int:
        """``http_status``, under the name that Ray Serve has for it."""
        return self.http_status


class IllegalTransitionError(RuntimeError):
    """What the table of a state machine does not have: a bug in the caller."""


class NotRunningError(GreenroomError):
    """No actor system answers at the address; start one with ``greenroom start``."""

    http_status = 503


class UnauthorizedError(GreenroomError):
    """A request to the HTTP API without a token that is in force."""

    http_status = 401


class ForbiddenError(GreenroomError):
    """A request to the HTTP API that its token's role does not include, or of another site."""

    http_status = 403


class StartError(GreenroomError):
    """This host's system could not be started; the text says why."""


class DeployFailedError(GreenroomError):
    """A deployment could not be brought up; the earlier version, if any, still serves.

    In the controller ``exception`` is user code's own, cloudpickled; at the client it is the cause.
    """

    http_status = 422
    exception: bytes | None = None


class UnusableCodeError(DeployFailedError):
    """The code cannot be loaded or run, and waiting would not change that."""


class StateNotSavedError(GreenroomError):
    """The state dir cannot be written to, so the change was not made; the text says why.

    Free space there, or make it writable, and make the call again. Until then everything serves on.
    """

    http_status = 507


class StateNotReadableError(GreenroomError):
    """The state cannot be read at present, so the question has no answer; the text says why."""

    http_status = 503


class UnknownNameError(GreenroomError, KeyError):
    """A backend, endpoint, deployment, application or goal of that name does not exist."""

    http_status = 404

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show the repr


class ConflictError(GreenroomError, ValueError):
    """The change contradicts what exists; the text names what holds it."""

    http_status = 409


class InvalidRequestError(GreenroomError, ValueError):
    """A value in the call is not allowed; the text names the field, the value and what is."""

    http_status = 400


class BodyTooLargeError(InvalidRequestError):
    """The request's body is over the limit, by its declaration or by what has come."""

    http_status = 413


class BodyIncompleteError(InvalidRequestError):
    """The client left, or fell silent, before the end of the body it had announced."""

    http_status = 408


class RouteNotFoundError(GreenroomError):
    """No endpoint has a route that covers the path."""

    http_status = 404


class MethodNotAllowedError(GreenroomError):
    """The endpoint does not take this HTTP method; ``allowed`` lists those it does."""

    http_status = 405

    def __init__(self, text: str, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.allowed = allowed


class BackPressureError(GreenroomError):
    """The endpoint's queue is at its limit; the query was not run."""

    http_status = 503
    retry_after_s = 1.0


class NotBegunError(GreenroomError):
    """A replica's code has done nothing for the query, and cannot: another replica is to run it."""

    http_status = 503
    retry_after_s = 1.0


class DeploymentUnavailableError(GreenroomError):
    """The deployment has no replica and none is on its way."""

    http_status = 503
    retry_after_s = 5.0


class ReplicaUnavailableError(GreenroomError):
    """The replica or proxy died with the query under way, and it may not be repeated."""

    http_status = 503
    retry_after_s = 1.0


CANCELLED_STATUS = 499  # no client sees it, and no rule for good or bad counts it


class RequestCancelledError(GreenroomError):
    """The query was cancelled by the caller, or the caller's client went away."""

    http_status = CANCELLED_STATUS


class TooManyJobsError(GreenroomError):
    """A task queue has as many jobs as it may have: wait, or raise its ``max_jobs``."""

    http_status = 429
    retry_after_s = 5.0


class JobsTooLargeError(GreenroomError):
    """A task queue's jobs and results are as large as they may be: wait, or raise the limit."""

    http_status = 507
    retry_after_s = 30.0


class OtherJobError(ConflictError):
    """An idempotency key was given with another call before: take another key."""

    http_status = 422


class QueryTimeoutError(GreenroomError, TimeoutError):
    """The query was not answered within its request timeout."""

    http_status = 408


class UserCodeError(GreenroomError):
    """User code raised, and its exception could not be unpickled here; the text shows it."""


class GrpcStatusError(GreenroomError):
    """What user code raises to answer an RPC with a status of its own, such as "NOT_FOUND".

    HTTP shows it as 500. ValueError for what is no name of a status.
    """

    def __init__(self, code: str, details: str | None = None) -> None:
        if details is None:  # as it comes from another process
            code, _, details = code.partition(": ")
        if code not in GRPC_STATUSES:
            raise ValueError(f"code={code!r}: must be one of {', '.join(GRPC_STATUSES)}")
        super().__init__(f"{code}: {details}")


class UnsupportedResultError(GreenroomError, TypeError):
    """User code returned a type that cannot be turned into an HTTP response."""


# Errors of a call made for a request, or of the request's body, that a client is told of where the
# handler lets them through. Any other error is a mistake of the handler's.
PASSED_ON = (
    BodyTooLargeError,
    BodyIncompleteError,
    BackPressureError,
    NotBegunError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
    QueryTimeoutError,
    UnsupportedResultError,
)


def _kinds_of(error: type[GreenroomError]) -> Iterator[type[GreenroomError]]:
    yield error
    for each in error.__subclasses__():
        yield from _kinds_of(each)


ERRORS_BY_KIND = {error.__name__: error for error in _kinds_of(GreenroomError)}


def error_from(kind: str, text: str) -> GreenroomError:
    """Make the error that another process described by ``kind`` and ``text``."""
    return ERRORS_BY_KIND.get(kind, GreenroomError)(text)


def error_status(kind: str) -> int:
    """Return the HTTP status for a kind of error."""
    return ERRORS_BY_KIND.get(kind, GreenroomError).http_status


def last_line(error: str) -> str:
    """Return what a text with a traceback says: its last line."""
    return error.strip().rpartition("\n")[2]
