"""Autoscaling settings on their way to the controller: a policy of the user's travels as bytes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from greenroom.core.config import BackendConfig
from greenroom.core.errors import InvalidRequestError
from greenroom.core.scaling_config import AutoscalingPolicy
from greenroom.serve.packing import pack_code


def packed(what: str, config: BackendConfig) -> dict[str, Any]:
    """Return all fields of a config as plain values; ``what`` names its owner in errors."""
    return _with_code(what, config, config.model_dump())


def packed_changes(what: str, config: BackendConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that ``config`` gives, validated, and no others."""
    if isinstance(config, BackendConfig):
        return _with_code(what, config, config.model_dump(exclude_unset=True))
    made = BackendConfig().updated(config)
    values = made.model_dump()
    names = {"autoscaling_config" if config[n] == "auto" else n for n in config}
    return _with_code(what, made, {name: values[name] for name in names})


def _with_code(what: str, config: BackendConfig, values: dict[str, Any]) -> dict[str, Any]:
    scaling = config.autoscaling_config
    if scaling is None or not scaling.policy.is_custom or scaling.policy.code:
        return values
    packed_policy = _packed_policy(what, scaling.policy).model_dump()
    return {**values, "autoscaling_config": {**scaling.model_dump(), "policy": packed_policy}}


def _packed_policy(what: str, policy: AutoscalingPolicy) -> AutoscalingPolicy:
    function = policy.policy_function
    if isinstance(function, str):
        function = _imported(what, function)
    code = pack_code(f"the autoscaling policy of {what}", function, (), {}, None)
    name = f"{function.__module__}.{getattr(function, '__qualname__', function.__name__)}"
    return policy.model_copy(
        update={"policy_function": name, "code": code.pickled, "code_hash": code.hash}
    )


def _imported(what: str, path: str) -> Callable[..., Any]:
    told = f"the autoscaling policy of {what}: policy_function={path!r}"
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(f"{told} cannot be imported: {error}") from error
    if not callable(function) or not hasattr(function, "__name__"):
        raise InvalidRequestError(f"{told} is no function")
    return function  # type: ignore[no-any-return]
