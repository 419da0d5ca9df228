"""From a bound application to the deployments that the controller is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from understudy.actors.admin_messages import DeploymentSpec
from understudy.core.errors import InvalidRequestError
from understudy.serve.deployments import Application, Deployment
from understudy.serve.handle import DeploymentHandle
from understudy.serve.options import name_problem
from understudy.serve.packing import pack_code
from understudy.serve.scaling import packed

logger = logging.getLogger(__name__)


class BuiltApplication(NamedTuple):
    """An application's deployments: each before those that hold it, the ingress last."""

    name: str
    ingress: str
    deployments: tuple[DeploymentSpec, ...]


def build(application: Application, name: str) -> BuiltApplication:
    """Pickle every deployment that ``application`` is made of, each once.

    A second deployment of a name that is taken gets a suffix: ``Model_1``. Raises
    InvalidRequestError, naming the deployment, where something cannot be pickled.
    """
    if not isinstance(application, Application):
        raise InvalidRequestError(not_an_application(application))
    if problem := name_problem("name", name):
        raise InvalidRequestError(problem)
    builder = _Builder(name)
    ingress = builder.add(application)
    return BuiltApplication(name, ingress.deployment_name, tuple(builder.specs))


def not_an_application(value: Any) -> str:
    """Say why ``value`` cannot be run, and what could."""
    if isinstance(value, Deployment):
        return f"{value!r} is not bound; did you forget .bind()?"
    return (
        f"expected an Application, as Deployment.bind() returns, not "
        f"{value!r} of type {type(value).__name__}"
    )


class _Builder:
    def __init__(self, application_name: str) -> None:
        self.specs: list[DeploymentSpec] = []
        self._application_name = application_name
        self._handles: dict[int, DeploymentHandle] = {}  # by id of the Application

    def add(self, application: Application) -> DeploymentHandle:
        """Add a bound deployment, after those among its arguments; return what replaces it."""
        known = self._handles.get(id(application))
        if known is not None:
            return known
        deployment = application.deployment
        args, kwargs = self._resolved((application.args, application.kwargs), deployment.name)
        name = self._free_name(deployment.name)
        what = f"deployment {name!r}"
        code = pack_code(what, deployment.func_or_class, args, kwargs, deployment.version)
        self.specs.append(
            DeploymentSpec(
                name=name,
                code=code.pickled,
                code_hash=code.hash,
                version=deployment.version,
                config=packed(what, deployment.config),
                actor_options=deployment.actor_options.model_dump(),
            )
        )
        handle = DeploymentHandle(name, self._application_name)
        self._handles[id(application)] = handle
        return handle

    def _resolved(self, value: Any, owner: str) -> Any:
        """Return ``value`` with handles for Applications, in new containers where any was."""
        if isinstance(value, Application):
            return self.add(value)
        if isinstance(value, Deployment):
            problem = not_an_application(value)
            raise InvalidRequestError(f"bad argument of deployment {owner!r}: {problem}")
        if isinstance(value, dict) and _has_deployments(value):
            return {key: self._resolved(part, owner) for key, part in value.items()}
        if isinstance(value, list | tuple) and _has_deployments(value):
            parts = [self._resolved(part, owner) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    def _free_name(self, wanted: str) -> str:
        taken = {spec.name for spec in self.specs}
        name, number = wanted, 0
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        if number:
            logger.warning("two deployments are named %r; one is renamed %r", wanted, name)
        return name


def _has_deployments(value: Any) -> bool:
    if isinstance(value, Application | Deployment):
        return True
    return isinstance(value, dict | list | tuple) and any(map(_has_deployments, _items(value)))


def _items(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)
