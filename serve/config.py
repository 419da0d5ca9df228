"""The settings that users write down, under the names Ray Serve's users know."""

from typing import TYPE_CHECKING

from greenroom.core.autoscaling.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    QueueLengthPolicy,
)
from greenroom.core.config import (
    ActorOptions,
    BackendConfig,
    CorsOptions,
    GrpcOptions,
    HTTPOptions,
    LoggingConfig,
    MiddlewareOptions,
    RequestRouterConfig,
    SessionAffinity,
)
from greenroom.serve import absent

__all__ = [
    "ActorOptions",
    "AutoscalingConfig",
    "AutoscalingContext",
    "AutoscalingPolicy",
    "BackendConfig",
    "CorsOptions",
    "GrpcOptions",
    "HTTPOptions",
    "LoggingConfig",
    "MiddlewareOptions",
    "QueueLengthPolicy",
    "RequestRouterConfig",
    "SessionAffinity",
    "gRPCOptions",
]

gRPCOptions = GrpcOptions  # noqa: N816  # Ray Serve's name

if not TYPE_CHECKING:  # names of Ray Serve
    __getattr__ = absent.names_of(__name__)
