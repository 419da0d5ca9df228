"""The hard state: what is checkpointed, as plain frozen values, one record per thing.

A change makes a new record; a record never changes. Code is stored apart, once, by its hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BackendRecord:
    """A backend, and the tags of its replicas that may have a process."""

    tag: str
    code_hash: str  # what makes two backends equal: code and version
    code_digest: str  # the name of the stored code
    config: Mapping[str, Any]  # fields of core.config.BackendConfig
    config_id: int = 1  # grows with each change of config
    actor_options: Mapping[str, Any] = field(default_factory=dict)
    version: str | None = None
    application: str = ""
    deployment: str = ""
    deleting: bool = False
    force: bool = False  # deleting without draining
    ran: bool = False  # all its replicas ran at once, at some time
    failure: str = ""  # why it was given up
    exception: bytes | None = None
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EndpointRecord:
    """An endpoint and its traffic policy."""

    name: str
    route: str | None = None
    methods: tuple[str, ...] = ()
    traffic: Mapping[str, float] = field(default_factory=dict)
    application: str = ""


@dataclass(frozen=True, kw_only=True)
class DeploymentRecord:
    """One deployment of an application: the backend it should run, and the one that serves."""

    name: str
    target: str
    serving: str | None = None
    failure: str = ""  # why the last change failed; the serving backend is an earlier one
    exception: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class ApplicationRecord:
    """Deployments deployed together."""

    name: str
    ingress: str
    route_prefix: str | None
    deployments: Mapping[str, DeploymentRecord]
    deleting: bool = False


@dataclass(frozen=True, kw_only=True)
class GoalRecord:
    """A change under way, or lately ended. ``subject`` is (kind, name) of what is changed."""

    id: str
    subject: tuple[str, str]
    what: str
    created_at: float  # seconds since the epoch
    state: str = "pending"  # or succeeded, failed
    error: str = ""
    exception: bytes | None = None
