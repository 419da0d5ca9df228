"""What user code may ask about the query it runs, and about the replica that it runs in.

A query costs one context variable, which holds its assignment as it came; a
:class:`RequestContext` is made of it only for who asks.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from understudy.actors.messages import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaContext:
    """One replica; ``servable_object`` is None until the constructor has returned."""

    app_name: str  # "" for a backend that belongs to no application
    deployment: str  # the backend's tag where it belongs to no application
    replica_tag: str
    backend: str
    version: str | None
    servable_object: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """One query, as user code sees it; all empty where none is being run.

    ``request_id`` is that of the query on whose behalf user code called, where it is a call of its.
    ``is_shadow``: a copy, whose result nobody gets, or a call on behalf of one. Code that charges,
    mails or writes should not.
    """

    request_id: str = ""
    route: str = ""  # the endpoint's; "" for a call through a handle
    endpoint: str = ""
    app_name: str = ""
    backend: str = ""
    version: str | None = None
    replica_tag: str = ""
    is_shadow: bool = False
    is_http_request: bool = False
    multiplexed_model_id: str = ""


running: ContextVar[Assignment | None] = ContextVar("understudy_assignment", default=None)
running_batch: ContextVar[tuple[Assignment | None, ...]] = ContextVar(
    "understudy_batch", default=()
)
_replica: ReplicaContext | None = None


def install(context: ReplicaContext | None) -> None:
    """Make ``context`` this process's; a replica does it before it loads user code."""
    global _replica  # noqa: PLW0603  # one per process, like the process's actor
    _replica = context


def constructed(servable_object: Any) -> None:
    """Add what user code has made of itself to the replica's context."""
    if _replica is not None:
        install(replace(_replica, servable_object=servable_object))


def replica_context() -> ReplicaContext | None:
    """Return this process's replica, or None when it is no replica."""
    return _replica


def request_context() -> RequestContext:
    """Return the query that the calling task or thread runs; an empty one where it runs none."""
    return _context_of(running.get())


def batch_request_context() -> list[RequestContext]:
    """Return the queries of the batch that the calling task runs, in the items' order."""
    return [_context_of(assignment) for assignment in running_batch.get()]


def _context_of(assignment: Assignment | None) -> RequestContext:
    replica = _replica
    if assignment is None or replica is None:
        return RequestContext()
    is_http = bool(assignment.query.http_method)
    return RequestContext(
        request_id=assignment.query.request_id,
        route=assignment.route if is_http else "",
        endpoint=assignment.endpoint,
        app_name=replica.app_name,
        backend=replica.backend,
        version=replica.version,
        replica_tag=replica.replica_tag,
        is_shadow=_is_for_shadow(assignment),
        is_http_request=is_http,
        multiplexed_model_id=assignment.query.multiplexed_model_id,
    )


def origin() -> tuple[str, bool]:
    """Return what calls made here inherit: the request id, "" for none, and is_shadow."""
    assignment = running.get()
    if assignment is None:
        return "", False
    return assignment.query.request_id, _is_for_shadow(assignment)


def batching_group(assignment: Assignment | None) -> Hashable:
    """Return what queries must have in common to be run in one batch.

    Calls made by a batch are made for its first query, and inherit what that is; and its model is
    that of all.
    """
    if assignment is None:
        return None
    return _is_for_shadow(assignment), assignment.query.multiplexed_model_id


def multiplexed_model_id() -> str:
    """Return the model that the running query asks for; "" for none."""
    assignment = running.get()
    return "" if assignment is None else assignment.query.multiplexed_model_id


def _is_for_shadow(assignment: Assignment) -> bool:
    return assignment.caller is None or assignment.query.for_shadow
