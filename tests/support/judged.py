"""Two versions under load, as a rollout's judgement sees them: tallies of random queries."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from greenroom.core.rollouts.judging import Tally, bucket_of

STEPS = (0.01, 0.1, 0.5)  # those of a rollout by default that are judged
LATENCIES = ((0.01, 0.6), (0.02, 0.25), (0.04, 0.09), (0.1, 0.04), (0.3, 0.02))  # seconds, share


@dataclass(frozen=True)
class Version:
    """What share of its queries a version fails, and how many times longer it takes."""

    errors: float
    slower: float = 1.0

    def troubled(self, factor: float) -> Version:
        """Return it while something that it depends on has its errors multiplied."""
        return Version(min(self.errors * factor, 1.0), self.slower)


def poisson(mean: float, rng: random.Random) -> int:
    """Return a number of events of which so many are expected."""
    if mean > 30:
        return max(round(rng.gauss(mean, math.sqrt(mean))), 0)
    count, product, least = 0, rng.random(), math.exp(-mean)
    while product > least:
        count, product = count + 1, product * rng.random()
    return count


def count(tally: Tally, queries: float, version: Version, rng: random.Random) -> None:
    """Add what about so many queries come to."""
    for seconds, share in LATENCIES:
        good = poisson(queries * share * (1 - version.errors), rng)
        bad = poisson(queries * share * version.errors, rng)
        tally.latencies[bucket_of(seconds * version.slower)] += good + bad
        tally.queries += good + bad
        tally.errors += bad
