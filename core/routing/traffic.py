"""Which endpoint a path belongs to, and which backend of an endpoint a query goes to.

Theory of operation. A query goes by its key: its shard key or session, else its number, which no
other query of its caller has, so that chance decides. Each backend gets a uniform number of its
own, u, from the SHA-256 of its name and the key, and the backend with the least -ln(u) / weight
gets the query. Those are the arrival times of independent Poisson processes with the weights as
their rates, and each process is the first to arrive with a probability in proportion to its weight.
Nothing else counts, so all proxies decide alike, before and after any restart, and a caller with
leases (leases.py) decides as its proxy would.

A key goes from one backend to another only if the other's weight has grown in relation to the first
one's. So no key moves between backends that keep their relation. A backend that is new, or gone, or
changed while all others keep theirs, gains or loses exactly the keys of its difference, and
between two backends no rule could move fewer. Where several relations change at once it moves at
most 2d / (1 + d) of the keys, d being what the weights differ by. No rule that looks at the present
weights alone guarantees less (Bavarian et al., "On the optimality of correlated sampling
strategies", 2016), and none moves fewer for some change without moving more for another (Moulton
and Jiang, "Maximally consistent sampling and the Jaccard index of probability distributions",
2018). Cutting [0, 1) into shares in the order of the names would move many more: of ten equal
backends, removing the first moves half of all keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from math import log

from greenroom.core.routing.retries import RetryBudget
from greenroom.core.routing.tables import EndpointTable
from greenroom.core.routing.tickets import QueryLike, Ticket


class Routes:
    """Which endpoint a path belongs to: the one with the longest route that covers it.

    The route ``/a`` covers ``/a`` and ``/a/...``, not ``/ab``.
    """

    def __init__(self) -> None:
        self.version = 0  # grows when a path may lead elsewhere than before
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


def key_of(query: QueryLike, caller: Hashable) -> str:
    """Return what decides on the backend of a query that has no session.

    One that is tried again after a failure has the negative of its number.
    """
    return f"{caller}/{abs(query.id)}" if query.shard_key is None else query.shard_key


class Split:
    """The backends of an endpoint that have any weight, ready to be chosen from."""

    __slots__ = ("_hashes", "only", "tags")

    def __init__(self, weights: Mapping[str, float]) -> None:
        shares = sorted((tag, weight) for tag, weight in weights.items() if weight > 0)
        self.tags = tuple(tag for tag, _ in shares)
        self.only = self.tags[0] if len(shares) == 1 else None  # whatever the key
        # The name is hashed first: names and keys of other lengths must not run together.
        self._hashes = [(tag, weight, hashlib.sha256(_digest(tag))) for tag, weight in shares]

    def choose(self, key: str) -> str | None:
        """Return the backend of a key; None when none has any weight."""
        tags = self.tags
        if len(tags) < 2:
            return tags[0] if tags else None
        encoded = key.encode("utf-8", "surrogatepass")
        earliest, chosen = float("inf"), tags[0]
        for tag, weight, prefix in self._hashes:
            hasher = prefix.copy()
            hasher.update(encoded)
            number = int.from_bytes(hasher.digest()[:8], "big") >> 12
            arrival = -log((number + 0.5) / 2**52) / weight  # the sum is exact, and never 0 or 1
            if arrival < earliest:
                earliest, chosen = arrival, tag
        return chosen


class RoutedEndpoint:
    """An endpoint's table, ready for use; retry budgets go on from the table before.

    Each backend has a budget of its own: what many queries elsewhere pay in must not be spent on a
    backend whose replicas all die.
    """

    __slots__ = ("budgets", "split", "table")

    budgets: dict[str, RetryBudget]

    def __init__(self, table: EndpointTable, before: RoutedEndpoint | None = None) -> None:
        self.table = table
        self.split = Split(table.traffic)
        known: Mapping[str, RetryBudget] = {} if before is None else before.budgets
        self.budgets: dict[str, RetryBudget] = {
            tag: known.get(tag) or RetryBudget() for tag in self.split.tags
        }

    def places(self) -> set[tuple[str, bool]]:
        """Return (backend, whether as a shadow) of all that queries may go to."""
        shadows = {(tag, True) for tag in self.table.shadows}
        return {(tag, False) for tag in self.split.tags} | shadows

    def sends(self, ticket: Ticket) -> bool:
        """Return whether a ticket may go where it was to go."""
        return ticket.backend in (self.table.shadows if ticket.is_mirrored else self.split.tags)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
