"""The settings that users write down, under the names Ray Serve's users know."""

from greenroom.core.autoscaling.settings import (
    AutoscalingConfig as AutoscalingConfig,
    AutoscalingContext as AutoscalingContext,
    AutoscalingPolicy as AutoscalingPolicy,
)
from greenroom.core.config import (
    ActorOptions as ActorOptions,
    BackendConfig as BackendConfig,
    CorsOptions as CorsOptions,
    GrpcOptions as GrpcOptions,
    HTTPOptions as HTTPOptions,
    LoggingConfig as LoggingConfig,
    MiddlewareOptions as MiddlewareOptions,
    RequestRouterConfig as RequestRouterConfig,
    SessionAffinity as SessionAffinity,
)

gRPCOptions = GrpcOptions  # noqa: N816  # Ray Serve's name
