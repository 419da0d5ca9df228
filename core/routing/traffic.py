"""Which backend of an endpoint a query goes to, and which shadows get a copy.

Theory of operation. Without a shard key, chance decides: one uniform number falls into one of the
backends' shares. With one, each backend gets a uniform number of its own, u, from the SHA-256 of
its name and the key, and the backend with the least -ln(u) / weight gets the query. Those are the
arrival times of independent Poisson processes with the weights as their rates, and each is the
first to arrive with just the probability of its weight. Nothing else goes into it, so every proxy
decides alike, before and after any restart.

How many keys a change of weights moves. A key goes from one backend to another only if the other's
weight has grown in relation to the first one's. So nothing moves between backends that keep their
relation; a backend that is new, or gone, or changed while all others keep theirs, takes or gives up
exactly the keys of its difference; and between two backends no rule could move fewer. Where several
relations change at once it moves at most 2d / (1 + d) of the keys, d being what the weights differ
by. No rule that looks at the present weights alone guarantees less (Bavarian et al., "On the
optimality of correlated sampling strategies", 2016), and none moves fewer for some change without
moving more for another (Moulton and Jiang, "Maximally consistent sampling and the Jaccard index of
probability distributions", 2018). Cutting [0, 1) into shares in the order of the names would move
many more: of ten equal backends, removing the first moves half of all keys.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from math import log
from typing import TYPE_CHECKING

from greenroom.core.routing.tables import EndpointTable
from greenroom.core.routing.tickets import Effects, NotRepeated, QueryLike, Repeated, Ticket

if TYPE_CHECKING:
    from greenroom.core.routing.queues import RoutedBackend


# Which endpoint a path belongs to: the one with the longest route that covers it.


class Routes:
    """Route prefixes, each of one endpoint. ``/a`` covers ``/a`` and ``/a/...``, not ``/ab``."""

    def __init__(self) -> None:
        self._endpoints: dict[str, str] = {}
        self._depth = 1  # the most segments that any route has had

    def set(self, prefix: str, endpoint: str) -> None:
        """Give a route to an endpoint."""
        self._endpoints[prefix] = endpoint
        self._depth = max(self._depth, prefix.count("/"))

    def remove(self, prefix: str, endpoint: str) -> None:
        """Take a route from an endpoint, unless another one has it by now."""
        if self._endpoints.get(prefix) == endpoint:
            del self._endpoints[prefix]

    def find(self, path: str) -> str | None:
        """Return the endpoint for a path; takes as long for a thousand routes as for one."""
        endpoints = self._endpoints
        if (exact := endpoints.get(path)) is not None:
            return exact
        # No longer than the deepest route: a path of a thousand slashes must not cost more.
        segments = path.split("/", self._depth + 1)[: self._depth + 1]
        while len(segments) > 1:
            if (found := endpoints.get("/".join(segments))) is not None:
                return found
            segments.pop()
        return endpoints.get("/")

    def all(self) -> dict[str, str]:
        """Return prefix -> endpoint, sorted."""
        return dict(sorted(self._endpoints.items()))


# Which queries may be sent again when the replica that had them died, and how many of them.
#
# Whether one may be repeated is for the nearest to say who knows: the handle that it comes
# through, else its endpoint, else the deployment that runs it, else its HTTP method. A query that
# has not run (it never left, or its replica had no room) is not repeated when it is sent again:
# none of this concerns it.
#
# How many is for a budget. Repeats hit a backend when it is at its weakest; where every query
# kills its replica, three attempts each would triple the load on those that come up again. So a
# query that is run pays a token in, and a repeat takes one out. That is the token bucket of
# Finagle's RetryBudget (https://twitter.github.io/finagle/guide/Clients.html#retries), with its
# percentCanRetry at one: retries never more than double the load. A replica may die with all its
# queries under way, of which clients shall notice nothing, and a smaller share would not reach
# for them. Finagle's tokens expire; ours do not, but there are never more than a backend has
# slots, and SPARE: enough to repeat all that is under way anywhere once, and no hoard for a
# storm.

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


class RetryBudget:
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


class Split:
    """The backends of an endpoint that have any weight, ready to be chosen from."""

    __slots__ = ("_bounds", "_hashes", "tags")

    def __init__(self, weights: Mapping[str, float]) -> None:
        shares = sorted((tag, weight) for tag, weight in weights.items() if weight > 0)
        self.tags = tuple(tag for tag, _ in shares)
        self._bounds = list(accumulate(weight for _, weight in shares))
        # Of the name a hash of its own: names and keys of other lengths must not run together.
        self._hashes = [(tag, weight, hashlib.sha256(_digest(tag))) for tag, weight in shares]

    def choose(self, shard_key: str | None, draw: Callable[[], float]) -> str | None:
        """Pick a backend; None when none has any weight.

        ``draw`` returns a uniform number in [0, 1); it is not called where a key decides, nor where
        there is only one backend.
        """
        tags = self.tags
        if len(tags) < 2:
            return tags[0] if tags else None
        if shard_key is not None:
            return self._of_key(shard_key)
        place = bisect_right(self._bounds, draw() * self._bounds[-1])
        return tags[min(place, len(tags) - 1)]  # rounding may put the point past the last bound

    def _of_key(self, shard_key: str) -> str:
        key = shard_key.encode("utf-8", "surrogatepass")
        earliest, chosen = float("inf"), self.tags[0]
        for tag, weight, prefix in self._hashes:
            hasher = prefix.copy()
            hasher.update(key)
            number = int.from_bytes(hasher.digest()[:8], "big") >> 12
            arrival = -log((number + 0.5) / 2**52) / weight  # the sum is exact, and never 0 or 1
            if arrival < earliest:
                earliest, chosen = arrival, tag
        return chosen


_NONE: Mapping[str, RetryBudget] = {}


class RoutedEndpoint:
    """An endpoint's table, ready for use; ``budgets`` for repeats go on from those that are known.

    Each backend has its own: what many queries elsewhere pay in must not be spent on one of which
    every replica dies.
    """

    __slots__ = ("budgets", "split", "table")

    def __init__(self, table: EndpointTable, known: Mapping[str, RetryBudget] = _NONE) -> None:
        self.table = table
        self.split = Split(table.traffic)
        self.budgets = {tag: known.get(tag, RetryBudget()) for tag in self.split.tags}

    def places(self) -> set[tuple[str, bool]]:
        """Return (backend, whether as a shadow) of all that queries or copies may go to."""
        shadows = {(tag, True) for tag in self.table.shadows}
        return {(tag, False) for tag in self.split.tags} | shadows

    def sends(self, ticket: Ticket) -> bool:
        """Tell whether a ticket may go where it was to go."""
        return ticket.backend in (self.table.shadows if ticket.is_copy else self.split.tags)

    def copies_to(self, shadow: str, original: Ticket) -> bool:
        """Tell whether a copy is still to be made."""
        return shadow in self.table.shadows and not original.abandoned


def choose_shadows(shadows: Mapping[str, float], draw: Callable[[], float]) -> list[str]:
    """Return the shadows that get a copy of this query, each with its proportion as the chance."""
    return [tag for tag, proportion in shadows.items() if draw() < proportion]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
