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
    HTTPOptions,
    LoggingConfig,
    MiddlewareOptions,
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
    "HTTPOptions",
    "LoggingConfig",
    "MiddlewareOptions",
    "QueueLengthPolicy",
    "SessionAffinity",
]

if not TYPE_CHECKING:  # names of Ray Serve
    __getattr__ = absent.names_of(__name__)
