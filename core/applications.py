"""Applications: deployments brought up together, each a backend and the endpoint of its name.

New code is a new backend beside the old one (tag ``app#deployment#<code hash>``). Traffic moves
when all its replicas run; only then the old one is stopped. If the new code cannot start, it is
deleted and the old one goes on serving. Settings alone are changed in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from understudy.core.config import ActorOptions, BackendConfig, validated
from understudy.core.endpoints import check_free, check_route
from understudy.core.errors import InvalidRequestError
from understudy.core.goals import Progress
from understudy.core.names import wrong_with
from understudy.core.records import (
    ApplicationRecord,
    BackendRecord,
    DeploymentRecord,
    EndpointRecord,
)
from understudy.core.tables import BACKEND_PREFIX, ENDPOINT_PREFIX

if TYPE_CHECKING:
    from understudy.core.cluster import Cluster

TAG_HASH_LENGTH = 12


class SpecLike(Protocol):
    """One deployment, as a deploy call describes it."""

    @property
    def name(self) -> str:
        """Its name within the application."""

    @property
    def code(self) -> bytes:
        """What a replica loads."""

    @property
    def code_hash(self) -> str:
        """What makes two backends equal: code and version."""

    @property
    def version(self) -> str | None:
        """What the user calls it."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Fields of BackendConfig."""

    @property
    def actor_options(self) -> Mapping[str, Any]:
        """Fields of ActorOptions."""


def endpoint_name(application: str, deployment: str) -> str:
    """Return the name of a deployment's endpoint, which handles ask for."""
    return f"{application}#{deployment}"


def backend_tag(application: str, deployment: str, code_hash: str) -> str:
    """Return the tag of the backend that runs this code of a deployment."""
    return f"{endpoint_name(application, deployment)}#{code_hash[:TAG_HASH_LENGTH]}"


def deploy(
    cluster: Cluster,
    name: str,
    ingress: str,
    route_prefix: str | None,
    specs: Iterable[SpecLike],
) -> bool:
    """Change the application's records to these deployments; False when nothing changes."""
    specs = tuple(specs)
    configs = _check(cluster, name, ingress, route_prefix, specs)
    before = cluster.applications.get(name)
    changed = before is None or before.deleting
    # What is being deleted serves no more: such an application comes up like a new one.
    old = {} if before is None or before.deleting else dict(before.deployments)
    new: dict[str, DeploymentRecord] = {}
    for spec in specs:
        tag = backend_tag(name, spec.name, spec.code_hash)
        previous = old.get(spec.name)
        changed |= _bring_up(cluster, name, tag, spec, configs[spec.name])
        if previous is None:
            new[spec.name] = DeploymentRecord(name=spec.name, target=tag)
        else:
            if previous.target not in {previous.serving, tag}:
                _delete_backend(cluster, previous.target)
            changed |= bool(previous.target != tag or previous.failure)
            new[spec.name] = replace(previous, target=tag, failure="", exception=None)
        route = route_prefix if spec.name == ingress else None
        changed |= _put_endpoint(cluster, name, new[spec.name], route)
    for gone in set(old) - set(new):
        _delete_deployment(cluster, name, old[gone])
        changed = True
    record = ApplicationRecord(
        name=name, ingress=ingress, route_prefix=route_prefix, deployments=new
    )
    cluster.put_application(record)
    return changed


def delete(cluster: Cluster, name: str) -> None:
    """Drop the application's endpoints at once, and have its backends drained."""
    application = cluster.applications[name]
    for deployment in application.deployments.values():
        _delete_deployment(cluster, name, deployment)
    cluster.put_application(replace(application, deleting=True))


def advance(cluster: Cluster, name: str) -> None:
    """Move traffic to what has come up, go back from what has failed, forget what is gone."""
    application = cluster.applications.get(name)
    if application is None:
        return
    if application.deleting:
        if not any(b.record.application == name for b in cluster.backends.values()):
            cluster.drop_application(name)
        return
    deployments = {
        key: _advance_deployment(cluster, application, deployment)
        for key, deployment in application.deployments.items()
    }
    cluster.put_application(replace(application, deployments=deployments))


def progress(cluster: Cluster, name: str) -> Progress:
    """Tell how far an application is: done when it serves and every proxy knows."""
    application = cluster.applications.get(name)
    if application is None:
        return Progress(done=True)
    if application.deleting:
        return Progress()
    for deployment in application.deployments.values():
        if deployment.failure:
            text = f"deployment {deployment.name!r} of application {name!r}: {deployment.failure}"
            return Progress(error=text, exception=deployment.exception)
    return Progress(done=all(is_up(cluster, name, d) for d in application.deployments.values()))


