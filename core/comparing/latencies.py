"""How much slower or faster one version is than another, and how often their answers differ.

Each query has run at both, so their latencies are pairs, and what the queries have in common falls
out. The logarithms of the ratios are averaged: the result is a geometric mean, which is what
ratios have (Fleming and Wallace, "How not to lie with statistics: the correct way to summarize
benchmark results", Communications of the ACM 29, 1986). Its interval is that of paired observations
(Jain, "The Art of Computer Systems Performance Analysis", 1991, section 13.4.1), with the normal
distribution for Student's, which is why it wants :data:`MIN_PAIRS`.

The interval of a share is Wilson's ("Probable inference, the law of succession, and statistical
inference", Journal of the American Statistical Association 22, 1927), which also holds near 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, exp, log, sqrt
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95
MIN_PAIRS = 30
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


class Interval(NamedTuple):
    """An estimate, and between what the true value is with 95 % confidence."""

    value: float
    low: float
    high: float


def ratio(old_s: Sequence[float], new_s: Sequence[float]) -> Interval | None:
    """Return how many times as long the new latencies are; None for too few pairs."""
    if len(old_s) < MIN_PAIRS:
        return None
    logs = [log(max(new, 1e-9) / max(old, 1e-9)) for old, new in zip(old_s, new_s, strict=True)]
    mean, margin = fmean(logs), _Z * stdev(logs) / sqrt(len(logs))
    return Interval(exp(mean), exp(mean - margin), exp(mean + margin))


def share(count: int, of: int) -> Interval:
    """Return a share with its interval; of nothing, from 0 to 1."""
    if not of:
        return Interval(0.0, 0.0, 1.0)
    p, z2 = count / of, _Z * _Z
    middle = (p + z2 / (2 * of)) / (1 + z2 / of)
    margin = _Z / (1 + z2 / of) * sqrt(p * (1 - p) / of + z2 / (4 * of * of))
    return Interval(p, max(middle - margin, 0.0), min(middle + margin, 1.0))


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that this part of them, above 0, is not beyond."""
    return sorted(values)[max(ceil(part * len(values)) - 1, 0)]
