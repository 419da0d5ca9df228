"""What a client may rely on: a model of its own things, by what it asked and was answered.

Each request leads from one :class:`Owned` to the next, or is to be refused. A deployment that was
updated may have been rolled back, to any version that it had, if its record says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from greenroom.core import operations as ops
from greenroom.core.records import BackendRecord, EndpointRecord

Version = tuple[str, dict[str, Any]]  # the code's digest, the settings


@dataclass(frozen=True)
class Endpoint:
    """An endpoint as it should be."""

    traffic: dict[str, float]
    made_with: str
    shadows: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Owned:
    """Everything of one client; a backend's or deployment's versions are newest first."""

    backends: dict[str, list[Version]] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)

    def after(self, request: ops.Operation) -> Owned | None:
        """Return what a request leads to; None where it is to be refused."""
        return _RULES.get(type(request), _unchanged)(self, request)

    def adopting(self, kind: str, name: str, definition: Any) -> Owned:
        """Return it with a thing that the cluster has changed by itself, or for an undo."""
        if kind == "endpoint":
            made = None
            if definition is not None:
                shares = dict(definition.traffic), dict(definition.shadows)
                made = Endpoint(shares[0], definition.made_with, shares[1])
            return _with_endpoint(self, name, made)
        if definition is None:
            return _with_backend(self, name, None)
        version = definition.code_digest, dict(definition.config)
        return _with_backend(self, name, [version, *self.backends.get(name, [])])

    def differs(self, earlier: Owned) -> bool:
        """Return whether anything that is wanted differs."""
        newest = [{n: v[0] for n, v in each.backends.items()} for each in (self, earlier)]
        return newest[0] != newest[1] or self.endpoints != earlier.endpoints

    def fits(self, kind: str, name: str, record: Any) -> bool:
        """Return whether a record on disk, or its absence, is as it should be."""
        if kind == "endpoint":
            wanted = self.endpoints.get(name)
            if record is None or wanted is None:
                return record is None and wanted is None
            return _is_endpoint(record, wanted)
        versions = self.backends.get(name)
        if record is None or versions is None or record.deleting:
            return versions is None and (record is None or record.deleting)
        return _is_backend(record, versions)


def _is_endpoint(record: EndpointRecord, wanted: Endpoint) -> bool:
    return (dict(record.traffic), dict(record.shadows)) == (wanted.traffic, wanted.shadows)


def _is_backend(record: BackendRecord, versions: list[Version]) -> bool:
    now = (record.newest.code_digest, dict(record.newest.config))
    return now == versions[0] or (bool(record.update_failure) and now in versions)


def _version(code: bytes, config: dict[str, Any]) -> Version:
    return hashlib.sha256(code).hexdigest(), config


def _unchanged(owned: Owned, _request: Any) -> Owned:
    return owned


def _with_backend(owned: Owned, tag: str, versions: list[Version] | None) -> Owned:
    backends = {name: each for name, each in owned.backends.items() if name != tag}
    return replace(owned, backends=backends | ({} if versions is None else {tag: versions}))


def _with_endpoint(owned: Owned, name: str, endpoint: Endpoint | None) -> Owned:
    endpoints = {other: each for other, each in owned.endpoints.items() if other != name}
    return replace(owned, endpoints=endpoints | ({} if endpoint is None else {name: endpoint}))


def _create_backend(owned: Owned, r: ops.CreateBackend) -> Owned | None:
    if r.tag in owned.backends:
        return None
    return _with_backend(owned, r.tag, [_version(r.code, r.config.model_dump())])


def _update_backend(owned: Owned, r: ops.UpdateBackendConfig) -> Owned | None:
    if r.tag not in owned.backends:
        return None
    digest, config = owned.backends[r.tag][0]
    return _with_backend(owned, r.tag, [(digest, {**config, **r.changes})])


def _delete_backend(owned: Owned, r: ops.DeleteBackend) -> Owned | None:
    if any(r.tag in e.traffic or r.tag in e.shadows for e in owned.endpoints.values()):
        return None
    return _with_backend(owned, r.tag, None)


def _create_endpoint(owned: Owned, r: ops.CreateEndpoint) -> Owned | None:
    present = owned.endpoints.get(r.name)
    if present is not None:
        return owned if present.made_with == r.backend else None
    if r.backend not in owned.backends:
        return None
    return _with_endpoint(owned, r.name, Endpoint({r.backend: 1.0}, r.backend))


def _set_traffic(owned: Owned, r: ops.SetTraffic) -> Owned | None:
    present = owned.endpoints.get(r.endpoint)
    if present is None or not r.weights.keys() <= owned.backends.keys():
        return None
    return _with_endpoint(owned, r.endpoint, replace(present, traffic=dict(r.weights)))


def _shadow_traffic(owned: Owned, r: ops.ShadowTraffic) -> Owned | None:
    present = owned.endpoints.get(r.endpoint)
    if present is None or (r.proportion and r.backend not in owned.backends):
        return None
    shadows = {tag: each for tag, each in present.shadows.items() if tag != r.backend}
    if r.proportion:
        shadows[r.backend] = r.proportion
    return _with_endpoint(owned, r.endpoint, replace(present, shadows=shadows))


def _start_rollout(owned: Owned, r: ops.StartRollout) -> Owned | None:
    return owned if r.endpoint in owned.endpoints and r.to in owned.backends else None


def _deploy(owned: Owned, r: ops.Deploy) -> Owned:
    name = r.spec.name
    versions = [_version(r.spec.code, r.spec.config.model_dump()), *owned.backends.get(name, [])]
    owned = _with_backend(owned, name, versions)
    return (
        owned if name in owned.endpoints else _with_endpoint(owned, name, Endpoint({name: 1.0}, ""))
    )


def _undeploy(owned: Owned, r: ops.DeleteDeployment) -> Owned:
    return _with_backend(_with_endpoint(owned, r.name, None), r.name, None)


_RULES: dict[type[ops.Operation], Callable[[Owned, Any], Owned | None]] = {
    ops.CreateBackend: _create_backend,
    ops.UpdateBackendConfig: _update_backend,
    ops.DeleteBackend: _delete_backend,
    ops.CreateEndpoint: _create_endpoint,
    ops.SetTraffic: _set_traffic,
    ops.ShadowTraffic: _shadow_traffic,
    ops.StartRollout: _start_rollout,
    ops.DeleteEndpoint: lambda owned, r: _with_endpoint(owned, r.name, None),
    ops.Deploy: _deploy,
    ops.DeleteDeployment: _undeploy,
}
