"""Shorthands for operations on a Cluster, with what a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenroom.core import operations as ops
from greenroom.core.cluster.admin import CARRIED_OUT, Now
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.lifecycle.state import Change
from tests.core.worlds import Spec

Request = Callable[[Cluster], Any]


def do(kind: type[ops.Operation], **fields: Any) -> Request:
    """Return what works out an operation's change; a read's answer."""
    return lambda cluster: CARRIED_OUT[kind](cluster, kind(**fields), Now(1.0, 1.0))


def create(tag: str, code: bytes = b"code", hash_of: str = "", **config: Any) -> Request:
    code_hash = hash_of or f"hash-of-{code.decode()}"
    return do(ops.CreateBackend, tag=tag, code=code, code_hash=code_hash, config=config)


def update(tag: str, **changes: Any) -> Request:
    return do(ops.UpdateBackendConfig, tag=tag, changes=changes)


def delete(tag: str, *, force: bool = False) -> Request:
    return do(ops.DeleteBackend, tag=tag, force=force)


def endpoint(name: str, backend: str, route: str | None = None, **more: Any) -> Request:
    return do(ops.CreateEndpoint, name=name, backend=backend, route=route, **more)


def unname(name: str) -> Request:
    return do(ops.DeleteEndpoint, name=name)


def traffic(name: str, weights: dict[str, float]) -> Request:
    return do(ops.SetTraffic, endpoint=name, weights=weights)


def shadow(name: str, backend: str, proportion: float, compare: Any = None) -> Request:
    return do(
        ops.ShadowTraffic, endpoint=name, backend=backend, proportion=proportion, compare=compare
    )


def deploy(
    app: str,
    *specs: Spec,
    route: str | None = "/",
    ingress: str = "",
    folders: tuple[bytes, ...] = (),
) -> Request:
    request = do(
        ops.DeployApplications,
        applications=(_application(app, specs, route, ingress),),
        keep_others=True,
        folders=folders,
    )

    def answer_goal(cluster: Cluster) -> Change:
        change = request(cluster)
        return change._replace(answer=lambda made: change.answer(made)["goals"].get(app))

    return answer_goal


def version(code: bytes = b"one", **config: Any) -> Request:
    """Deploy the application "app", which has the one deployment "d"."""
    return deploy("app", Spec("d", code, config))


def plan(app: str, *specs: Spec, route: str | None = "/", ingress: str = "") -> Request:
    """Answer what a deploy of one application would change."""
    request = do(
        ops.PlanApplications,
        applications=(_application(app, specs, route, ingress),),
        keep_others=True,
    )
    return lambda cluster: request(cluster)["changes"]


def deploy_all(*applications: tuple[str, str | None, Spec], **given: Any) -> Request:
    """Deploy a file's applications, each a name, a route and its one deployment."""
    made = tuple(_application(name, (spec,), route, "") for name, route, spec in applications)
    return do(ops.DeployApplications, applications=made, **{"from_file": True, **given})


def _application(
    app: str, specs: tuple[Spec, ...], route: str | None, ingress: str
) -> dict[str, Any]:
    return {
        "name": app,
        "ingress": ingress or specs[0].name,
        "route_prefix": route,
        "deployments": tuple(spec.fields for spec in specs),
    }


def undeploy(app: str) -> Request:
    return do(ops.DeleteApplication, application=app)


def deploy_alone(
    spec: Spec, route: str | None = None, prev_version: str | None = None, **given: Any
) -> Request:
    return do(ops.Deploy, spec=spec.fields, route_prefix=route, prev_version=prev_version, **given)


def undeploy_alone(name: str) -> Request:
    return do(ops.DeleteDeployment, name=name)


def undo(change_id: int | None = None) -> Request:
    return do(ops.UndoChange, change_id=change_id)
