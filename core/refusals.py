"""What callers are told when the router does not have their query run."""

from __future__ import annotations

from collections.abc import Hashable

from greenroom.core.errors import (
    DeploymentUnavailableError,
    GreenroomError,
    RouteNotFoundError,
)
from greenroom.core.tables import BackendTable
from greenroom.core.tickets import QueryLike, Refuse, Ticket


def refusal(
    caller: Hashable,
    query: QueryLike,
    kind: type[GreenroomError],
    text: str,
    allowed: tuple[str, ...] = (),
    after_s: float | None = None,
) -> Refuse:
    """Make the answer with this kind of error; ``after_s`` replaces its usual retry_after_s."""
    after_s = kind.retry_after_s if after_s is None else after_s
    return Refuse(caller, query.id, kind.__name__, text, after_s, allowed)


def not_found(caller: Hashable, query: QueryLike) -> Refuse:
    """Make the answer where there is no endpoint."""
    if query.endpoint is not None:
        text = f"no endpoint is named {query.endpoint!r}"
        return refusal(caller, query, DeploymentUnavailableError, text)
    text = f"Path {query.path!r} not found. Ping /-/routes for available routes."
    return refusal(caller, query, RouteNotFoundError, text)


def unavailable(ticket: Ticket, table: BackendTable) -> str:
    """Say why no replica is to be expected."""
    return f"{ticket.endpoint} is unavailable: {table.unavailable}"


def no_time_left(ticket: Ticket, run_s: float, now: float) -> str:
    """Say why a query is not begun when its turn has come."""
    left_s = ticket.left_s(now)
    if left_s <= 0:
        return f"no answer within {ticket.time_limit_s:.6g} s"
    return (
        f"no answer within {ticket.time_limit_s:.6g} s: when its turn came {left_s:.3g} s were "
        f"left, and a query takes about {run_s:.3g} s"
    )


def proxy_died(endpoint: str) -> str:
    """Say why a query that an earlier router may have had run is not taken."""
    return f"{endpoint}: the proxy died with this query under way; it may have run"
