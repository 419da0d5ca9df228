"""Deployments as users write them: a function or class with options, then bound to arguments."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Protocol, Unpack, overload

from pydantic import BeforeValidator, Field, ValidationError
from typing_extensions import TypeVar

from greenroom.core.config import ActorOptions, BackendConfig, GivenSettings
from greenroom.core.errors import InvalidRequestError
from greenroom.core.operations import NewName
from greenroom.core.validation import explain_missing, problems_in
from greenroom.serve.admin.checks import HINTS, check_arguments
from greenroom.serve.tasks.consumers import QUEUE_OPTIONS, TASKS

if TYPE_CHECKING:
    from greenroom.serve.handle import DeploymentHandle

# --- Options of a deployment; one error names all bad ones ----------------------------------------


class GivenOptions(GivenSettings, total=False):
    """The options that a user may give, for type checkers."""

    name: str
    version: str | None
    actor_options: ActorOptions | Mapping[str, Any] | None
    ray_actor_options: ActorOptions | Mapping[str, Any] | None


class DeploymentOptions(BackendConfig):
    """All that a user may give: the settings of replicas, and what a deployment has beside them."""

    hints: ClassVar[Mapping[str, str]] = {**BackendConfig.hints, **HINTS}
    aliases: ClassVar[Mapping[str, str]] = {
        **BackendConfig.aliases,
        "ray_actor_options": "actor_options",
    }

    name: NewName
    version: str | None = Field(default=None, strict=True)
    actor_options: Annotated[
        ActorOptions, BeforeValidator(lambda given: {} if given is None else given)
    ] = Field(default_factory=ActorOptions)

    @property
    def config(self) -> BackendConfig:
        """How replicas are run."""
        return BackendConfig(**{name: getattr(self, name) for name in BackendConfig.model_fields})

    def changed(self, given: Mapping[str, Any]) -> DeploymentOptions:
        """Return them with others; raise an InvalidRequestError naming each bad one."""
        written = {self.aliases.get(name, name): name for name in given}
        try:
            return DeploymentOptions.model_validate(self.merged(given))
        except ValidationError as error:
            name = given.get("name", self.name)
            problems = "; ".join(_as_written(problem, written) for problem in problems_in(error))
            raise InvalidRequestError(f"bad options of deployment {name!r}: {problems}") from None


def _as_written(problem: str, written: Mapping[str, str]) -> str:
    """Return a problem with the option's name that the user gave, which may be an alias."""
    name = re.split(r"\W", problem, maxsplit=1)[0]
    return written.get(name, name) + problem.removeprefix(name)


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

    hints: ClassVar[Mapping[str, str]] = {
        "remote": "serve.run returns a handle that has it",
        "options": "give them before: MyDeployment.options(...).bind(...)",
        "deploy": "serve.run does that",
        "target": "serve.run_many takes serve.RunTarget(MyDeployment.bind(), name=...)",
    }

    deployment: Deployment[R_co]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    if not TYPE_CHECKING:
        __getattr__ = explain_missing

    def __repr__(self) -> str:
        return f"Application(deployment={self.deployment.name!r})"

    def __reduce__(self) -> Any:
        handle = (handles.get() or {}).get(id(self))
        if handle is None:  # one that no argument holds, but a function's variables say
            raise pickle.PicklingError(
                "no handle can replace an application there; give it as an argument of bind, or in "
                "one"
            )
        return handle.__reduce__()


handles: ContextVar[Mapping[int, DeploymentHandle] | None] = ContextVar("handles", default=None)
"""What is pickled in place of applications, by their ids, while build() packs what is bound."""


@dataclass(frozen=True, eq=False)
class Deployment(Generic[R_co]):
    """A function or class and how to run it; made by :func:`deployment`, never changed."""

    hints: ClassVar[Mapping[str, str]] = {
        "remote": "serve.run(MyDeployment.bind()) returns a handle that has it",
        "deploy": "serve.run(MyDeployment.bind()) does that",
        "get_handle": "serve.get_deployment_handle returns one",
    }

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
        return Deployment(self.func_or_class, self.settings.changed(changes))

    def bind(self, *args: Any, **kwargs: Any) -> Application[R_co]:
        """Bind the class to its constructor's arguments, as an application to run.

        InvalidRequestError where they are not those that it takes. Of a task consumer it is the
        queue before it.
        """
        check_arguments(f"deployment {self.name!r}", self.func_or_class, args, kwargs)
        application = Application(self, args, kwargs)
        consumer = getattr(self.func_or_class, TASKS, None)
        if consumer is None:
            return application
        from greenroom.serve.tasks.queue import TaskQueue  # noqa: PLC0415  # few need it

        queue = _deployed(TaskQueue, f"{self.name}-queue", QUEUE_OPTIONS)
        return Application(queue, (application, consumer))

    @property
    def ray_actor_options(self) -> ActorOptions:
        """Ray Serve's name of ``actor_options``."""
        return self.actor_options

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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a setting under its name, as Ray Serve has some."""
            if name in BackendConfig.model_fields:
                return getattr(self.config, name)
            return explain_missing(self, name)

    def __repr__(self) -> str:
        return f"Deployment(name={self.name!r})"


def _deployed(target: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Deployment:
    settings = DeploymentOptions.model_construct(name=name)  # which options may replace
    return Deployment(target, settings.changed(options))


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
    def __call__(self, **options: Unpack[GivenOptions]) -> _Decorator: ...


def _typed(decorator: Any) -> _Decorator:
    typed: _Decorator = decorator
    return typed


@_typed
def deployment(func_or_class: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function or class a deployment; used bare, or with options.

    They are those of :class:`GivenOptions`. The page docs/deployments.md says what each one does,
    and its default.
    """

    def decorate(target: Any) -> Deployment:
        if isinstance(target, Deployment):
            raise TypeError(f"{target.name!r} is a deployment already; change it with .options()")
        if not (inspect.isclass(target) or inspect.isroutine(target)):
            raise TypeError(f"@serve.deployment is for functions and classes, not for {target!r}")
        return _deployed(target, target.__name__, options)

    return decorate if func_or_class is None else decorate(func_or_class)
