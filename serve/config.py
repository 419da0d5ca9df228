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


def queue_length(
    context: AutoscalingContext,
    *,
    scale_up_threshold: float = 5,
    scale_down_threshold: float = 1,
    scale_up_num_replicas: int = 2,
    scale_down_num_replicas: int = 1,
) -> int:
    """Return how many replicas the queries that wait ask for, as Ray Serve did before 1.0.

    More where routers queue more than ``scale_up_threshold`` queries each, on average, and fewer
    where they queue fewer than ``scale_down_threshold``.
    """
    length = sum(context.queued_by_router) / max(len(context.queued_by_router), 1)
    if length > scale_up_threshold:
        return context.target_num_replicas + scale_up_num_replicas
    if length < scale_down_threshold:
        return max(context.target_num_replicas - scale_down_num_replicas, 0)
    return context.target_num_replicas
