"""Deployments and backends of their own, which are of no application."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from greenroom.actors.caller.connection import Connection
from greenroom.core import operations as ops
from greenroom.core.config import ActorOptions, BackendConfig
from greenroom.core.errors import InvalidRequestError
from greenroom.core.validation import Settings, validated
from greenroom.serve.admin.checks import (
    check_answers_http,
    check_arguments,
    check_list,
    check_mapping,
    check_name,
)
from greenroom.serve.code.packing import pack_code, packed
from greenroom.serve.code.runtime_env import pack_env

BY_NAME = "/<name>"  # no route; stands for the deployment's name
S = TypeVar("S", bound=Settings)


def deploy(
    connection: Connection,
    name: str,
    target: Callable[..., Any],
    *,
    init_args: Sequence[Any] = (),
    init_kwargs: Mapping[str, Any] | None = None,
    version: str | None = None,
    prev_version: str | None = None,
    route_prefix: str | None = BY_NAME,
    config: BackendConfig | Mapping[str, Any] | None = None,
    actor_options: ActorOptions | Mapping[str, Any] | None = None,
) -> str | None:
    """Run a backend and an endpoint of the same name; return the goal's id: see Client.deploy."""
    check_name("name", name)
    for field, value in (("version", version), ("prev_version", prev_version)):
        if value is not None:
            check_name(field, value)
    route = f"/{name}" if route_prefix is BY_NAME else route_prefix
    check_list("init_args", init_args)
    if init_kwargs is not None:
        check_mapping("init_kwargs", init_kwargs)
    what = f"deployment {name!r}"
    made_config = made(BackendConfig, config)
    kwargs = dict(init_kwargs or {})
    code, folders = packed_code(
        connection, what, target, tuple(init_args), kwargs, version, actor_options
    )
    if route is not None:
        check_answers_http(what, target, made_config.http_call_methods)
    spec = {"name": name, "config": packed(what, made_config), **code}
    operation = ops.Deploy.of(
        spec=spec, route_prefix=route, prev_version=prev_version, folders=folders
    )
    goal: str | None = connection.request(operation)
    return goal


def packed_code(
    connection: Connection,
    what: str,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    version: str | None,
    actor_options: ActorOptions | Mapping[str, Any] | None,
) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Return the fields of a DeploymentSpec or CreateBackend that are of code, and zips to send."""
    if not callable(target) or not hasattr(target, "__name__"):
        raise InvalidRequestError(f"{what}: {target!r} is no function or class")
    check_arguments(what, target, args, kwargs)
    options = made(ActorOptions, actor_options)
    env = pack_env(options.runtime_env)
    code = pack_code(what, target, args, kwargs, version, env.names)
    fields = {
        "code": code.pickled,
        "code_hash": code.hash,
        "version": version,
        "actor_options": options.model_copy(update={"runtime_env": env.env}).model_dump(),
    }
    return fields, missing_of(connection, env.folders)


def missing_of(connection: Connection, folders: Mapping[str, bytes]) -> tuple[bytes, ...]:
    """Return those zips, of ``folders`` by their digests, that are to be sent: not stored yet."""
    if not folders:
        return ()
    missing = connection.request(ops.ListMissing(digests=tuple(folders)))
    return tuple(folders[digest] for digest in missing)


def made(model: type[S], given: S | Mapping[str, Any] | None) -> S:
    """Return settings of a model, given as such, as a dict or not at all."""
    if isinstance(given, model):
        return given
    if given is not None:
        check_mapping(model.__name__, given)
    values: Mapping[str, Any] = given or {}  # type: ignore[assignment]  # checked above
    return validated(model, values)
