"""The admin client: backends, endpoints and traffic, one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from understudy.actors import system
from understudy.actors.connection import Connection
from understudy.actors.messages import (
    CreateBackend,
    CreateEndpoint,
    DeleteBackend,
    DeleteEndpoint,
    GetBackendConfig,
    ListBackends,
    ListEndpoints,
    SetTraffic,
    StopCluster,
    UpdateBackendConfig,
)
from understudy.actors.settings import HostSettings, read_settings
from understudy.core.config import ActorOptions, BackendConfig, Settings, validated
from understudy.core.errors import InvalidRequestError, UnderstudyError, UnknownNameError
from understudy.serve import operations
from understudy.serve.deployments import Deployment
from understudy.serve.handle import DeploymentHandle
from understudy.serve.operations import new
from understudy.serve.packing import pack_code
from understudy.serve.schema import ServeStatus

S = TypeVar("S", bound=Settings)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


class Client:
    """Asks a running system's controller for changes; made by :meth:`connect`.

    Every change is idempotent: the same call again changes nothing. Those that take time return the
    id of a goal for :meth:`wait_for_goal`, or None when nothing changed. A bad value is an
    InvalidRequestError, a contradiction of what exists a ConflictError (both are ValueErrors), a
    name that nothing bears an UnknownNameError (a KeyError).
    """

    def __init__(self, connection: Connection, settings: HostSettings) -> None:
        self._connection = connection
        self._settings = settings

    @classmethod
    def connect(cls, address: str | None = None) -> Self:
        """Connect to the system at ``HOST:PORT``, or to this host's; NotRunningError if none."""
        settings = read_settings(address=address)
        return cls(Connection.open(settings), settings)

    def close(self) -> None:
        """Close the connection; what was changed stays."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def create_backend(
        self,
        tag: str,
        func_or_class: Callable[..., Any],
        *init_args: Any,
        config: BackendConfig | Mapping[str, Any] | None = None,
        actor_options: ActorOptions | Mapping[str, Any] | None = None,
        version: str | None = None,
    ) -> str | None:
        """Run code under a tag; returns the goal's id."""
        _check_name("tag", tag)
        target = func_or_class
        if isinstance(target, Deployment):
            target = target.func_or_class
        if not callable(target) or not hasattr(target, "__name__"):
            raise InvalidRequestError(f"backend {tag!r}: {target!r} is no function or class")
        code = pack_code(f"backend {tag!r}", target, init_args, {}, version)
        request = new(
            CreateBackend,
            tag=tag,
            config=_made(BackendConfig, config).model_dump(),
            actor_options=_made(ActorOptions, actor_options).model_dump(),
            version=version,
            code=code.pickled,
            code_hash=code.hash,
        )
        return self._goal(request)

    def update_backend_config(
        self, tag: str, config: BackendConfig | Mapping[str, Any]
    ) -> str | None:
        """Change the given settings of a backend and no others; returns the goal's id."""
        _check_name("tag", tag)
        if isinstance(config, BackendConfig):
            changes = config.model_dump(exclude_unset=True)
        else:
            _check_mapping("config", config)
            values = BackendConfig().updated(config).model_dump()
            changes = {name: values[name] for name in config}
        return self._goal(new(UpdateBackendConfig, tag=tag, changes=changes))

    def get_backend_config(self, tag: str) -> BackendConfig:
        """Return a backend's settings."""
        return BackendConfig(**self._connection.request(new(GetBackendConfig, tag=tag)))

    def list_backends(self) -> dict[str, Any]:
        """Return all backends by tag, with settings and state."""
        return dict(self._connection.request(new(ListBackends)))

    def delete_backend(self, tag: str, force: bool = False) -> str | None:
        """Stop a backend, at once with ``force``; refused while an endpoint names it."""
        return self._goal(new(DeleteBackend, tag=tag, force=force))

    def create_endpoint(
        self,
        name: str,
        *,
        backend: str,
        route: str | None = None,
        methods: Sequence[str] = ("GET",),
    ) -> None:
        """Name a backend; without a route it can be called through handles only."""
        _check_name("name", name)
        _check_name("backend", backend)
        if problem := operations.route_problem("route", route):
            raise InvalidRequestError(problem)
        request = new(
            CreateEndpoint, name=name, backend=backend, route=route, methods=_methods(methods)
        )
        self._connection.request(request)

    def delete_endpoint(self, name: str) -> None:
        """Forget an endpoint; returns when nothing routes to it any more."""
        self._connection.request(new(DeleteEndpoint, name=name))

    def list_endpoints(self) -> dict[str, dict[str, Any]]:
        """Return all endpoints by name: route, methods, traffic and shadows."""
        return dict(self._connection.request(new(ListEndpoints)))

    def set_traffic(self, endpoint: str, weights: Mapping[str, float]) -> None:
        """Give an endpoint's traffic to backends by weight; returns when every proxy knows it."""
        _check_name("endpoint", endpoint)
        request = new(SetTraffic, endpoint=endpoint, weights=_weights(endpoint, weights))
        self._connection.request(request)

    def get_handle(self, endpoint: str, missing_ok: bool = False) -> DeploymentHandle:
        """Return a handle of an endpoint; UnknownNameError if it is missing, unless that is ok."""
        if not missing_ok:
            endpoints = self.list_endpoints()
            if endpoint not in endpoints:
                known = ", ".join(sorted(endpoints)) or "none"
                raise UnknownNameError(f"no endpoint is named {endpoint!r}; there are: {known}")
        return DeploymentHandle(endpoint, None, client=self._connection.queries)

    def wait_for_goal(self, goal_id: str | None, timeout_s: float | None = None) -> None:
        """Wait until a change is done; returns at once for None, the goal of no change.

        Raises TimeoutError, or what made the change fail: the constructor's exception, say.
        """
        operations.wait_for_goal(self._connection, goal_id, timeout_s)

    def status(self) -> ServeStatus:
        """Return the state of all applications."""
        return ServeStatus.of(operations.read_report(self._connection))

    def shutdown(self) -> None:
        """Stop the system, with everything on it, and delete its state."""
        if self._settings.address is None:
            self.close()
            system.stop(self._settings, forget=True)
            return
        self._connection.request(new(StopCluster, forget=True))
        gone = self._connection.wait_gone(system.STOP_TIMEOUT_S)
        self.close()
        if not gone:
            raise UnderstudyError(
                f"the system at {self._settings.address} did not end within "
                f"{system.STOP_TIMEOUT_S:g} s; see its logs/host.log"
            )

    def _goal(self, request: Any) -> str | None:
        goal: str | None = self._connection.request(request)
        return goal


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{what}={name!r}: must be a non-empty string")


