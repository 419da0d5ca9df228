"""The errors that users catch; all are kinds of :class:`UnderstudyError`."""

from understudy.core.errors import (
    BackPressureError,
    ConflictError,
    DeployFailedError,
    DeploymentUnavailableError,
    InvalidRequestError,
    NotRunningError,
    QueryTimeoutError,
    ReplicaUnavailableError,
    RequestCancelledError,
    StartError,
    StateNotSavedError,
    UnderstudyError,
    UnknownNameError,
    UnsupportedResultError,
    UserCodeError,
)

RayServeException = UnderstudyError

__all__ = [
    "BackPressureError",
    "ConflictError",
    "DeployFailedError",
    "DeploymentUnavailableError",
    "InvalidRequestError",
    "NotRunningError",
    "QueryTimeoutError",
    "RayServeException",
    "ReplicaUnavailableError",
    "RequestCancelledError",
    "StartError",
    "StateNotSavedError",
    "UnderstudyError",
    "UnknownNameError",
    "UnsupportedResultError",
    "UserCodeError",
]
