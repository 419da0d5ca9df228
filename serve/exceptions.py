"""The errors that users catch; all are kinds of :class:`GreenroomError`."""

from greenroom.core.errors import (
    BackPressureError,
    ConflictError,
    DeployFailedError,
    DeploymentUnavailableError,
    GreenroomError,
    InvalidRequestError,
    NotRunningError,
    QueryTimeoutError,
    ReplicaUnavailableError,
    RequestCancelledError,
    StartError,
    StateNotSavedError,
    UnknownNameError,
    UnsupportedResultError,
    UserCodeError,
)

RayServeException = GreenroomError

__all__ = [
    "BackPressureError",
    "ConflictError",
    "DeployFailedError",
    "DeploymentUnavailableError",
    "GreenroomError",
    "InvalidRequestError",
    "NotRunningError",
    "QueryTimeoutError",
    "RayServeException",
    "ReplicaUnavailableError",
    "RequestCancelledError",
    "StartError",
    "StateNotSavedError",
    "UnknownNameError",
    "UnsupportedResultError",
    "UserCodeError",
]
