"""The settings that users write down, under the names Ray Serve's users know."""

from greenroom.core.config import (
    ActorOptions,
    BackendConfig,
    CorsOptions,
    HTTPOptions,
    LoggingConfig,
    MiddlewareOptions,
)
from greenroom.core.policy_context import AutoscalingContext
from greenroom.core.scaling_config import AutoscalingConfig, AutoscalingPolicy, QueueLengthPolicy

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
