"""Ray Serve 1.x's way to deploy: each deployment by itself, with versions.

Thin names over :meth:`Client.deploy`, so that code of 2021 runs. ``Deployment.deploy()``,
``delete()`` and ``get_handle()`` are here, and ``serve.get_deployment`` and ``list_deployments``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from greenroom.core import operations as ops
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.admin import session
from greenroom.serve.admin.checks import check_name
from greenroom.serve.admin.client import Client
from greenroom.serve.deployments import Deployment, DeploymentOptions

if TYPE_CHECKING:
    from greenroom.serve.handle import DeploymentHandle


class _Deployed:
    """Stands for code that is deployed and not here; ``options`` are those that it has."""

    def __init__(self, options: DeploymentOptions) -> None:
        self.__name__ = options.name
        self.options = options

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse: the code is elsewhere."""
        raise InvalidRequestError(_elsewhere(self.__name__))


def deploy(
    deployment: Deployment, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, blocking: bool
) -> None:
    """Run a deployment by itself; what was deployed under its name is updated in place."""
    ours = session.current()
    client = Client(ours.ensure_running(), ours.settings)
    options, code = deployment.settings, deployment.func_or_class
    if isinstance(code, _Deployed):
        goal = _updated(client, options, code.options, has_arguments=bool(args or kwargs))
    else:
        ours.deployed(ops.DeleteDeployment(name=options.name))
        given = dict(options.alone)
        if args or kwargs:
            given |= {"init_args": args, "init_kwargs": dict(kwargs)}
        goal = client.deploy(options.name, deployment, **given)
    if blocking:
        client.wait_for_goal(goal)


def _updated(
    client: Client, wanted: DeploymentOptions, there: DeploymentOptions, *, has_arguments: bool
) -> str | None:
    """Change the settings of what is deployed; InvalidRequestError for what takes its code."""
    before, after = there.config.model_dump(), wanted.config.model_dump()
    needs_code = (wanted.name, wanted.version, wanted.actor_options, wanted.alone) != (
        *(there.name, there.version, there.actor_options),
        there.alone,
    )
    if needs_code or has_arguments:
        raise InvalidRequestError(_elsewhere(there.name))
    changes = {name: value for name, value in after.items() if value != before[name]}
    return client.update_backend_config(wanted.name, changes) if changes else None


def _elsewhere(name: str) -> str:
    return (
        f"the code of deployment {name!r}, which serve.get_deployment has found, is not here, so "
        "only settings can be changed; deploy its class or function again for anything else"
    )


def delete(name: str) -> None:
    """Delete a deployment of its own and wait until it is gone; nothing if there is none."""
    client = _client()
    client.wait_for_goal(client.delete_deployment(name))


def get_handle(name: str) -> DeploymentHandle:
    """Return a handle of a deployment of its own; UnknownNameError if there is none."""
    return _client().get_handle(name)


def get_deployment(name: str) -> Deployment:
    """Return what ``Deployment.deploy()`` has deployed; UnknownNameError if there is none.

    Its ``options(...).deploy()`` changes settings, ``num_replicas`` for one. For other code or
    another version, deploy the class or function again.
    """
    check_name("name", name)
    return _found(_client(), name)


def list_deployments() -> dict[str, Deployment]:
    """Return by name what :func:`get_deployment` returns, of all deployments of their own."""
    client = _client()
    return {name: _found(client, name) for name in client.list_deployments()}


def _client() -> Client:
    ours = session.current()
    return Client(ours.connect(), ours.settings)


def _found(client: Client, name: str) -> Deployment:
    info = client.get_deployment_info(name)
    config = client.get_backend_config(name)
    options = DeploymentOptions(name=name, version=info["version"], config=config)
    return Deployment(_Deployed(options), options)
