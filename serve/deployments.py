"""Deployments as users write them: a function or class with options, then bound to arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, overload

from typing_extensions import TypeVar, Unpack

from greenroom.core.config import ActorOptions, BackendConfig
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.options import DeploymentOptions, GivenOptions, read_options

# What a call returns: of the function, or of the class's __call__.
R_co = TypeVar("R_co", covariant=True, default=Any)
R = TypeVar("R")


class _Callable(Protocol[R_co]):
    def __call__(self, *args: Any, **kwargs: Any) -> R_co: ...


class _AsyncCallable(Protocol[R_co]):
    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, R_co]: ...


@dataclass(frozen=True, eq=False)
class Application(Generic[R_co]):
    """A deployment bound to its constructor's arguments, ready for ``serve.run``.

    Given to another deployment's ``bind``, it arrives in that constructor as a DeploymentHandle.
    The same Application given to two of them is one deployment; two Applications are two.
    """

    deployment: Deployment[R_co]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Application(deployment={self.deployment.name!r})"


@dataclass(frozen=True, eq=False)
class Deployment(Generic[R_co]):
    """A function or class and how to run it; made by :func:`deployment`, never changed."""

    func_or_class: Callable[..., Any]
    settings: DeploymentOptions

    @property
    def name(self) -> str:
        """The deployment's name within its application."""
        return self.settings.name

    @property
    def version(self) -> str | None:
        """The version that its author gave it."""
        return self.settings.version

    @property
    def config(self) -> BackendConfig:
        """How its replicas are run."""
        return self.settings.config

    @property
    def actor_options(self) -> ActorOptions:
        """What each replica takes of its host."""
        return self.settings.actor_options

    @property
    def num_replicas(self) -> int | None:
        """How many replicas are wanted; None where autoscaling decides."""
        return self.config.num_replicas

    @property
    def user_config(self) -> Any:
        """What ``reconfigure`` is called with."""
        return self.config.user_config

    def options(self, **changes: Unpack[GivenOptions]) -> Deployment[R_co]:
        """Return a copy with some options changed; the others stay as they are."""
        return Deployment(self.func_or_class, read_options(self.settings, changes))

    def bind(self, *args: Any, **kwargs: Any) -> Application[R_co]:
        """Bind the class to its constructor's arguments, as an application to run."""
        if (args or kwargs) and not inspect.isclass(self.func_or_class):
            raise InvalidRequestError(
                f"deployment {self.name!r} is a function, which is bound without arguments; "
                "make it a class to give it some"
            )
        return Application(self, args, kwargs)

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse: what runs is a replica, and that is called through a handle."""
        raise RuntimeError(
            f"deployment {self.name!r} cannot be called directly: deploy it with "
            f"serve.run({self.name}.bind(...)) and call the handle that returns; for a plain call, "
            f"in a unit test say, use {self.name}.func_or_class(...)"
        )

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        raise TypeError(
            f"cannot inherit from the deployment {self.name!r}; inherit from "
            f"{self.name}.func_or_class"
        )

    def __repr__(self) -> str:
        return f"Deployment(name={self.name!r})"


class _Decorator(Protocol):
    """What deploys classes by their ``__call__``, other classes, and functions."""

    @overload
    def __call__(self, target: type[_AsyncCallable[R]], /) -> Deployment[R]: ...
    @overload
    def __call__(self, target: type[_Callable[R]], /) -> Deployment[R]: ...
    @overload
    def __call__(self, target: type, /) -> Deployment: ...
    @overload
    def __call__(self, target: Callable[..., Coroutine[Any, Any, R]], /) -> Deployment[R]: ...
    @overload
    def __call__(self, target: Callable[..., R], /) -> Deployment[R]: ...


@overload
def deployment(func_or_class: type[_AsyncCallable[R]], /) -> Deployment[R]: ...
@overload
def deployment(func_or_class: type[_Callable[R]], /) -> Deployment[R]: ...
@overload
def deployment(func_or_class: type, /) -> Deployment: ...
@overload
def deployment(func_or_class: Callable[..., Coroutine[Any, Any, R]], /) -> Deployment[R]: ...
@overload
def deployment(func_or_class: Callable[..., R], /) -> Deployment[R]: ...
@overload
def deployment(**options: Unpack[GivenOptions]) -> _Decorator: ...


def deployment(
    func_or_class: Callable[..., Any] | None = None, /, **options: Any
) -> Deployment | _Decorator:
    """Make a function or class a deployment; used bare, or with any of these options.

    ``name`` (its own), ``version``, ``num_replicas`` (1; "auto" for autoscaling from 1 to 100),
    ``autoscaling_config`` (None), ``user_config``, ``max_ongoing_requests``
    (100), ``max_queued_requests`` (-1: unlimited), ``request_timeout_s``, ``retryable`` (None),
    ``health_check_period_s``, ``health_check_timeout_s``, ``graceful_shutdown_timeout_s``,
    ``graceful_shutdown_wait_loop_s``, ``max_constructor_retry_count`` (20),
    ``constructor_timeout_s`` (1800), ``logging_config``,
    ``allow_method_header`` (True: HTTP requests may name a method in X-Serve-Call-Method), and
    ``actor_options`` (or ``ray_actor_options``) with ``num_cpus``, ``num_gpus``, ``memory`` and
    ``resources``. These amounts are counted and nothing more: ``num_gpus`` assigns no device.
    """

    def decorate(target: Any) -> Deployment:
        if isinstance(target, Deployment):
            raise TypeError(f"{target.name!r} is a deployment already; change it with .options()")
        if not (inspect.isclass(target) or inspect.isroutine(target)):
            raise TypeError(f"@serve.deployment is for functions and classes, not for {target!r}")
        return Deployment(target, read_options(DeploymentOptions(name=target.__name__), options))

    return decorate if func_or_class is None else decorate(func_or_class)
