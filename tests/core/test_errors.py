"""Errors travel by name, with a status and a hint when to try again."""

import pickle

import pytest

from greenroom.core import errors

STATUSES = {
    "GreenroomError": 500,
    "NotRunningError": 503,
    "StartError": 500,
    "DeployFailedError": 422,
    "UnusableCodeError": 422,
    "StateNotSavedError": 507,
    "StateNotReadableError": 503,
    "UnknownNameError": 404,
    "ConflictError": 409,
    "InvalidRequestError": 400,
    "UnauthorizedError": 401,
    "ForbiddenError": 403,
    "BodyTooLargeError": 413,
    "BodyIncompleteError": 408,
    "RouteNotFoundError": 404,
    "MethodNotAllowedError": 405,
    "BackPressureError": 503,
    "NotBegunError": 503,
    "DeploymentUnavailableError": 503,
    "ReplicaUnavailableError": 503,
    "RequestCancelledError": 499,
    "TooManyJobsError": 429,
    "JobsTooLargeError": 507,
    "OtherJobError": 422,
    "QueryTimeoutError": 408,
    "UserCodeError": 500,
    "GrpcStatusError": 500,
    "UnsupportedResultError": 500,
}


def subclasses(kind: type) -> set[type]:
    return {kind} | {each for sub in kind.__subclasses__() for each in subclasses(sub)}


def test_every_error_of_the_core_travels_by_its_name() -> None:
    ours = {
        e.__name__ for e in subclasses(errors.GreenroomError) if e.__module__ == errors.__name__
    }
    assert ours == set(STATUSES) == set(errors.ERRORS_BY_KIND)


@pytest.mark.parametrize(("kind", "http_status"), STATUSES.items())
def test_an_error_is_made_again_from_its_kind_and_text(kind: str, http_status: int) -> None:
    text = "NOT_FOUND: what, why" if kind == "GrpcStatusError" else "what, why"
    error = errors.error_from(kind, text)
    assert type(error).__name__ == kind
    assert str(error) == text
    assert error.http_status == errors.error_status(kind) == http_status
    assert str(pickle.loads(pickle.dumps(error))) == text


def test_an_unknown_kind_of_error_is_the_root() -> None:
    assert type(errors.error_from("NewerError", "text")) is errors.GreenroomError
    assert errors.error_status("NewerError") == 500


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        ("UnknownNameError", KeyError),
        ("ConflictError", ValueError),
        ("InvalidRequestError", ValueError),
        ("QueryTimeoutError", TimeoutError),
        ("UnsupportedResultError", TypeError),
    ],
)
def test_errors_are_pythons_own_where_a_caller_expects_those(kind: str, builtin: type) -> None:
    assert isinstance(errors.error_from(kind, ""), builtin)


def test_errors_say_when_trying_again_helps() -> None:
    hints = {k: e.retry_after_s for k, e in errors.ERRORS_BY_KIND.items() if e.retry_after_s}
    assert hints == {
        "BackPressureError": 1.0,
        "DeploymentUnavailableError": 5.0,
        "JobsTooLargeError": 30.0,
        "NotBegunError": 1.0,
        "ReplicaUnavailableError": 1.0,
        "TooManyJobsError": 5.0,
    }
