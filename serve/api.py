"""The functions of ``serve``: run, start, status and the like, on this process's system."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from greenroom.actors.replica import context as user_context
from greenroom.core.config import GrpcOptions, HTTPOptions, LoggingConfig, RuntimeEnv
from greenroom.core.errors import NotRunningError
from greenroom.core.validation import Settings
from greenroom.serve import local_testing
from greenroom.serve.admin import applications, reports, session
from greenroom.serve.admin.checks import check_name, settings_of
from greenroom.serve.build import build
from greenroom.serve.deployments import Application
from greenroom.serve.handle import DeploymentHandle
from greenroom.serve.schema import ServeStatus

logger = logging.getLogger(__name__)
R = TypeVar("R")
Options = TypeVar("Options", bound=Settings)


def run(
    target: Application[R],
    *,
    name: str = "default",
    route_prefix: str | None = "/",
    blocking: bool = False,
    runtime_env: RuntimeEnv | Mapping[str, Any] | None = None,
    logging_config: LoggingConfig | Mapping[str, Any] | None = None,
    _local_testing_mode: bool = False,
) -> DeploymentHandle[R]:
    """Bring up an application, wait until it serves, and return its ingress's handle.

    Starts a system on this host when none runs; it is stopped when this process ends. The same call
    again changes nothing; changed code replaces what runs. ``route_prefix`` None gives it no route.
    ``blocking`` waits for Ctrl-C, then deletes the application and exits, with 1 if that failed.
    Raises the constructor's own exception when it fails, and InvalidRequestError, StartError or
    DeployFailedError.

    ``runtime_env`` is what surrounds the code of all deployments, where they give nothing else: its
    ``working_dir`` is a folder of which replicas get a copy, on every host, which is on their
    ``sys.path``, and their current folder. ``logging_config`` is for those that have none.

    With ``_local_testing_mode`` it runs in this process, without a system: see local_testing.
    """
    built = build(
        target,
        name,
        route_prefix,
        runtime_env=_given("runtime_env", RuntimeEnv, runtime_env),
        logging_config=_given("logging_config", LoggingConfig, logging_config),
    )
    if _local_testing_mode:
        return local_testing.run(built)
    ours = session.current()
    connection = ours.ensure_running()
    ours.deployed(name)

    def warn(reason: str) -> None:
        logger.warning("waiting for %r: %s", name, reason)

    handle = applications.deploy(connection, built, on_wait=warn)
    if blocking:
        _wait_for_interrupt(name)
    return handle


@dataclass(frozen=True, slots=True)
class RunTarget:
    """One application of :func:`run_many`, with the arguments of :func:`run`."""

    target: Application
    name: str = "default"
    route_prefix: str | None = "/"
    logging_config: LoggingConfig | Mapping[str, Any] | None = None


def run_many(targets: Sequence[RunTarget], *, blocking: bool = False) -> list[DeploymentHandle]:
    """Bring up applications one after the other, and return the handles of their ingresses."""
    handles: list[DeploymentHandle] = [
        run(
            each.target,
            name=each.name,
            route_prefix=each.route_prefix,
            logging_config=each.logging_config,
        )
        for each in targets
    ]
    if blocking:
        _wait_for_interrupt(*(each.name for each in targets))
    return handles


def start(
    http_options: HTTPOptions | Mapping[str, Any] | None = None,
    grpc_options: GrpcOptions | Mapping[str, Any] | None = None,
) -> None:
    """Start a system on this host, unless one runs; it is stopped when this process ends.

    The options count only for a system that this call starts; one that runs goes on with its own,
    and a warning names those that it was not started with here. gRPC is served where
    ``grpc_options`` name functions that add servicers.
    """
    ours = session.current()
    wanted, names = ours.settings.with_options(
        _given("http_options", HTTPOptions, http_options),
        _given("grpc_options", GrpcOptions, grpc_options),
    )
    if wanted != ours.settings and not ours.is_running:
        ours = session.use(wanted)
    ours.ensure_running()
    if dropped := ours.lacks(wanted, names):
        ignored = "; ".join(dropped)
        warnings.warn(
            f"serve.start: the system runs already, with the options of its start; not taken: "
            f"{ignored}. To change any, stop it first",
            stacklevel=2,
        )


def shutdown() -> list[str]:
    """Stop the system, with all applications, and delete its state; nothing if none runs.

    Returns the ids of the deletions' goals, which have been reached: see :meth:`Client.shutdown`.
    """
    local_testing.shutdown()
    return session.current().shutdown()


async def shutdown_async() -> list[str]:
    """Do what :func:`shutdown` does, for code on an event loop."""
    return await asyncio.to_thread(shutdown)


def delete(name: str) -> None:
    """Delete an application and wait until it is gone; nothing if there is none."""
    check_name("name", name)
    if not local_testing.delete(name):
        applications.delete(session.current().connect(), name)


def status() -> ServeStatus:
    """Return the state of all applications; an empty one when no system runs."""
    try:
        connection = session.current().connect()
        return ServeStatus.of(reports.read_report(connection))
    except NotRunningError:
        session.current().disconnect()
        return ServeStatus()


def get_app_handle(name: str) -> DeploymentHandle:
    """Return a handle of an application's ingress; UnknownNameError if there is none."""
    check_name("name", name)
    return DeploymentHandle(reports.ingress_of(_report(), name), name)


def get_deployment_handle(deployment_name: str, app_name: str | None = None) -> DeploymentHandle:
    """Return a handle of any deployment; UnknownNameError if there is none.

    Without ``app_name`` it is of the application whose code asks; outside of any, of "default".
    """
    check_name("deployment_name", deployment_name)
    if app_name is not None:
        check_name("app_name", app_name)
    else:
        replica = user_context.replica_context()
        app_name = (replica.app_name if replica is not None else "") or "default"
    reports.check_deployment(_report(), deployment_name, app_name)
    return DeploymentHandle(deployment_name, app_name)


def _report() -> dict[str, Any]:
    return local_testing.report() or reports.read_report(session.current().connect())


def _given(
    parameter: str, model: type[Options], given: Options | Mapping[str, Any] | None
) -> Options | None:
    return None if given is None else settings_of(model, given, parameter)


def _wait_for_interrupt(*names: str) -> None:
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        has_failed = False
        for name in names:
            try:
                delete(name)
            except NotRunningError:
                pass  # what has ended runs nothing
            except Exception as error:  # it may run on, but whatever it is, the others go
                has_failed = True
                reason = f"{type(error).__name__}: {error}"
                logger.warning("%r could not be deleted: %s", name, reason)
        sys.exit(1 if has_failed else 0)
