"""When a rollout goes on, holds or goes back: the rules a user gives, and what evidence says.

Each rule is a hypothesis about the new backend, and :mod:`greenroom.core.sequential` has the
evidence against it. Every step of the rollout begins with none, so that a backend which fails only
under more load is found out as quickly as one that fails at once. The evidence of a rollout is the
mean over all rules and judged steps, those not begun counting nothing: a mean of e-processes is
one, so the chance that it ever says "go back" of a backend that keeps all rules is at most
``alpha``, over all rules, steps and looks together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from greenroom.core.errors import InvalidRequestError
from greenroom.core.number import is_number
from greenroom.core.sequential import excess, increase
from greenroom.core.tallies import BUCKETS, Tally, bound_of, bucket_of

CALIBRATION = 100  # queries of the old backends from which their p95 is taken
P95 = 0.95
SLACK_S = 0.01  # a replica with a small share waits longer for a CPU, whatever its code: by so much
NO_EVIDENCE = 1.000001  # more speaks against the new backend, less for it


class Rule(NamedTuple):
    """What a user may limit, and how."""

    meaning: str
    least: float
    most: float
    above_least: bool  # the least itself is not allowed


RULES = {
    "error_rate": Rule("the new backend's share of bad queries", 0, 1, above_least=True),
    "error_rate_increase": Rule(
        "how much larger that share may be than the old one's", 0, 1, above_least=False
    ),
    "p95_latency_s": Rule(
        "what 95 % of the new backend's queries take at most, in seconds", 0, 30, above_least=True
    ),
    "p95_latency_ratio": Rule(
        "how many times the old backend's p95 latency the new one's may be",
        1,
        100,
        above_least=False,
    ),
}
RELATIVE = ("error_rate_increase", "p95_latency_ratio")
DEFAULT_RULES = {"error_rate_increase": 0.005, "p95_latency_ratio": 1.5}


def check_rules(abort_if: object) -> dict[str, float]:
    """Return the rules as numbers; one InvalidRequestError naming all that is wrong."""
    if not isinstance(abort_if, Mapping) or not abort_if:
        raise InvalidRequestError(
            f"abort_if={abort_if!r}: must be a dict with at least one of {', '.join(RULES)}"
        )
    problems = [problem for name, value in abort_if.items() if (problem := _wrong(name, value))]
    if problems:
        raise InvalidRequestError("; ".join(f"abort_if{problem}" for problem in problems))
    return {name: float(abort_if[name]) for name in RULES if name in abort_if}


def _wrong(name: object, value: Any) -> str:
    rule = RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        return f"[{name!r}]: no such rule; there are: {', '.join(RULES)}"
    low = "above" if rule.above_least else "from"
    if (
        is_number(value)
        and rule.least <= value < rule.most
        and (value != rule.least or low == "from")
    ):
        return ""
    return f"[{name!r}]={value!r}: must be a number {low} {rule.least:g} and below {rule.most:g}"


class Slowness(NamedTuple):
    """What counts as slow in a step, and what was counted before that was settled.

    Old queries are slow past the bound of ``old_bucket``, new ones past that of ``new_bucket``: the
    old ones' p95 when the step began, and the allowed multiple of it, which is :data:`SLACK_S` more
    at least. Only later queries count, for they had no part in where the bounds are.
    """

    old_bucket: int
    new_bucket: int
    old_slow: int
    new_slow: int
    queries: int


def calibrate(old: Tally, new: Tally, ratio: float) -> Slowness | None:
    """Settle what is slow; None while there are too few queries to tell."""
    if old.timed() < CALIBRATION:
        return None
    old_bucket = old.percentile(P95) or 0
    old_p95_s = bound_of(old_bucket)
    new_bucket = bucket_of(max(old_p95_s * ratio, old_p95_s + SLACK_S))
    return Slowness(
        old_bucket,
        new_bucket,
        old.slow(old_bucket),
        new.slow(new_bucket),
        old.timed() + new.timed(),
    )


class Sample(NamedTuple):
    """What is known in a step: both sides' counts, and the share of queries for the new one."""

    new: Tally
    old: Tally
    share: float
    slowness: Slowness | None


