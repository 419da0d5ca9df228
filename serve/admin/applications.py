"""Applications over a connection: deploy, wait, delete."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from greenroom.actors.caller.connection import Connection
from greenroom.core import operations as ops
from greenroom.core.backoff import pause_s
from greenroom.core.config import LoggingConfig, RuntimeEnv
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.admin.reports import check_there, missing_of, read_report
from greenroom.serve.admin.session import has_reached, raising_users_own, wait_for_goal
from greenroom.serve.build import Built, build
from greenroom.serve.deployments import Application, name_problem
from greenroom.serve.handle import DeploymentHandle

FIRST_CHECK_S, CHECK_EVERY_S = 1.0, 3.0
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
        wait(connection, goal, name, on_wait)
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


def wait(
    connection: Connection,
    goal: str | None,
    name: str,
    on_wait: Callable[[str], None] | None,
    timeout_s: float | None = None,
    began_at: float | None = None,
) -> None:
    """Wait for an application's goal, ``timeout_s`` from now or ``began_at`` on.

    ``on_wait`` gets what it waits for, when that is another thing than before. TimeoutError says
    that too; what made the change fail is raised as it is.
    """
    if goal is None:
        return
    began_at = time.monotonic() if began_at is None else began_at
    deadline = math.inf if timeout_s is None else began_at + timeout_s
    message, checks = "", 0
    while not has_reached(connection, goal, _until_check(checks, deadline)):
        checks += 1
        application = read_report(connection)["applications"].get(name) or {}
        before, message = message, str(application.get("message") or "")
        if message and message != before and on_wait is not None:
            on_wait(message)
        if time.monotonic() >= deadline:
            is_leaving = application.get("status") == "DELETING"
            does = "is not gone" if is_leaving else "does not run as asked for"
            why = f": {message}" if message else ""
            raise TimeoutError(
                f"application {name!r} {does} after {timeout_s:g} s{why}; it goes on, "
                "`greenroom status` shows how far it is"
            )


def _until_check(checks: int, deadline: float) -> float:
    """Return how long to wait for the next check: errors are seen soon, a long wait is cheap."""
    left_s = max(deadline - time.monotonic(), 0.1)
    return min(pause_s(checks + 1, FIRST_CHECK_S, CHECK_EVERY_S), left_s)


def delete(connection: Connection, name: str) -> bool:
    """Delete an application and wait until it is gone; False when there was none."""
    goal = connection.request(ops.DeleteApplication(application=name))
    wait_for_goal(connection, goal)
    return goal is not None
