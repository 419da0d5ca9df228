"""The settings that users write down, under the names Ray Serve's users know."""

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
