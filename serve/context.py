"""Which query user code runs, and in which replica; where Ray Serve's users look for it."""

from __future__ import annotations

from typing import Any

from greenroom.actors.replica import context as user_context
from greenroom.actors.replica.context import (
    ReplicaContext as ReplicaContext,
    RequestContext as RequestContext,
)
from greenroom.actors.replica.logging import ContextFilter as ContextFilter
from greenroom.actors.runtime import tracing
from greenroom.core.errors import GreenroomError


def get_replica_context() -> ReplicaContext:
    """Return the replica that this code runs in; GreenroomError outside of replicas.

    It may be called from the constructor on, and from any thread of the replica.
    """
    context = user_context.replica_context()
    if context is None:
        raise GreenroomError("get_replica_context() was called outside of a replica")
    return context


def get_request_context() -> RequestContext:
    """Return the query that the calling task or thread runs: request id, route, is_shadow...

    Where no query is run (a constructor, a thread of the user's own) all of it is empty. In a
    function decorated with ``serve.batch`` it is the batch's first query.
    """
    return user_context.request_context()


def get_batch_request_context() -> list[RequestContext]:
    """Return the queries of the batch that the calling task runs, one per item, in their order.

    It is empty outside of functions decorated with ``serve.batch``.
    """
    return user_context.batch_request_context()


def get_trace_context() -> Any:
    """Return the OpenTelemetry context of the query that runs; None where tracing is off."""
    if tracing.active is None:
        return None
    from opentelemetry import context  # noqa: PLC0415  # optional

    return context.get_current()


_get_serve_request_context = get_request_context  # Ray Serve's names
_get_serve_batch_request_context = get_batch_request_context
