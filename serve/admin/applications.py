"""Applications over a connection: deploy, delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenroom.actors.caller.connection import Connection
from greenroom.core import operations as ops
from greenroom.core.config import LoggingConfig, RuntimeEnv
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.admin.reports import check_there, missing_of
from greenroom.serve.admin.session import raising_users_own, wait_for_goal
from greenroom.serve.build import Built, build
from greenroom.serve.deployments import Application, name_problem
from greenroom.serve.handle import DeploymentHandle

_DEFAULT_FLAGS = ops.DeployFlags()


def check_target(name: str, route_prefix: str | None) -> None:
    """Raise InvalidRequestError unless an application may have this name and prefix."""
    problems = [name_problem("name", name) or ops.application_problem(name)]
    if wrong := ops.route_problem(route_prefix):
        problems.append(f"route_prefix={route_prefix!r}: {wrong}")
    if found := [problem for problem in problems if problem]:
        raise InvalidRequestError("; ".join(found))


def deploy(
    connection: Connection,
    application: Application,
    name: str,
    route_prefix: str | None,
    logging_config: LoggingConfig | None = None,
    on_wait: Callable[[str], None] | None = None,
    runtime_env: RuntimeEnv | None = None,
) -> DeploymentHandle:
    """Bring an application up and wait for it; raises what its constructor raised.

    ``logging_config`` is for the deployments without one. ``on_wait`` gets what it still waits
    for, when that is another thing than before. ``runtime_env`` is what deployments have where they
    give nothing else.
    """
    built = build(
        application, name, route_prefix, runtime_env=runtime_env, logging_config=logging_config
    )
    goal = apply(connection, built)["goals"].get(name)
    with raising_users_own():
        wait_for_goal(connection, goal, on_wait=on_wait)
    return DeploymentHandle(built.applications[0].ingress, name, client=connection.queries)


def apply(
    connection: Connection,
    built: Built,
    flags: ops.DeployFlags = _DEFAULT_FLAGS,
    *,
    from_file: bool = False,
) -> dict[str, Any]:
    """Make the applications be these, in one change, or answer what that would change.

    Those that are not ``from_file`` are deployed beside all others. Returns at once, with the goals
    to wait for or with the plan: see DeployApplications and PlanApplications. ConflictError where
    the version is not the one of the flags.
    """
    check_there(connection, built.needs)
    which: dict[str, Any] = {
        "applications": built.applications,
        "keep_others": flags.keep_others or not from_file,
        "from_file": from_file,
        "prune": flags.prune,
    }
    operation: ops.Operation
    if flags.plan:
        operation = ops.PlanApplications(**which)
    else:
        folders = missing_of(connection, built.folders)
        how: dict[str, Any] = {
            "if_version": flags.if_version,
            "canary": flags.rollout,
            "folders": folders,
        }
        operation = ops.DeployApplications(**which, **how)
    answer: dict[str, Any] = connection.request(operation)
    return answer


def delete(connection: Connection, name: str) -> bool:
    """Delete an application and wait until it is gone; False when there was none."""
    goal = connection.request(ops.DeleteApplication(application=name))
    wait_for_goal(connection, goal)
    return goal is not None
