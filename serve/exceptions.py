"""The errors that users catch; all are kinds of :class:`GreenroomError`."""

from typing import TYPE_CHECKING

from greenroom.core.errors import (
    BackPressureError,
    ConflictError,
    DeployFailedError,
    DeploymentUnavailableError,
    GreenroomError,
    GrpcStatusError,
    InvalidRequestError,
    JobsTooLargeError,
    NotRunningError,
    OtherJobError,
    QueryTimeoutError,
    ReplicaUnavailableError,
    RequestCancelledError,
    StartError,
    StateNotReadableError,
    StateNotSavedError,
    TooManyJobsError,
    UnknownNameError,
    UnsupportedResultError,
    UserCodeError,
)
from greenroom.serve import absent

RayServeException = GreenroomError
gRPCStatusError = GrpcStatusError  # noqa: N816  # Ray Serve's name

__all__ = [
    "BackPressureError",
    "ConflictError",
    "DeployFailedError",
    "DeploymentUnavailableError",
    "GreenroomError",
    "GrpcStatusError",
    "InvalidRequestError",
    "JobsTooLargeError",
    "NotRunningError",
    "OtherJobError",
    "QueryTimeoutError",
    "RayServeException",
    "ReplicaUnavailableError",
    "RequestCancelledError",
    "StartError",
    "StateNotReadableError",
    "StateNotSavedError",
    "TooManyJobsError",
    "UnknownNameError",
    "UnsupportedResultError",
    "UserCodeError",
    "gRPCStatusError",
]

if not TYPE_CHECKING:  # names of Ray Serve
    __getattr__ = absent.names_of(__name__)
