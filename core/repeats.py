"""Which queries may be sent again when the replica that had them died, and how many of them.

Whether one may be repeated is for the nearest to say who knows: the handle that it comes through,
else its endpoint, else the deployment that runs it, else its HTTP method. A query that has not run
(it never left, or its replica had no room) is not repeated when it is sent again: none of this
concerns it.

How many is for a budget. Repeats hit a backend when it is at its weakest; where every query kills
its replica, three attempts each would triple the load on those that come up again. So a query that
is run pays a token in, and a repeat takes one out. That is the token bucket of Finagle's
RetryBudget (https://twitter.github.io/finagle/guide/Clients.html#retries), with its percentCanRetry
at one: retries never more than double the load. A replica may die with all its queries under way,
of which clients shall notice nothing, and a smaller share would not reach for them. Finagle's
tokens expire; ours do not, but there are never more than a backend has slots, and SPARE: enough to
repeat all that is under way anywhere once, and no hoard for a storm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from greenroom.core.tickets import Effects, NotRepeated, QueryLike, Repeated, Ticket

if TYPE_CHECKING:
    from greenroom.core.queueing import RoutedBackend
    from greenroom.core.traffic import RoutedEndpoint

MAX_ATTEMPTS = 3  # a query that kills its replica must not kill all of them in turn
# For answers of the last moment before a death: nobody knows yet whether they have arrived, because
# callers confirm them by the dozen, so they are repeated too.
SPARE = 128
REPEATABLE_METHODS = frozenset(
    {"GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"}
)  # RFC 9110, 9.2.2


def may_repeat(query: QueryLike, endpoint: bool | None, deployment: bool | None) -> bool:
    """Tell whether a query may be run again; None is for who leaves it to the next."""
    for said in (query.retryable, endpoint, deployment):
        if said is not None:
            return said
    return query.http_method in REPEATABLE_METHODS


def may_be_resent(
    query: QueryLike, endpoint: RoutedEndpoint, backends: Mapping[str, RoutedBackend]
) -> bool:
    """Tell whether a query that another router had may be run again, wherever it may have run."""
    tables = [backends[tag].table for tag in endpoint.split.tags if tag in backends]
    words = {table.retryable for table in tables} or {None}
    return all(may_repeat(query, endpoint.table.retryable, word) for word in words)


def repeat(
    ticket: Ticket, endpoint: RoutedEndpoint | None, backend: RoutedBackend | None
) -> tuple[str, Effects]:
    """Have a query sent again whose replica has died, if it may be.

    Return why it is not, "" where it is, and what is to be told of that.
    """
    of_endpoint = None if endpoint is None else endpoint.table.retryable
    of_backend = None if backend is None else backend.table.retryable
    if ticket.is_copy or ticket.begun or not may_repeat(ticket.query, of_endpoint, of_backend):
        return f"{ticket.endpoint}: the replica died with this query under way; it may have run", []
    if ticket.attempts >= MAX_ATTEMPTS:
        return f"{ticket.endpoint}: {ticket.attempts} replicas died with this query under way", []
    if not ticket.budget.take_out():
        return (
            f"{ticket.endpoint}: the replica died with this query under way, and it is not sent to "
            "another: retries are limited to as many as there are queries, and used up"
        ), [NotRepeated(ticket.endpoint, ticket.backend)]
    return "", [Repeated(ticket.endpoint, ticket.backend)]


class RepeatBudget:
    """Tokens that queries pay in and repeats take out."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: int = 0) -> None:
        self.tokens = tokens

    def pay_in(self, most: int) -> None:
        """Count a query; there are never more tokens than ``most`` and SPARE."""
        if self.tokens < most + SPARE:
            self.tokens += 1

    def take_out(self) -> bool:
        """Take a token for a repeat; False where there is none."""
        if not self.tokens:
            return False
        self.tokens -= 1
        return True
