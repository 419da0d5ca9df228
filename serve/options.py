"""The options of a deployment, read from keyword arguments; all bad ones are named in one error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from typing_extensions import TypedDict

from greenroom.core.config import ActorOptions, BackendConfig, LoggingConfig
from greenroom.core.errors import InvalidRequestError
from greenroom.core.names import wrong_with
from greenroom.core.scaling_config import AutoscalingConfig
from greenroom.core.validation import problems_in

M = TypeVar("M", bound=BaseModel)

_OWN = ("name", "version", "actor_options", "ray_actor_options")
_CLOSE = 0.8  # a slip of the pen; what is less alike is another word
_KNOWN = frozenset({*BackendConfig.model_fields, *_OWN})
_HINTS = {
    "route_prefix": "give it to serve.run(app, route_prefix=...)",
    # Ray Serve's, of today and of once
    "max_concurrent_queries": "it is called max_ongoing_requests",
    "max_replicas_per_node": "it is called max_replicas_per_host",
    "placement_group_bundles": "a replica is one process; say what it takes in actor_options",
    "placement_group_strategy": "a replica is one process; say what it takes in actor_options",
    "request_router_config": "queries go to the replica with the fewest",
}


class GivenOptions(TypedDict, total=False):
    """The options that a user may give, for type checkers."""

    name: str
    version: str | None
    num_replicas: int | Literal["auto"] | None
    autoscaling_config: AutoscalingConfig | Mapping[str, Any] | None
    user_config: Any
    max_ongoing_requests: int
    max_queued_requests: int
    request_timeout_s: float | None
    retryable: bool | None
    health_check_period_s: float
    health_check_timeout_s: float
    graceful_shutdown_timeout_s: float
    graceful_shutdown_wait_loop_s: float
    max_constructor_retry_count: int
    constructor_timeout_s: float
    logging_config: LoggingConfig | Mapping[str, Any] | None
    max_replicas_per_host: int | None
    allow_method_header: bool
    actor_options: ActorOptions | Mapping[str, Any] | None
    ray_actor_options: ActorOptions | Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class DeploymentOptions:
    """What a deployment is called and how it is run."""

    name: str
    version: str | None = None
    config: BackendConfig = field(default_factory=BackendConfig)
    actor_options: ActorOptions = field(default_factory=ActorOptions)


def read_options(base: DeploymentOptions, given: Mapping[str, Any]) -> DeploymentOptions:
    """Return ``base`` with ``given`` options; raise an InvalidRequestError naming each bad one."""
    problems = [*_unknown(given), *_bad_names(given), *_bad_scaling(given)]
    actor_options, actor_problems = _read_actor_options(base.actor_options, given)
    config, config_problems = _read_config(base.config, given)
    problems += [*actor_problems, *config_problems]
    if problems:
        name = given.get("name", base.name)
        raise InvalidRequestError(f"bad options of deployment {name!r}: " + "; ".join(problems))
    return DeploymentOptions(
        name=given.get("name", base.name),
        version=given.get("version", base.version),
        config=config,
        actor_options=actor_options,
    )


def name_problem(what: str, name: object) -> str | None:
    """Say what is wrong with a deployment's or application's name, or None."""
    if not isinstance(name, str) or not name:
        return f"{what}={name!r}: must be a non-empty string"
    if "#" in name:
        return f"{what}={name!r}: must not contain '#', which separates application and deployment"
    wrong = wrong_with(name)
    return f"{what}={name!r}: {wrong}" if wrong else None


def _unknown(given: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in given:
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=_CLOSE)
            hint = _HINTS.get(name) or (f"did you mean {near[0]}?" if near else "")
            problems.append(f"{name}: no such option" + (f"; {hint}" if hint else ""))
    return problems


def _bad_names(given: Mapping[str, Any]) -> list[str]:
    problems = []
    if "name" in given and (problem := name_problem("name", given["name"])):
        problems.append(problem)
    version = given.get("version")
    if version is not None and not isinstance(version, str):
        problems.append(f"version={version!r}: must be a string")
    return problems


def _bad_scaling(given: Mapping[str, Any]) -> list[str]:
    if given.get("num_replicas") != 0:
        return []
    hint = "to have none when idle, set min_replicas=0 in autoscaling_config; else delete it"
    return [f"num_replicas=0: must be at least 1; {hint}"]


def _read_actor_options(
    base: ActorOptions, given: Mapping[str, Any]
) -> tuple[ActorOptions, list[str]]:
    names = [name for name in ("actor_options", "ray_actor_options") if name in given]
    if not names:
        return base, []
    if len(names) == 2:
        return base, ["actor_options and ray_actor_options are two names for one thing; give one"]
    value = given[names[0]]
    if value is None:
        return ActorOptions(), []
    if isinstance(value, ActorOptions):
        return value, []
    if not isinstance(value, Mapping):
        return base, [f"{names[0]}={value!r}: must be a dict"]
    return _made(base, value, names[0] + ".")


def _read_config(base: BackendConfig, given: Mapping[str, Any]) -> tuple[BackendConfig, list[str]]:
    changes = {name: value for name, value in given.items() if name in BackendConfig.model_fields}
    if changes.get("num_replicas", 1) == 0:
        del changes["num_replicas"]  # _bad_scaling has told, and better
    return _made(base, base.merged(changes), "")


def _made(base: M, values: Mapping[str, Any], prefix: str) -> tuple[M, list[str]]:
    try:
        return type(base)(**values), []
    except ValidationError as error:
        return base, problems_in(error, prefix)
