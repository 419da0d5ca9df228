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
    HTTPOptions,
    LoggingConfig,
    MiddlewareOptions,
)

__all__ = [
    "ActorOptions",
    "AutoscalingConfig",
    "AutoscalingContext",
    "AutoscalingPolicy",
    "BackendConfig",
    "CorsOptions",
    "HTTPOptions",
    "LoggingConfig",
    "MiddlewareOptions",
    "QueueLengthPolicy",
]
