"""What routers get: plain values, one per endpoint and one per backend.

The controller publishes them under long-poll keys ``endpoint/<name>`` and ``backend/<tag>``; a
router holds the newest of each. Addresses and processes are opaque here. While an endpoint has a
rollout, ``rollout/<name>`` names its step, a string: meanwhile, proxies count the outcomes of the
endpoint's queries, and start counting again when the step changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from greenroom.core.formats import travels

ENDPOINT_PREFIX = "endpoint/"
BACKEND_PREFIX = "backend/"
ROLLOUT_PREFIX = "rollout/"


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTable:
    """A running replica, as routers use it."""

    tag: str
    address: Any
    process: Hashable
    host: str = ""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTable:
    """A backend's running replicas and limits. ``unavailable`` says why none is to be expected.

    ``is_wanted``: it is to have replicas. ``is_expected``: it was in full service once, besides, so
    without any it is missed.
    ``has_run``: a replica of it has run, or a query is to wake the first; only then do HTTP
    requests wait for one. ``trouble``: why none has run yet, as far as it is known.
    ``retryable``: whether queries may be run again, as its author says; None if that is not said.
    """

    tag: str
    replicas: tuple[ReplicaTable, ...] = ()
    max_ongoing_requests: int = 100
    max_queued_requests: int = -1
    request_timeout_s: float | None = None
    retryable: bool | None = None
    unavailable: str = ""
    is_wanted: bool = False
    is_expected: bool = False
    session_affinity: Mapping[str, Any] | None = None  # fields of core.config.SessionAffinity
    request_router: Mapping[str, Any] | None = None  # fields of core.config.RequestRouterConfig
    outlier_ejection: bool = True
    has_run: bool = True
    trouble: str = ""
    max_queue_wait_s: float | None = None
    slow_start_s: float = 0.0
    learn_weights: bool = False


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointTable:
    """An endpoint's route and methods, and where its queries go. ``methods`` empty means all.

    ``retryable`` is like that of backends, and goes before theirs.
    ``traffic`` is backend -> weight, ``shadows`` backend -> proportion of queries to mirror there,
    and ``compares`` has (id, settings) for the shadows whose answers are compared.
    ``unavailable`` says why there is no traffic.
    """

    name: str
    route: str | None = None
    methods: tuple[str, ...] = ()
    retryable: bool | None = None
    traffic: Mapping[str, float] = field(default_factory=dict)
    shadows: Mapping[str, float] = field(default_factory=dict)
    compares: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    unavailable: str = ""


def backend_of(replica: ReplicaTable) -> str:
    """Return the backend that a replica is of, which its tag begins with."""
    return replica.tag.rpartition("#")[0]


def order_of_taking(item: tuple[str, tuple[int, Any]]) -> int:
    """Sort a table by its key, so that no endpoint names a backend that is not there."""
    key, (_, table) = item
    if key.startswith(ENDPOINT_PREFIX):
        return 0 if table is None else 2
    return 3 if table is None else 1
