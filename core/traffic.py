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

from greenroom.core.repeats import RepeatBudget
from greenroom.core.tables import EndpointTable
from greenroom.core.tickets import Ticket


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


_NONE: Mapping[str, RepeatBudget] = {}


class RoutedEndpoint:
    """An endpoint's table, ready for use; ``budgets`` for repeats go on from those that are known.

    Each backend has its own: what many queries elsewhere pay in must not be spent on one of which
    every replica dies.
    """

    __slots__ = ("budgets", "split", "table")

    def __init__(self, table: EndpointTable, known: Mapping[str, RepeatBudget] = _NONE) -> None:
        self.table = table
        self.split = Split(table.traffic)
        self.budgets = {tag: known.get(tag, RepeatBudget()) for tag in self.split.tags}

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
