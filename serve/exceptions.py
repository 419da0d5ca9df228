"""The errors that users catch; all are kinds of :class:`GreenroomError`."""

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