def _error_rate(sample: Sample, limit: float) -> float:
    return excess(sample.new.errors, sample.new.queries, limit)


def _error_rate_increase(sample: Sample, margin: float) -> float:
    new, old = sample.new, sample.old
    return increase(new.errors, old.errors, new.queries + old.queries, sample.share, margin)


def _p95_latency_s(sample: Sample, limit: float) -> float:
    return excess(sample.new.slow(bucket_of(limit)), sample.new.timed(), 1 - P95)


def _p95_latency_ratio(sample: Sample, _ratio: float) -> float:
    slow = sample.slowness
    if slow is None:
        return 1.0
    # An overdue query that is cancelled after all is not counted any more.
    new_slow = max(sample.new.slow(slow.new_bucket) - slow.new_slow, 0)
    old_slow = max(sample.old.slow(slow.old_bucket) - slow.old_slow, 0)
    queries = max(sample.new.timed() + sample.old.timed() - slow.queries, new_slow + old_slow)
    return increase(new_slow, old_slow, queries, sample.share)


_EVIDENCE: dict[str, Callable[[Sample, float], float]] = {
    "error_rate": _error_rate,
    "error_rate_increase": _error_rate_increase,
    "p95_latency_s": _p95_latency_s,
    "p95_latency_ratio": _p95_latency_ratio,
}


def evidence_by_rule(rules: Mapping[str, float], sample: Sample) -> dict[str, float]:
    """Return how much speaks against the new backend, by rule; 1 is nothing either way."""
    return {name: _EVIDENCE[name](sample, value) for name, value in rules.items()}


def too_few(rules: Mapping[str, float], sample: Sample, min_samples: int) -> str:
    """Say which queries are missing for a judgement; empty when none are."""
    sides: dict[str, Tally] = {"new": sample.new}
    if any(name in RELATIVE for name in rules):
        sides["old"] = sample.old
    for side, tally in sides.items():
        if tally.queries < min_samples:
            return f"{tally.queries} of {min_samples} queries of the {side} backend"
    if "p95_latency_ratio" in rules and sample.slowness is None:
        return f"{sample.old.timed()} of {CALIBRATION} latencies of the old backend"
    return ""


def describe(name: str, limit: float, sample: Sample) -> str:
    """Say in words what a rule compares, with the figures so far."""
    new, old = shown(sample.new), shown(sample.old)
    errors = f"{new['errors']} of {new['queries']} queries were bad"
    if name == "error_rate":
        return f"{errors}; at most {limit:.3g} of them may be"
    if name == "error_rate_increase":
        beside = f"{old['errors']} of {old['queries']} with the old one"
        return f"{errors}, {beside}; the share may be larger by {limit:.3g}"
    p95 = "unknown" if new["p95_latency_s"] is None else f"{new['p95_latency_s']:.3g} s"
    if name == "p95_latency_s":
        return f"the p95 latency is {p95}; it may be {limit:.3g} s"
    beside = "unknown" if old["p95_latency_s"] is None else f"{old['p95_latency_s']:.3g} s"
    may_be = f"it may be {limit:.3g} times that, or {SLACK_S * 1000:g} ms more"
    return f"the p95 latency is {p95}, {beside} with the old one; {may_be}"


def shown(tally: Tally) -> dict[str, Any]:
    """Return a side's figures for status."""
    bucket = tally.percentile(P95)
    return {
        "queries": tally.queries,
        "errors": tally.errors,
        "error_rate": tally.errors / tally.queries if tally.queries else None,
        "p95_latency_s": None if bucket is None else bound_of(min(bucket, BUCKETS - 1)),
        "overdue": tally.overdue,
    }
