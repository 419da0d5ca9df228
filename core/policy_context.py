"""What an autoscaling policy of the user's is asked with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AutoscalingContext:
    """The load of one backend and what it has, under the names that Ray Serve's users know.

    A policy returns how many replicas it wants, which need not be a whole number, or that and a
    JSON-able state, which is in the next context. The state is forgotten when the controller
    restarts.
    """

    backend: str
    deployment_name: str
    app_name: str
    current_num_replicas: int  # that run
    target_num_replicas: int
    total_num_requests: float  # queued and running, averaged over look_back_period_s
    total_queued_requests: int  # now
    total_running_requests: int  # now
    queued_by_router: list[int]  # now
    capacity_adjusted_min_replicas: int  # the bounds, to which the answer is clipped
    capacity_adjusted_max_replicas: int
    current_time: float  # seconds since the epoch
    config: Any  # an object with the fields of AutoscalingConfig
    policy_state: Any = field(default_factory=dict)
