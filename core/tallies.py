"""What proxies count of two backends that are compared: queries, bad ones, and how long they took.

Latencies are counted in fixed buckets, eight per doubling, so that counts of several proxies can be
added, and a bound is at most 9 % above any latency that is asked for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, log2

FIRST_BOUND_S = 0.00025
PER_DOUBLING = 8
BUCKETS = 18 * PER_DOUBLING  # up to 65 s; the last one has all that took longer
OVERDUE_S = FIRST_BOUND_S * 2**17  # an open query is known to be slow by then

CANCELLED_STATUS = 499
TIMED_OUT_STATUS = 408


def bucket_of(seconds: float) -> int:
    """Return the first bucket whose bound is not below."""
    if seconds <= FIRST_BOUND_S:
        return 0
    return min(ceil(log2(seconds / FIRST_BOUND_S) * PER_DOUBLING - 1e-9), BUCKETS)


def bound_of(bucket: int) -> float:
    """Return what no query of a bucket took longer than, in seconds."""
    return float("inf") if bucket >= BUCKETS else FIRST_BOUND_S * 2 ** (bucket / PER_DOUBLING)


@dataclass(slots=True)
class Tally:
    """Counts of one backend; ``overdue`` are open queries that are older than OVERDUE_S."""

    queries: int = 0
    errors: int = 0
    overdue: int = 0
    latencies: Counter[int] = field(default_factory=Counter)  # queries by bucket

    def count(self, status: int, seconds: float) -> None:
        """Count a query that has ended.

        Bad are those with a 5xx, and those past their time limit: code that hangs gives nothing
        else. Not other 4xx, which are the client's fault. One that its client cancelled is none.
        """
        if status == CANCELLED_STATUS:
            return
        self.queries += 1
        self.errors += status >= 500 or status == TIMED_OUT_STATUS
        self.latencies[bucket_of(seconds)] += 1

    def lost(self) -> None:
        """Count a query that a replica took along when it died, though another may answer it."""
        self.queries += 1
        self.errors += 1

    def slow(self, bucket: int) -> int:
        """Return how many took longer than a bucket's bound, or will have."""
        late = self.overdue if bound_of(bucket) <= OVERDUE_S else 0
        return late + sum(n for each, n in self.latencies.items() if each > bucket)

    def timed(self) -> int:
        """Return how many have a latency."""
        return self.overdue + sum(self.latencies.values())

    def percentile(self, share: float) -> int | None:
        """Return the bucket that this share of the queries is in or below; None without any."""
        timed = self.timed()
        seen = 0
        for bucket, n in sorted(self.latencies.items()):
            seen += n
            if seen >= share * timed:
                return bucket
        return BUCKETS if timed else None

    def plain(self) -> tuple[int, int, int, dict[int, int]]:
        """Return it as a message carries it, and a record."""
        return (self.queries, self.errors, self.overdue, dict(self.latencies))


PlainTally = tuple[int, int, int, dict[int, int]]


def total(tallies: Iterable[PlainTally]) -> Tally:
    """Return the sum of tallies."""
    summed = Tally()
    for queries, errors, overdue, latencies in tallies:
        summed.queries += queries
        summed.errors += errors
        summed.overdue += overdue
        summed.latencies.update(latencies)
    return summed


class Tallies:
    """What one proxy counts of the endpoints that have a rollout under way, since its last step."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[str, defaultdict[str, Tally]]] = {}

    def __bool__(self) -> bool:
        return bool(self._watched)

    def watch(self, endpoint: str, token: str | None) -> None:
        """Count an endpoint's queries from now on, unless that token is known; None ends it."""
        if token is None:
            self._watched.pop(endpoint, None)
        elif endpoint not in self._watched or self._watched[endpoint][0] != token:
            self._watched[endpoint] = (token, defaultdict(Tally))

    def ended(self, endpoint: str, backend: str, status: int, seconds: float) -> None:
        """Count a query, if its endpoint is watched."""
        if endpoint in self._watched:
            self._watched[endpoint][1][backend].count(status, seconds)

    def lost(self, endpoint: str, backend: str) -> None:
        """Count a query whose replica died, if its endpoint is watched."""
        if endpoint in self._watched:
            self._watched[endpoint][1][backend].lost()

    def plain(
        self, overdue: Mapping[tuple[str, str], int]
    ) -> dict[str, tuple[str, dict[str, PlainTally]]]:
        """Return endpoint -> token and backend -> tally; what is overdue is given."""
        told = {}
        for endpoint, (token, tallies) in self._watched.items():
            for backend in {*tallies, *(tag for name, tag in overdue if name == endpoint)}:
                tallies[backend].overdue = overdue.get((endpoint, backend), 0)
            told[endpoint] = (token, {tag: tally.plain() for tag, tally in tallies.items()})
        return told
