"""What callers give to the functions of serve: the parameter and the value are in every refusal."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from greenroom.actors.replica.servable import ASGI_APP, http_methods
from greenroom.core.errors import InvalidRequestError
from greenroom.core.validation import Settings, is_number, validated

PUBLIC_NAMES = {"GrpcOptions": "gRPCOptions"}
HINTS = {
    # Ray Serve's, of today and of once
    "route_prefix": "it is an application's",
    "rolling_update_percentage": "it is called max_surge_percent, in percent",
    "backpressure_config": "leave it out: what max_queued_requests refuses gets 503",
    "gang_scheduling_config": "replicas have ranks: serve.get_replica_context().rank",
    "deployment_actors": "give it a deployment with one replica by bind",
    "placement_group_bundle_label_selector": "give actor_options a label_selector",
    "placement_group_fallback_strategy": "give actor_options a label_selector",
    "placement_group_bundles": "a replica is one process; say what it takes in actor_options",
    "placement_group_strategy": "a replica is one process; say what it takes in actor_options",
}
S = TypeVar("S", bound=Settings)


def check_name(parameter: str, name: object) -> None:
    """Raise InvalidRequestError unless it may be the name of something."""
    _expect(isinstance(name, str) and name, parameter, name, "a non-empty string")


def check_text(parameter: str, value: object) -> None:
    """Raise InvalidRequestError unless it is a string, or None."""
    _expect(value is None or isinstance(value, str), parameter, value, "a string, or None")


def check_mapping(parameter: str, value: object) -> None:
    """Raise InvalidRequestError unless it is a dict, or alike."""
    _expect(isinstance(value, Mapping), parameter, value, "a dict")


def settings_of(model: type[S], given: S | Mapping[str, Any] | None, parameter: str = "") -> S:
    """Return settings that are given as such, as a dict, or not at all."""
    if isinstance(given, model):
        return given
    values = {} if given is None else given
    name = PUBLIC_NAMES.get(model.__name__, model.__name__)
    _expect(isinstance(values, Mapping), parameter or name, given, f"{name} or a dict")
    return validated(model, values)  # type: ignore[arg-type]  # a dict, as checked


def check_list(parameter: str, value: object) -> None:
    """Raise InvalidRequestError unless it is a list or a tuple."""
    _expect(isinstance(value, list | tuple), parameter, value, "a list")


def check_timeout(parameter: str, value: object) -> None:
    """Raise InvalidRequestError unless one can wait for so many seconds; None is no limit."""
    right = value is None or (is_number(value) and 0 <= value <= threading.TIMEOUT_MAX)
    expected = "a number of seconds, 0 or more, or None for no limit"
    _expect(right, parameter, value, expected)


def check_path(parameter: str, value: object) -> Path:
    """Return a path; InvalidRequestError where it is none."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    _expect(isinstance(path, str) and path, parameter, value, "a path, as str or pathlib.Path")
    return Path(path)  # type: ignore[arg-type]  # a string, as was checked


def check_arguments(
    what: str, target: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise InvalidRequestError where a class cannot be constructed with these, or is none."""
    if not inspect.isclass(target):
        if args or kwargs:
            raise InvalidRequestError(
                f"{what} is a function, which is constructed without arguments; make it a class to "
                "give it some"
            )
        return
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # one written in C, say
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidRequestError(
            f"{what}: {error}; {target.__name__}{signature} is constructed with what is given here"
        ) from None


def check_answers_http(what: str, target: object, named: Collection[str] | None) -> None:
    """Raise InvalidRequestError for a class of which HTTP requests can call nothing, ever.

    Likewise for ``named``, its http_call_methods, that they cannot call.
    """
    is_plain = inspect.isclass(target) and not hasattr(target, ASGI_APP)
    methods = http_methods(target) if is_plain else frozenset()  # type: ignore[arg-type]  # a class
    if wrong := [name for name in named or () if name not in methods]:
        raise InvalidRequestError(
            f"{what}: http_call_methods={list(named or ())!r}: HTTP requests cannot call "
            f"{', '.join(wrong)} of {target!r}; they can: {', '.join(sorted(methods)) or 'none'}"
        )
    if not is_plain or methods:
        return
    # By its name: every class can be called, to make an instance.
    if any("__call__" in vars(base) for base in target.__mro__):  # type: ignore[attr-defined]
        return
    raise InvalidRequestError(
        f"{what}: {target!r} has no __call__ and no other method for HTTP requests, and would "
        "answer none; give it one, or None in place of the route"
    )


def _expect(right: object, parameter: str, value: object, expected: str) -> None:
    if not right:
        raise InvalidRequestError(f"{parameter}={value!r}: must be {expected}")
