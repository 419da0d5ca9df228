"""The errors that users catch; all are kinds of :class:`GreenroomError`."""

from greenroom.core.errors import (
    BackPressureError as BackPressureError,
    ConflictError as ConflictError,
    DeployFailedError as DeployFailedError,
    DeploymentUnavailableError as DeploymentUnavailableError,
    GreenroomError as GreenroomError,
    GrpcStatusError as GrpcStatusError,
    InvalidRequestError as InvalidRequestError,
    JobsTooLargeError as JobsTooLargeError,
    NotRunningError as NotRunningError,
    OtherJobError as OtherJobError,
    QueryTimeoutError as QueryTimeoutError,
    ReplicaUnavailableError as ReplicaUnavailableError,
    RequestCancelledError as RequestCancelledError,
    StartError as StartError,
    StateNotReadableError as StateNotReadableError,
    StateNotSavedError as StateNotSavedError,
    TooManyJobsError as TooManyJobsError,
    UnknownNameError as UnknownNameError,
    UnsupportedResultError as UnsupportedResultError,
    UserCodeError as UserCodeError,
)

RayServeException = GreenroomError
gRPCStatusError = GrpcStatusError  # noqa: N816  # Ray Serve's name
