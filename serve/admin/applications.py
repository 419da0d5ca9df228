"""Applications over a connection: deploy, delete."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from greenroom.actors.caller.connection import Connection
from greenroom.core import operations as ops
from greenroom.serve.admin.reports import check_there, missing_of
from greenroom.serve.admin.session import LEAST_S, raising_users_own, wait_for_goal
from greenroom.serve.build import Built
from greenroom.serve.handle import DeploymentHandle

_DEFAULT_FLAGS = ops.DeployFlags()


def deploy(
    connection: Connection, built: Built, on_wait: Callable[[str], None] | None = None
) -> DeploymentHandle:
    """Bring one application up and wait for it; raises what its constructor raised.

    ``on_wait`` gets what it still waits for, when that is another thing than before.
    """
    (application,) = built.applications
    goal = apply(connection, built)["goals"].get(application.name)
    with raising_users_own():
        wait_for_goal(connection, goal, on_wait=on_wait)
    return DeploymentHandle(application.ingress, application.name, client=connection.queries)


def apply(
    connection: Connection,
    built: Built,
    flags: ops.DeployFlags = _DEFAULT_FLAGS,
    *,
    from_file: bool = False,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Make the applications be these, in one change, or answer what that would change.

    Those that are not ``from_file`` are deployed beside all others. Returns at once, with the goals
    to wait for or with the plan: see DeployApplications and PlanApplications. ConflictError where
    the version is not the one of the flags; TimeoutError where the controller does not answer all
    requests that this takes within ``timeout_s``.
    """
    deadline = time.monotonic() + (timeout_s or 0)

    def left_s() -> float | None:
        """Return what earlier requests have left, in tenths: a TimeoutError shows it."""
        return None if timeout_s is None else max(round(deadline - time.monotonic(), 1), LEAST_S)

    check_there(connection, built.needs, left_s())
    which: dict[str, Any] = {
        "applications": built.applications,
        "keep_others": flags.keep_others or not from_file,
        "from_file": from_file,
        "prune": flags.prune,
    }
    if flags.plan:
        plan: dict[str, Any] = connection.request(ops.PlanApplications(**which), timeout_s=left_s())
        return plan
    operation = ops.DeployApplications(
        **which,
        if_version=flags.if_version,
        canary=flags.rollout,
        folders=missing_of(connection, built.folders, left_s()),
    )
    answer: dict[str, Any] = connection.request(operation, timeout_s=left_s())
    return answer


def delete(connection: Connection, name: str) -> bool:
    """Delete an application and wait until it is gone; False when there was none."""
    goal = connection.request(ops.DeleteApplication(application=name))
    wait_for_goal(connection, goal)
    return goal is not None