def _check_mapping(what: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{what}={value!r}: must be a dict")


def _made(model: type[S], given: S | Mapping[str, Any] | None) -> S:
    if isinstance(given, model):
        return given
    if given is not None:
        _check_mapping(model.__name__, given)
    values: Mapping[str, Any] = given or {}  # type: ignore[assignment]  # checked above
    return validated(model, values)


def _methods(methods: Sequence[str]) -> tuple[str, ...]:
    if isinstance(methods, str):
        raise InvalidRequestError(f"methods={methods!r}: must be a list, such as [{methods!r}]")
    upper = tuple(dict.fromkeys(str(method).upper() for method in methods))
    bad = [method for method in upper if method not in METHODS]
    if bad or not upper:
        raise InvalidRequestError(f"methods={methods!r}: expected some of {', '.join(METHODS)}")
    return upper


def _weights(endpoint: str, weights: Mapping[str, float]) -> dict[str, float]:
    _check_mapping("weights", weights)
    problems = [
        f"{tag!r}: {weight!r}: must be a number from 0 to 1"
        for tag, weight in weights.items()
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1
    ]
    if not problems and not math.isclose(sum(weights.values()), 1.0, abs_tol=1e-6):
        problems.append(f"they sum to {sum(weights.values()):g}: must be 1")
    if problems:
        raise InvalidRequestError(f"weights of endpoint {endpoint!r}: {'; '.join(problems)}")
    return {tag: float(weight) for tag, weight in weights.items()}
