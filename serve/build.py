"""From a bound application to the deployments that the controller is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

from greenroom.core.config import CALLBACK_SECRET, ActorOptions, LoggingConfig, RuntimeEnv
from greenroom.core.errors import InvalidRequestError
from greenroom.core.operations import ApplicationSpec, DeploymentSpec
from greenroom.core.validation import unknown_name
from greenroom.serve.admin.checks import check_answers_http
from greenroom.serve.code.modules import Modules
from greenroom.serve.code.packing import Code, CodePickler, pack_code, packed
from greenroom.serve.code.runtime_env import PackedEnv, pack_env
from greenroom.serve.deployments import Application, Deployment, handles
from greenroom.serve.handle import DeploymentHandle
from greenroom.serve.tasks.consumers import Consumer

logger = logging.getLogger(__name__)


_CODE = (type, ModuleType, FunctionType)


class Built(NamedTuple):
    """Applications as the controller takes them, in one change.

    Of each the deployments: each before those that hold it, the ingress last.
    """

    applications: tuple[ApplicationSpec, ...]
    folders: Mapping[str, bytes]  # zips of their runtime_envs, by sha256
    needs: tuple[tuple[str | None, str], ...]  # handles of other applications' deployments

    @property
    def deployments(self) -> tuple[DeploymentSpec, ...]:
        """The deployments of all."""
        return tuple(spec for each in self.applications for spec in each.deployments)

    @classmethod
    def of_all(cls, parts: Iterable[Built]) -> Built:
        """Return what is to be deployed together; what one needs of another need not be there."""
        specs: list[ApplicationSpec] = []
        folders: dict[str, bytes] = {}
        needs: list[tuple[str | None, str]] = []
        for part in parts:
            specs += part.applications
            folders |= part.folders
            needs += part.needs
        own = {(spec.name, each.name) for spec in specs for each in spec.deployments}
        return cls(tuple(specs), folders, tuple(need for need in needs if need not in own))


Options = Mapping[str, Mapping[str, Any]]
"""By deployment, what ``Deployment.options`` takes."""


def build(
    application: Application,
    name: str,
    route_prefix: str | None = None,
    *,
    runtime_env: RuntimeEnv | None = None,
    options: Options = MappingProxyType({}),
    logging_config: LoggingConfig | None = None,
) -> Built:
    """Pickle every deployment that ``application`` is made of, each once.

    ``runtime_env`` and ``logging_config`` are what deployments have where they give nothing else;
    ``options`` go before those of the code. A second deployment of a name that is taken gets a
    suffix: ``Model_1``. Raises InvalidRequestError, naming the deployment, where something cannot
    be pickled, where deployments are bound to each other in a circle, where a handle is of none of
    them that should be, and where there is a route and HTTP requests could call nothing there.
    """
    if not isinstance(application, Application):
        raise InvalidRequestError(not_an_application(application))
    builder = _Builder(name, runtime_env, options, logging_config)
    ingress = builder.add(application).deployment_name
    deployments = builder.deployments()
    if route_prefix is not None:
        check_answers_http(
            f"deployment {ingress!r}",
            application.deployment.func_or_class,
            deployments[-1].config.http_call_methods,
        )
    spec = ApplicationSpec(
        name=name, ingress=ingress, route_prefix=route_prefix, deployments=deployments
    )
    return Built((spec,), builder.folders, tuple(builder.needs()))


def not_an_application(value: Any) -> str:
    """Say why ``value`` cannot be run, and what could."""
    if isinstance(value, Deployment):
        return f"{value!r} is not bound; did you forget .bind()?"
    return (
        f"expected an Application, as Deployment.bind() returns, not "
        f"{value!r} of type {type(value).__name__}"
    )


class _Builder:
    def __init__(
        self,
        application_name: str,
        runtime_env: RuntimeEnv | None,
        options: Options,
        logging_config: LoggingConfig | None,
    ) -> None:
        self.specs: list[DeploymentSpec] = []
        self.codes: list[Code] = []  # of each
        self.folders: dict[str, bytes] = {}
        self._application_name = application_name
        self._runtime_env = runtime_env
        self._options = options
        self._logging_config = logging_config
        self._packed: dict[str, PackedEnv] = {}  # by the environment as JSON
        self._handles: dict[int, DeploymentHandle] = {}  # by id of the Application
        self._path: list[Application] = []  # from the ingress to here
        self.given: list[tuple[str, DeploymentHandle]] = []  # in arguments, with whose these are

    def add(self, application: Application) -> DeploymentHandle:
        """Add a bound deployment, after those among its arguments; return what replaces it."""
        known = self._handles.get(id(application))
        if known is not None:
            return known
        deployment = application.deployment
        held = self._handles_in(application)
        name = self._free_name(deployment.name)
        deployment = deployment.options(**self._options.get(name, {}))
        if deployment.config.logging_config is None:
            deployment = deployment.options(logging_config=self._logging_config)
        what = f"deployment {name!r}"
        actor_options = self._with_secret(application, deployment.actor_options)
        env = self._packed_env(actor_options)
        target, version = deployment.func_or_class, deployment.version
        token = handles.set(held)
        try:
            code = pack_code(what, target, application.args, application.kwargs, version, env.names)
        finally:
            handles.reset(token)
        self.folders |= env.folders
        self.codes.append(code)
        self.specs.append(
            DeploymentSpec(
                name=name,
                code=code.alone,
                code_hash=code.hash,
                version=deployment.version,
                config=packed(what, deployment.config),
                actor_options=actor_options.model_copy(update={"runtime_env": env.env}),
            )
        )
        handle = DeploymentHandle(name, self._application_name)
        self._handles[id(application)] = handle
        return handle

    def deployments(self) -> tuple[DeploymentSpec, ...]:
        """Return those added, each with the modules of all: any may send an object to any."""
        modules: Modules = {}
        for code in self.codes:
            modules |= code.modules
        return tuple(
            spec.model_copy(update={"code": code.carrying(modules)})
            for spec, code in zip(self.specs, self.codes, strict=True)
        )

    def _with_secret(self, application: Application, options: ActorOptions) -> ActorOptions:
        """Give a job queue the secret of callbacks of its consumer, wherever that has it from."""
        if not any(isinstance(each, Consumer) for each in application.args):
            return options
        name = self._handles[id(application.args[0])].deployment_name
        spec = next(spec for spec in self.specs if spec.name == name)
        variables = spec.actor_options.runtime_env.env_vars
        secret = {each: variables[each] for each in variables if each == CALLBACK_SECRET}
        env = options.runtime_env.over(RuntimeEnv(env_vars=secret))
        return options.model_copy(update={"runtime_env": env})

    def _packed_env(self, options: ActorOptions) -> PackedEnv:
        env = options.runtime_env.over(self._runtime_env)
        key = env.model_dump_json()
        packed = self._packed[key] = self._packed.get(key) or pack_env(env)
        return packed

    def _handles_in(self, application: Application) -> dict[int, DeploymentHandle]:
        """Return what replaces the applications among the arguments of one, by their ids."""
        begun = [each is application for each in self._path]
        self._path.append(application)
        if any(begun):
            names = " -> ".join(each.deployment.name for each in self._path[begun.index(True) :])
            raise InvalidRequestError(
                f"deployments are bound to each other in a circle: {names}; have one of them ask "
                "for the other with serve.get_deployment_handle, when it first calls it"
            )
        finder = _Finder(self, application.deployment.name)
        try:
            finder.dumps((application.args, application.kwargs))
        except InvalidRequestError:
            raise
        except Exception:  # pack_code() says what it is that cannot be pickled
            logger.debug("arguments of %r", application, exc_info=True)
        self._path.pop()
        return finder.found

    def needs(self) -> Iterator[tuple[str | None, str]]:
        """Return what handles in arguments are of, that is no deployment of this application."""
        names = {spec.name for spec in self.specs}
        for owner, handle in self.given:
            if handle.app_name != self._application_name:
                yield handle.app_name, handle.deployment_name
            elif handle.deployment_name not in names:
                text = unknown_name("deployment", handle.deployment_name, names)
                raise InvalidRequestError(f"bad argument of deployment {owner!r}: {text}")

    def _free_name(self, wanted: str) -> str:
        taken = {spec.name for spec in self.specs}
        name, number = wanted, 0
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        if number:
            logger.warning("two deployments are named %r; one is renamed %r", wanted, name)
        return name


class _Finder(CodePickler):
    """Finds what arguments hold by pickle's own way through them, but not what their code names."""

    def __init__(self, builder: _Builder, owner: str) -> None:
        super().__init__(buffer_callback=lambda _: None)  # large arrays are not copied
        self.found: dict[int, DeploymentHandle] = {}
        self._builder = builder
        self._owner = owner

    def persistent_id(self, obj: Any) -> Any:
        """Return what is written in the place of ``obj``; None for the object itself."""
        if isinstance(obj, Application):
            self.found[id(obj)] = self._builder.add(obj)
        elif isinstance(obj, DeploymentHandle):
            self._builder.given.append((self._owner, obj))
        elif isinstance(obj, Deployment):
            problem = not_an_application(obj)
            raise InvalidRequestError(f"bad argument of deployment {self._owner!r}: {problem}")
        elif not isinstance(obj, _CODE):
            return None
        return 0