def is_up(cluster: Cluster, application: str, deployment: DeploymentRecord) -> bool:
    """Tell whether a deployment's target serves, and every proxy holds its tables."""
    backend = cluster.backends.get(deployment.target)
    held = cluster.long_poll.held_by_all
    return (
        deployment.serving == deployment.target
        and backend is not None
        and backend.settled
        and held(BACKEND_PREFIX + deployment.target)
        and held(ENDPOINT_PREFIX + endpoint_name(application, deployment.name))
    )


def _check(
    cluster: Cluster,
    name: str,
    ingress: str,
    route_prefix: str | None,
    specs: tuple[SpecLike, ...],
) -> dict[str, tuple[BackendConfig, ActorOptions]]:
    names = [spec.name for spec in specs]
    if bad := [each for each in [name, *names] if wrong_with(each)]:
        wrong = wrong_with(bad[0])
        raise InvalidRequestError(f"names {bad!r}: {wrong}")
    if ingress not in names or len(set(names)) != len(names):
        raise InvalidRequestError(
            f"application {name!r}: deployments {names!r} must be different and contain the "
            f"ingress {ingress!r}"
        )
    if not all(isinstance(s.code, bytes) and isinstance(s.code_hash, str) for s in specs):
        # Refused here, because the first deployments of a list must not come up without the last.
        raise InvalidRequestError(f"application {name!r}: expected code as bytes, and its hash")
    endpoint = endpoint_name(name, ingress)
    others = {e.name: e for e in cluster.endpoints.values() if e.application != name}
    check_free(others, endpoint, check_route(route_prefix))
    return {spec.name: _settings(spec) for spec in specs}


def _settings(spec: SpecLike) -> tuple[BackendConfig, ActorOptions]:
    try:
        return (
            validated(BackendConfig, spec.config),
            validated(ActorOptions, spec.actor_options),
        )
    except InvalidRequestError as error:
        raise InvalidRequestError(f"deployment {spec.name!r}: {error}") from None


def _bring_up(
    cluster: Cluster,
    application: str,
    tag: str,
    spec: SpecLike,
    settings: tuple[BackendConfig, ActorOptions],
) -> bool:
    """Have a backend for this code with these settings; False when there is just that."""
    config, options = settings
    backend = cluster.backends.get(tag)
    if backend is None:
        record = BackendRecord(
            tag=tag,
            code_hash=spec.code_hash,
            code_digest=hashlib.sha256(spec.code).hexdigest(),
            config=config.model_dump(),
            actor_options=options.model_dump(),
            version=spec.version,
            application=application,
            deployment=spec.name,
        )
        cluster.add_backend(record, spec.code)
        return True
    cluster.keep_code(backend.record, spec.code)
    changed = backend.set_config(config)
    if backend.record.deleting or backend.record.failure:
        backend.try_again()
        changed = True
    if backend.record.actor_options != options.model_dump():
        backend.update(actor_options=options.model_dump())
        changed = True
    cluster.touch(tag)
    return changed


def _put_endpoint(
    cluster: Cluster, application: str, deployment: DeploymentRecord, route: str | None
) -> bool:
    name = endpoint_name(application, deployment.name)
    record = EndpointRecord(
        name=name,
        route=route,
        traffic={deployment.serving or deployment.target: 1.0},
        application=application,
    )
    if cluster.endpoints.get(name) == record:
        return False
    cluster.put_endpoint(record)
    return True


def _advance_deployment(
    cluster: Cluster, application: ApplicationRecord, deployment: DeploymentRecord
) -> DeploymentRecord:
    backend = cluster.backends.get(deployment.target)
    if backend is None or deployment.serving == deployment.target:
        return deployment
    if backend.record.failure:
        return _give_up(cluster, deployment)
    if not backend.settled:
        return deployment
    old, deployment = deployment.serving, replace(deployment, serving=deployment.target)
    route = application.route_prefix if deployment.name == application.ingress else None
    _put_endpoint(cluster, application.name, deployment, route)
    if old is not None:
        _delete_backend(cluster, old)
    return deployment


def _give_up(cluster: Cluster, deployment: DeploymentRecord) -> DeploymentRecord:
    failed = cluster.backends[deployment.target].record
    changes: dict[str, Any] = {"failure": failed.failure, "exception": failed.exception}
    if deployment.serving is not None:
        _delete_backend(cluster, deployment.target)
        changes["target"] = deployment.serving
    return replace(deployment, **changes)


def _delete_deployment(cluster: Cluster, application: str, deployment: DeploymentRecord) -> None:
    cluster.drop_endpoint(endpoint_name(application, deployment.name))
    for tag in {deployment.target, deployment.serving} - {None}:
        _delete_backend(cluster, str(tag))


def _delete_backend(cluster: Cluster, tag: str) -> None:
    backend = cluster.backends.get(tag)
    if backend is not None:
        backend.delete()
        cluster.touch(tag)
