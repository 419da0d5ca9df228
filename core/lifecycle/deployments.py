"""Deployments: a versioned backend together with the endpoint of the same name.

Those that stand alone are made here; applications make theirs of the same parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from greenroom.core.config import ActorOptions, BackendConfig, validated
from greenroom.core.errors import ConflictError, InvalidRequestError, UnknownNameError
from greenroom.core.lifecycle.endpoints import check_free, check_route, users_of
from greenroom.core.lifecycle.goals import Progress
from greenroom.core.records import (
    BACKEND,
    ENDPOINT,
    BackendDefinition,
    BackendRecord,
    Definition,
    EndpointRecord,
    Key,
)
from greenroom.core.routing.tables import BACKEND_PREFIX, ENDPOINT_PREFIX
from greenroom.core.validation import wrong_with

if TYPE_CHECKING:
    from greenroom.core.cluster.state import Cluster


class SpecLike(Protocol):
    """One deployment, as a deploy call describes it."""

    @property
    def name(self) -> str:
        """Its name, within the application if it belongs to one."""

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


# --- Parts, for applications too ------------------------------------------------------------------


def check_code(what: str, spec: SpecLike) -> None:
    """Raise InvalidRequestError for what is no code, or no version of it."""
    if not isinstance(spec.code, bytes) or not isinstance(spec.code_hash, str):
        raise InvalidRequestError(f"{what}: expected code as bytes, and its hash")
    if spec.version is not None and not isinstance(spec.version, str):
        raise InvalidRequestError(f"{what}: version={spec.version!r}: must be a string or None")


def backend_of(spec: SpecLike, *, application: str = "") -> BackendDefinition:
    """Return what a deployment's backend should run; InvalidRequestError naming bad settings."""
    try:
        config = validated(BackendConfig, spec.config)
        options = validated(ActorOptions, spec.actor_options)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"deployment {spec.name!r}: {error}") from None
    return BackendDefinition(
        code_hash=spec.code_hash,
        code_digest=hashlib.sha256(spec.code).hexdigest(),
        config=config.model_dump(),
        actor_options=options.model_dump(),
        version=spec.version,
        application=application,
        deployment=spec.name,
    )


def endpoint_of(cluster: Cluster, name: str, route: str | None, deployment: str) -> EndpointRecord:
    """Return a deployment's endpoint at this route; where its traffic goes now, it stays."""
    present = cluster.endpoints.get(name)
    if present is not None:
        return replace(present, route=route)
    return EndpointRecord(name=name, route=route, traffic={name: 1.0}, deployment=deployment)


def deployment_progress(cluster: Cluster, name: str) -> Progress:
    """Tell how far a deployment is: done when it serves and every proxy knows."""
    backend = cluster.backends.get(name)
    if backend is None:
        return Progress(done=True)
    record = backend.record
    if record.deleting:
        return Progress()
    if error := record.failure or record.update_failure:
        return Progress(error=error, exception=record.exception)
    held = cluster.long_poll.held_by_all
    return Progress(
        done=backend.settled and held(BACKEND_PREFIX + name) and held(ENDPOINT_PREFIX + name)
    )


# --- Those that stand alone -----------------------------------------------------------------------


def wanted(
    cluster: Cluster, spec: SpecLike, route_prefix: str | None, prev_version: str | None
) -> dict[Key, Definition | None]:
    """Return what there should be for a deployment; changes nothing.

    ``prev_version`` must be the version that is deployed, unless it is None. Raises ConflictError
    naming both, or what else holds the name or the route, and InvalidRequestError.
    """
    name = spec.name
    if wrong := wrong_with(name):
        raise InvalidRequestError(f"deployment name {name!r}: {wrong}")
    check_code(f"deployment {name!r}", spec)
    _check_version(cluster, name, prev_version)
    for what, held in (("backend", _held_backend), ("endpoint", _held_endpoint)):
        if held(cluster, name):
            raise ConflictError(
                f"{what} {name!r} exists, and is not a deployment's; choose another name, or "
                "delete it first"
            )
    check_free(cluster.endpoints.at(route_prefix), name, check_route("route_prefix", route_prefix))
    return {
        (BACKEND, name): backend_of(spec),
        (ENDPOINT, name): endpoint_of(cluster, name, route_prefix, name),
    }


def unwanted(cluster: Cluster, name: str) -> dict[Key, Definition | None]:
    """Return what there should be without the deployment; nothing where there is none."""
    if find(cluster, name) is None:
        return {}
    others = [e for e in cluster.endpoints.using(name) if e.name != name]
    if users := users_of(others, name):
        uses = ", ".join(f"{use} of endpoint {other!r}" for other, use in users.items())
        raise ConflictError(
            f"deployment {name!r} has {uses}; delete the endpoint, set its traffic elsewhere, or "
            "end the shadow first"
        )
    return {(ENDPOINT, name): None, (BACKEND, name): None}


def find(cluster: Cluster, name: str) -> BackendRecord | None:
    """Return the record of a deployment that stands alone, or None."""
    backend = cluster.backends.get(name)
    if backend is None or backend.record.deleting or not _stands_alone(backend.record):
        return None
    return backend.record


def get(cluster: Cluster, name: str) -> BackendRecord:
    """Return the record of a deployment that stands alone, or raise UnknownNameError."""
    record = find(cluster, name)
    if record is None:
        known = ", ".join(names(cluster)) or "none"
        raise UnknownNameError(f"no deployment is named {name!r}; there are: {known}")
    return record


def names(cluster: Cluster) -> list[str]:
    """Return the names of the deployments that stand alone."""
    return sorted(name for name in cluster.backends if find(cluster, name) is not None)


def _stands_alone(record: BackendRecord) -> bool:
    return bool(record.deployment) and not record.application


def _held_backend(cluster: Cluster, name: str) -> bool:
    backend = cluster.backends.get(name)
    return backend is not None and not _stands_alone(backend.record)


def _held_endpoint(cluster: Cluster, name: str) -> bool:
    endpoint = cluster.endpoints.get(name)
    return endpoint is not None and not endpoint.deployment


def _check_version(cluster: Cluster, name: str, prev_version: str | None) -> None:
    if prev_version is None:
        return
    record = find(cluster, name)
    if record is None:
        raise ConflictError(
            f"deployment {name!r}: prev_version is {prev_version!r}, but it is not deployed"
        )
    if record.newest.version != prev_version:
        raise ConflictError(
            f"deployment {name!r}: prev_version is {prev_version!r}, but version "
            f"{record.newest.version!r} is deployed; look at what changed, then deploy on top of "
            "that"
        )
