"""Applications over a connection: deploy, delete, and what the status says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from greenroom.core import operations as ops
from greenroom.core.config import LoggingConfig, RuntimeEnv
from greenroom.core.errors import DeployFailedError, InvalidRequestError, UnknownNameError
from greenroom.serve.admin.session import wait_for_goal
from greenroom.serve.build import BuiltApplication, build
from greenroom.serve.checks import check_answers_http
from greenroom.serve.deployments import Application, name_problem
from greenroom.serve.handle import DeploymentHandle

if TYPE_CHECKING:
    from greenroom.actors.runtime.connection import Connection

TELL_EVERY_S = 3.0


def check_target(name: str, route_prefix: str | None) -> None:
    """Raise InvalidRequestError unless an application may have this name and prefix."""
    problems = [name_problem("name", name)]
    if wrong := ops.route_problem(route_prefix):
        problems.append(f"route_prefix={route_prefix!r}: {wrong}")
    if told := [problem for problem in problems if problem]:
        raise InvalidRequestError("; ".join(told))


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

    ``logging_config`` is for the deployments without one. ``on_wait`` is told what it still waits
    for, when that is another thing than before. ``runtime_env`` is what deployments have where they
    give nothing else.
    """
    built = build_in(runtime_env, application, name, route_prefix).logging_as(logging_config)
    check_needs(connection, built)
    missing = missing_of(connection, built.folders)
    goal = connection.request(
        ops.DeployApplication(
            application=name,
            ingress=built.ingress,
            route_prefix=route_prefix,
            deployments=built.deployments,
            folders=missing,
        )
    )
    is_reached = (
        goal is not None
        and on_wait is not None
        and _tell_while_waiting(connection, goal, name, on_wait)
    )
    if not is_reached:
        wait_for_goal(connection, goal)
    return DeploymentHandle(built.ingress, name, client=connection.queries)


def build_in(
    runtime_env: RuntimeEnv | None,
    application: Application,
    name: str,
    route_prefix: str | None,
) -> BuiltApplication:
    """Build an application, and pack the folders of its runtime_envs.

    InvalidRequestError where there is a route, and HTTP requests could call nothing there.
    """
    built = build(application, name, runtime_env)
    if route_prefix is not None:
        ingress = application.deployment
        check_answers_http(
            f"deployment {built.ingress!r}",
            ingress.func_or_class,
            allow_method_header=ingress.config.allow_method_header,
        )
    return built


def missing_of(connection: Connection, folders: Mapping[str, bytes]) -> tuple[bytes, ...]:
    """Return those zips, of ``folders`` by their digests, that are to be sent: not stored yet."""
    if not folders:
        return ()
    missing = connection.request(ops.ListMissing(digests=tuple(folders)))
    return tuple(folders[digest] for digest in missing)


def _tell_while_waiting(
    connection: Connection, goal: str, name: str, on_wait: Callable[[str], None]
) -> bool:
    """Return whether the goal is reached; whoever waits for a failed one is told in full."""
    request, told = ops.WaitForGoal(goal_id=goal), ""
    while True:
        try:
            connection.request(request, timeout_s=TELL_EVERY_S)
        except TimeoutError:
            application = read_report(connection)["applications"].get(name) or {}
            before, told = told, str(application.get("message") or "")
            if told != before:
                on_wait(told)
        except DeployFailedError:
            return False
        else:
            return True


def delete(connection: Connection, name: str) -> bool:
    """Delete an application and wait until it is gone; False when there was none."""
    goal = connection.request(ops.DeleteApplication(application=name))
    wait_for_goal(connection, goal)
    return goal is not None


def read_report(connection: Connection, timeout_s: float | None = None) -> dict[str, Any]:
    """Return the object that ``greenroom status --json`` prints."""
    report: dict[str, Any] = connection.request(ops.GetStatus(), timeout_s=timeout_s)
    return report


def read_autoscaling(connection: Connection, timeout_s: float | None = None) -> dict[str, Any]:
    """Return the object that ``greenroom status --autoscaling --json`` prints."""
    report: dict[str, Any] = connection.request(ops.GetAutoscaling(), timeout_s=timeout_s)
    return report


def ingress_of(report: dict[str, Any], name: str) -> str:
    """Return the name of an application's ingress; UnknownNameError naming those there are."""
    application = _entry(report.get("applications") or {}, name, "application")
    deployments = application["deployments"]
    if ingress := application.get("ingress"):
        return str(ingress)
    endpoints = report.get("endpoints") or {}
    routed = [d for d in deployments if (endpoints.get(f"{name}#{d}") or {}).get("route")]
    return str((routed or list(deployments))[-1])  # the ingress is deployed last


def check_needs(connection: Connection, built: BuiltApplication) -> None:
    """Raise UnknownNameError unless there is all that the application has handles of."""
    if not built.needs:
        return
    report = read_report(connection)
    for handle in built.needs:
        if handle.app_name is None:
            _entry(report.get("endpoints") or {}, handle.deployment_name, "endpoint")
        else:
            check_deployment(report, handle.deployment_name, handle.app_name)


def check_deployment(report: dict[str, Any], deployment: str, name: str) -> None:
    """Raise UnknownNameError unless the application has the deployment."""
    application = _entry(report.get("applications") or {}, name, "application")
    _entry(application["deployments"], deployment, f"deployment of application {name!r}")


def _entry(entries: dict[str, Any], name: str, what: str) -> Any:
    if name not in entries:
        known = ", ".join(sorted(entries)) or "none"
        raise UnknownNameError(f"no {what} is named {name!r}; there are: {known}")
    return entries[name]
