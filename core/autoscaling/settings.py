"""The settings of autoscaling, under the names that Ray Serve uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from greenroom.core.validation import (
    IN_ANY_CASE,
    Settings,
    UserCode,
    explain_missing,
    jsonable,
    names_code,
)

MAX_REPLICAS = 10_000
ONGOING_REQUESTS = "ongoing_requests"


class AutoscalingPolicy(UserCode):
    """What turns a load into a number of replicas.

    ``policy_function`` is "ongoing_requests", "queue_length", or a function of yours or its import
    path; ``policy_kwargs`` are its keyword arguments. A function runs in a process of its own,
    and has ``timeout_s`` seconds to answer.
    """

    aliases: ClassVar[Mapping[str, str]] = {"name": "policy_function"}

    policy_function: str | Callable[..., Any] = ONGOING_REQUESTS
    policy_kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = Field(default=1.0, gt=0, le=60)

    @field_validator("policy_function", mode="before")
    @classmethod
    def _names_a_function(cls, value: Any) -> Any:
        built_in = (ONGOING_REQUESTS, *NAMED)
        if value not in built_in and not names_code(value):
            names = ", ".join(map(repr, built_in))
            raise ValueError(
                f"must be {names}, a function, or the import path of one, such as "
                "'my_module:my_policy'"
            )
        return value

    @field_validator("policy_kwargs")
    @classmethod
    def _fit_the_function(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        function = info.data.get("policy_function")
        if value and function == ONGOING_REQUESTS:
            raise ValueError(f"{ONGOING_REQUESTS!r} takes none; its settings are those around it")
        if (named := _named(function)) is not None:
            try:
                check_arguments(named, value)
            except TypeError as error:
                raise ValueError(str(error)) from None
        return dict(jsonable(value))

    @property
    def is_custom(self) -> bool:
        """Whether it is a function, in a process of its own."""
        return self.policy_function != ONGOING_REQUESTS

    @property
    def named(self) -> Callable[..., Any] | None:
        """The function of ours that it names; None where its code has to come with it."""
        return _named(self.policy_function)

    def __str__(self) -> str:
        function = self.policy_function
        return function if isinstance(function, str) else getattr(function, "__name__", "function")


class AutoscalingConfig(Settings):
    """Bounds, aim and speed of autoscaling; see docs/autoscaling.md for what each does."""

    aliases: ClassVar[Mapping[str, str]] = {
        "upscale_smoothing_factor": "upscaling_factor",
        "downscale_smoothing_factor": "downscaling_factor",
        "target_num_ongoing_requests_per_replica": "target_ongoing_requests",
    }
    hints: ClassVar[Mapping[str, str]] = {
        "smoothing_factor": "give upscaling_factor and downscaling_factor",
        "prometheus_metrics": "leave it out: give a policy of your own that asks for them",
    }

    min_replicas: int = Field(default=1, ge=0, le=MAX_REPLICAS)
    max_replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS, validate_default=True)
    initial_replicas: int | None = Field(default=None, ge=0, le=MAX_REPLICAS)
    target_ongoing_requests: float = Field(default=2, gt=0)
    look_back_period_s: float = Field(default=30, gt=0, le=86400)
    upscaling_factor: float | None = Field(default=None, gt=0)
    downscaling_factor: float | None = Field(default=None, gt=0)
    upscale_delay_s: float = Field(default=30, ge=0)
    downscale_delay_s: float = Field(default=600, ge=0)
    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)
    policy: AutoscalingPolicy = Field(default_factory=AutoscalingPolicy)
    aggregation_function: Annotated[Literal["mean", "max", "min"], IN_ANY_CASE] = "mean"
    metrics_interval_s: float = Field(
        default=10, gt=0, description="without effect: load is reported every second"
    )

    @field_validator("max_replicas")
    @classmethod
    def _is_not_below_min(cls, value: int, info: ValidationInfo) -> int:
        least = info.data.get("min_replicas")
        if least is not None and value < least:
            raise ValueError(f"must not be below min_replicas, which is {least}")
        return value

    @field_validator("initial_replicas")
    @classmethod
    def _is_within_bounds(cls, value: int | None, info: ValidationInfo) -> int | None:
        least, most = info.data.get("min_replicas"), info.data.get("max_replicas")
        if None not in (value, least, most) and not least <= value <= most:  # type: ignore[operator]
            raise ValueError(
                f"must be from min_replicas to max_replicas, which are {least} and {most}"
            )
        return value

    @field_validator("policy", mode="before")
    @classmethod
    def _may_be_just_the_function(cls, value: Any) -> Any:
        if value is None or isinstance(value, AutoscalingPolicy | Mapping):
            return value or AutoscalingPolicy()
        return {"policy_function": value}

    def bounded(self, replicas: int) -> int:
        """Return the number of replicas within the bounds that is nearest to ``replicas``."""
        return max(self.min_replicas, min(self.max_replicas, replicas))

    def first_target(self, before: AutoscalingConfig | None, current: int) -> int:
        """Return the target when a backend gets this config; ``current`` is how many it had.

        A scale that there is stays, as far as the bounds allow. initial_replicas counts where there
        is none, and where it was itself changed.
        """
        initial = self.initial_replicas
        if initial is not None and (before is None or before.initial_replicas != initial):
            return initial
        return self.bounded(current)


AUTO: Mapping[str, Any] = {  # what num_replicas="auto" means
    "min_replicas": 1,
    "max_replicas": 100,
    "target_ongoing_requests": 2,
}


@dataclass(frozen=True, kw_only=True)
class AutoscalingContext:
    """The argument of a user's policy, under the names that Ray Serve uses.

    A policy returns how many replicas it wants, which need not be a whole number, or that and a
    JSON-able state, which is in the next context. The state is forgotten when the controller
    restarts.
    """

    backend: str
    deployment_name: str
    app_name: str
    current_num_replicas: int  # that run
    target_num_replicas: int
    total_num_requests: float  # queued and running, aggregated over look_back_period_s
    total_queued_requests: int  # now
    total_running_requests: int  # now
    queued_by_router: list[int]  # now
    capacity_adjusted_min_replicas: int  # the bounds, to which the answer is clipped
    capacity_adjusted_max_replicas: int
    current_time: float  # seconds since the epoch
    # By what record_autoscaling_stats calls it, and by replica; only of those that returned some.
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    running_replicas: list[str] = field(default_factory=list)
    config: Any  # an object with the fields of AutoscalingConfig
    policy_state: Any = field(default_factory=dict)

    hints: ClassVar[Mapping[str, str]] = {
        "deployment_id": "use deployment_name and app_name",
        "last_scale_down_time": "keep it in the state that you return",
        "last_scale_up_time": "keep it in the state that you return",
        "raw_metrics": "keep what aggregated_metrics has had in the state that you return",
    }
    if not TYPE_CHECKING:
        __getattr__ = explain_missing


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


NAMED: dict[str, Callable[..., Any]] = {"queue_length": queue_length}  # else by import path


def _named(function: object) -> Callable[..., Any] | None:
    return NAMED.get(function) if isinstance(function, str) else None


def check_arguments(policy: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError where a policy does not take these; what is written in C may take any."""
    try:
        signature = inspect.signature(policy)
    except ValueError:
        return
    signature.bind(None, **kwargs)
