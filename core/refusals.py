"""What callers are told when the router does not have their query run."""

from __future__ import annotations

from collections.abc import Hashable

from understudy.core.errors import (
    DeploymentUnavailableError,
    RouteNotFoundError,
    UnderstudyError,
)
from understudy.core.tables import BackendTable
from understudy.core.tickets import QueryLike, Refuse, Ticket


def refusal(
    caller: Hashable,
    query: QueryLike,
    kind: type[UnderstudyError],
    text: str,
    allowed: tuple[str, ...] = (),
) -> Refuse:
    """Make the answer with this kind of error."""
    return Refuse(caller, query.id, kind.__name__, text, kind.retry_after_s, allowed)


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


def died(ticket: Ticket) -> str:
    """Say why a query is not sent to yet another replica."""
    if ticket.query.repeatable:
        return f"{ticket.endpoint}: {ticket.attempts} replicas died with this query under way"
    return f"{ticket.endpoint}: the replica died with this query under way; it may have run"
