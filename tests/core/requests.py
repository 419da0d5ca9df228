"""Shorthands for requests to a Cluster, with what a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenroom.core.cluster.state import Cluster
from greenroom.core.lifecycle import deploying

from .worlds import Spec  # noqa: TID251 - the tests' own folder

Request = Callable[[Cluster], Any]


def create(tag: str, code: bytes = b"code", hash_of: str = "", **config: Any) -> Request:
    return lambda cluster: cluster.create_backend(
        tag,
        code=code,
        code_hash=hash_of or f"hash-of-{code.decode()}",
        config=config,
        actor_options={},
        version=None,
        wall_now=1.0,
    )


def update(tag: str, **changes: Any) -> Request:
    return lambda cluster: cluster.update_backend_config(tag, changes, 2.0)


def delete(tag: str, *, force: bool = False) -> Request:
    return lambda cluster: cluster.delete_backend(tag, force=force, wall_now=3.0)


def endpoint(
    name: str, backend: str, route: str | None = None, methods: tuple[str, ...] = ("GET",)
) -> Request:
    return lambda cluster: cluster.create_endpoint(
        name, backend=backend, route=route, methods=methods
    )


def deploy(app: str, *specs: Spec, route: str | None = "/", ingress: str = "") -> Request:
    return lambda cluster: deploying.deploy_application(
        cluster,
        app,
        ingress=ingress or specs[0].name,
        route_prefix=route,
        specs=specs,
        wall_now=4.0,
    )


def undeploy(app: str) -> Request:
    return lambda cluster: deploying.delete_application(cluster, app, 5.0)
