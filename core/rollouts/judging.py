"""When a rollout goes on, holds or goes back, by the user's rules and the evidence.

Each rule is a hypothesis about the new backend. Every step of the rollout begins without evidence,
so that a backend which fails only under more load is found as quickly as one that fails at once.
The evidence of a rollout is the mean over all rules and judged steps; those not begun count
nothing. A mean of e-processes is one. So the chance that it ever says "go back" of a backend that
keeps all rules is at most ``alpha``, over all rules, steps and checks together.

Theory of operation. An ordinary significance test that is repeated as data come in finds a
difference sooner or later where there is none. These are *e-processes*: the capital of a gambler
who bets against the hypothesis, beginning with 1, at odds that the hypothesis itself makes fair. If
it is true, the chance that the capital ever reaches 1/alpha is at most alpha, whenever one checks
and whenever one stops (Ville, "Étude critique de la notion de collectif", 1939). So the capital is
the evidence.

:func:`increase` compares two backends that queries are drawn for by chance. With a share w of the
queries for the new one, a bad query counts 1/w if it was the new one's, -1/(1-w) if it was the old
ones', any other 0: a number whose mean is the difference of the two chances, whatever either is at
that moment. The bet on the mean of such bounded numbers is that of Waudby-Smith and Ramdas
("Estimating means of bounded random variables by betting", Journal of the Royal Statistical Society
B 86, 2024). Without a margin it is a likelihood ratio for which backend a bad query was drawn for,
as in Lindon and Malek ("Anytime-valid inference for multinomial count data", NeurIPS 2022), whose
use for canaries Lindon, Sanden and Shirikian describe ("Rapid regression detection in software
deployments through sequential testing", KDD 2022). Chance alone separates the two backends'
queries, so nothing is assumed about them: load and errors may change with the hour, because the two
share all of that.

:func:`excess` compares one backend with a limit: Wald's sequential likelihood ratio ("Sequential
tests of statistical hypotheses", Annals of Mathematical Statistics 16, 1945).

How much to bet depends on how large the difference is, which is not known. So the capital is spread
evenly over stakes of all sizes; their mean is an e-process again (a mixture, as in Robbins,
"Statistical methods related to the law of the iterated logarithm", Annals of Mathematical
Statistics 41, 1970). That costs at most a factor of STAKES of the best one's.

Latencies are counted in fixed buckets, eight per doubling. So counts of several proxies can be
added, and a bound is at most 9 % above any latency that is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import exp, log, log1p
from typing import Any, NamedTuple

from greenroom.core.comparing.comparing import Counts
from greenroom.core.errors import CANCELLED_STATUS, InvalidRequestError, QueryTimeoutError
from greenroom.core.formats import travels
from greenroom.core.routing.tickets import Ended, Observer, Retried
from greenroom.core.validation import is_number

STAKES = 12
_STAKE_SIZES = tuple(0.9 * 2.0**-k for k in range(STAKES))  # of the largest that cannot ruin
_MAX_EXPONENT = 700.0  # exp() of more overflows

Logs = tuple[tuple[float, ...], ...]


def increase(new_bad: int, old_bad: int, queries: int, share: float, margin: float = 0.0) -> float:
    """Return the evidence that queries go bad more often with the new backend than with the old.

    More often by more than ``margin``, that is; ``queries`` are those of both, bad or not, and
    ``share`` the chance of each to be drawn for the new one, above 0 and below 1.
    """
    return _capital(_increase_logs(share, margin), (new_bad, old_bad, queries - new_bad - old_bad))


def excess(bad: int, queries: int, limit: float) -> float:
    """Return the evidence that queries go bad more often than ``limit``, above 0 and below 1."""
    return _capital(_excess_logs(limit), (bad, queries - bad))


def _capital(logs: Logs, counts: tuple[int, ...]) -> float:
    total = 0.0
    for stake in logs:
        exponent = sum(n * gain for n, gain in zip(counts, stake, strict=True))
        total += exp(min(exponent, _MAX_EXPONENT))
    return total / len(logs)


@lru_cache(maxsize=1024)
def _increase_logs(share: float, margin: float) -> Logs:
    worst = 1 / (1 - share) + margin  # what an old backend's bad query loses, per unit staked
    return tuple(
        (
            log1p(size / worst * (1 / share - margin)),
            log1p(-size),
            log1p(-size / worst * margin),
        )
        for size in _STAKE_SIZES
    )


@lru_cache(maxsize=1024)
def _excess_logs(limit: float) -> Logs:
    supposed = [limit + (1 - limit) * size for size in _STAKE_SIZES]
    return tuple((log(p / limit), log((1 - p) / (1 - limit))) for p in supposed)


FIRST_BOUND_S = 0.00025
PER_DOUBLING = 8
BUCKETS = 18 * PER_DOUBLING  # up to 65 s; the last one has all that took longer
OVERDUE_S = FIRST_BOUND_S * 2**17  # an open query is known to be slow by then


def bound_of(bucket: int) -> float:
    """Return what no query of a bucket took longer than, in seconds."""
    return float("inf") if bucket >= BUCKETS else FIRST_BOUND_S * 2 ** (bucket / PER_DOUBLING)


_BOUNDS_S = [bound_of(bucket) for bucket in range(BUCKETS)]
# Returns the first bucket whose bound is not below so many seconds. Proxies count thousands of
# queries at once, and it is no function of ours, which would take ten times as long.
bucket_of: Callable[[float], int] = partial(bisect_left, _BOUNDS_S)


def percentile(latencies: Mapping[int, int], count: float) -> int:
    """Return the bucket that at least so many latencies are in or below."""
    seen = 0
    for bucket, n in sorted(latencies.items()):
        seen += n
        if seen >= count:
            return bucket
    return BUCKETS


@dataclass(slots=True)
class Tally:
    """Counts of one backend; ``overdue`` are open queries that are older than OVERDUE_S."""

    queries: int = 0
    errors: int = 0
    overdue: int = 0
    latencies: Counter[int] = field(default_factory=Counter)  # queries by bucket

    def count(self, status: int, took_s: Sequence[float]) -> None:
        """Count queries that have ended.

        Bad are those with a 5xx, and those past their time limit: code that hangs gives nothing
        else. Not other 4xx, which are the client's fault. One that its client cancelled is none.
        """
        if status == CANCELLED_STATUS:
            return
        self.queries += len(took_s)
        self.errors += len(took_s) * (status >= 500 or status == QueryTimeoutError.http_status)
        self.latencies.update(map(bucket_of, took_s))

    def died(self) -> None:
        """Count a query that a replica took along when it died, though another may answer it."""
        self.queries += 1
        self.errors += 1

    def add(self, plain: PlainTally, times: int = 1) -> None:
        """Add another's counts; -1 times takes away again what was added."""
        queries, errors, overdue, latencies = plain
        self.queries += times * queries
        self.errors += times * errors
        self.overdue += times * overdue
        for bucket, count in latencies.items():
            self.latencies[bucket] += times * count
            if not self.latencies[bucket]:
                del self.latencies[bucket]

    def slow(self, bucket: int) -> int:
        """Return how many took longer than a bucket's bound, or will have."""
        late = self.overdue if bound_of(bucket) <= OVERDUE_S else 0
        return late + sum(n for each, n in self.latencies.items() if each > bucket)

    def timed(self) -> int:
        """Return how many have a latency."""
        return self.overdue + sum(self.latencies.values())

    def percentile(self, share: float) -> int | None:
        """Return the bucket that this share of the queries is in or below; None without any."""
        return percentile(self.latencies, share * self.timed()) if self.timed() else None

    @property
    def p95_s(self) -> float | None:
        """What 95 % of the queries take at most, in seconds; None without any."""
        bucket = self.percentile(P95)
        return None if bucket is None else bound_of(min(bucket, BUCKETS - 1))

    @property
    def p95(self) -> str:
        """The same in words."""
        return "unknown" if self.p95_s is None else f"{self.p95_s:.3g} s"

    def plain(self) -> tuple[int, int, int, dict[int, int]]:
        """Return it as a message carries it, and a record."""
        return (self.queries, self.errors, self.overdue, dict(self.latencies))


PlainTally = tuple[int, int, int, dict[int, int]]


class Tallies(Observer):
    """What one router counts of endpoints that have a rollout, since its last step."""

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

    def ended(self, event: Ended) -> None:
        """See Observer."""
        if event.endpoint in self._watched:
            self._of(event.endpoint, event.backend).count(event.status, event.took_s)

    def retried(self, event: Retried) -> None:
        """See Observer."""
        if event.ticket.endpoint in self._watched:
            self._of(event.ticket.endpoint, event.ticket.backend).died()

    def _of(self, endpoint: str, backend: str) -> Tally:
        return self._watched[endpoint][1][backend]

    def plain(
        self, overdue: Mapping[tuple[str, str], int]
    ) -> dict[str, tuple[str, dict[str, PlainTally]]]:
        """Return endpoint -> token and backend -> tally; what is overdue is given."""
        report = {}
        for endpoint, (token, tallies) in self._watched.items():
            for backend in {*tallies, *(tag for name, tag in overdue if name == endpoint)}:
                tallies[backend].overdue = overdue.get((endpoint, backend), 0)
            report[endpoint] = (token, {tag: tally.plain() for tag, tally in tallies.items()})
        return report


DIFFERENCE_RATE = "difference_rate"
LEAST_RATE = 1e-15  # instead of 0, which one difference would be infinite evidence against
CALIBRATION = 100  # queries of the old backends from which their p95 is taken
P95 = 0.95
SLACK_S = 0.01  # a replica with a small share waits longer for a CPU, whatever its code: by so much
NO_EVIDENCE = 1.000001  # more speaks against the new backend, less for it


@travels
class Slowness(NamedTuple):
    """What counts as slow in a step, and what was counted before that was decided.

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
    """Decide what is slow; None while there are too few queries to tell."""
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
    """What is known in a step: both sides' counts, and the share of queries for the new one.

    ``answers`` are those compared since the rollout began: the traffic has no part in them.
    """

    new: Tally
    old: Tally
    share: float
    slowness: Slowness | None
    answers: Counts = Counts()


def _error_rate_increase(sample: Sample, margin: float) -> float:
    new, old = sample.new, sample.old
    return increase(new.errors, old.errors, new.queries + old.queries, sample.share, margin)


def _difference_rate(sample: Sample, limit: float) -> float:
    return excess(sample.answers.different, sample.answers.compared, max(limit, LEAST_RATE))


def _p95_latency_ratio(sample: Sample, _ratio: float) -> float:
    slow = sample.slowness
    if slow is None:
        return 1.0
    # An overdue query that is cancelled after all is not counted any more.
    new_slow = max(sample.new.slow(slow.new_bucket) - slow.new_slow, 0)
    old_slow = max(sample.old.slow(slow.old_bucket) - slow.old_slow, 0)
    queries = max(sample.new.timed() + sample.old.timed() - slow.queries, new_slow + old_slow)
    return increase(new_slow, old_slow, queries, sample.share)


class Rule(NamedTuple):
    """What a user may limit, and how."""

    meaning: str
    least: float
    most: float
    finding: str  # the figures in words; see describe()
    evidence: Callable[[Sample, float], float]  # that speaks against the new backend
    above_least: bool = False  # the least itself is not allowed
    is_relative: bool = False  # to the old backend


RULES = {
    "error_rate": Rule(
        "the new backend's share of bad queries",
        0,
        1,
        "{new.errors} of {new.queries} queries were bad; at most {limit:.3g} of them may be",
        lambda seen, limit: excess(seen.new.errors, seen.new.queries, limit),
        above_least=True,
    ),
    "error_rate_increase": Rule(
        "how much larger that share may be than the old one's",
        0,
        1,
        "{new.errors} of {new.queries} queries were bad, {old.errors} of {old.queries} with the "
        "old one; the share may be larger by {limit:.3g}",
        _error_rate_increase,
        is_relative=True,
    ),
    "p95_latency_s": Rule(
        "what 95 % of the new backend's queries take at most, in seconds",
        0,
        30,
        "the p95 latency is {new.p95}; it may be {limit:.3g} s",
        lambda seen, limit: excess(seen.new.slow(bucket_of(limit)), seen.new.timed(), 1 - P95),
        above_least=True,
    ),
    "p95_latency_ratio": Rule(
        "how many times the old backend's p95 latency the new one's may be",
        1,
        100,
        "the p95 latency is {new.p95}, {old.p95} with the old one; it may be {limit:.3g} times "
        f"that, or {SLACK_S * 1000:g} ms more",
        _p95_latency_ratio,
        is_relative=True,
    ),
    DIFFERENCE_RATE: Rule(
        "the share of compared answers that may be different",
        0,
        1,
        "{answers.different} of {answers.compared} compared answers were different; at most "
        "{limit:.3g} of them may be",
        _difference_rate,
    ),
}
DEFAULT_RULES = {"error_rate_increase": 0.005, "p95_latency_ratio": 1.5}


def check_rules(abort_if: object) -> dict[str, float]:
    """Return the rules as numbers; one InvalidRequestError naming all that is wrong.

    Differences say nothing of errors and latencies, so their rule alone is beside the default ones.
    """
    if not isinstance(abort_if, Mapping) or not abort_if:
        raise InvalidRequestError(
            f"abort_if={abort_if!r}: must be a dict with at least one of {', '.join(RULES)}"
        )
    problems = [problem for name, value in abort_if.items() if (problem := _wrong(name, value))]
    if problems:
        raise InvalidRequestError("; ".join(f"abort_if{problem}" for problem in problems))
    given = {name: float(abort_if[name]) for name in RULES if name in abort_if}
    return DEFAULT_RULES | given if given.keys() == {DIFFERENCE_RATE} else given


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


def evidence_by_rule(rules: Mapping[str, float], sample: Sample) -> dict[str, float]:
    """Return how much speaks against the new backend, by rule; 1 is nothing either way."""
    return {name: RULES[name].evidence(sample, value) for name, value in rules.items()}


def too_few(rules: Mapping[str, float], sample: Sample, min_samples: int) -> str:
    """Say which queries are missing for a judgement; empty when none are."""
    sides: dict[str, Tally] = {"new": sample.new}
    if any(RULES[name].is_relative for name in rules):
        sides["old"] = sample.old
    for side, tally in sides.items():
        if tally.queries < min_samples:
            return f"{tally.queries} of {min_samples} queries of the {side} backend"
    if "p95_latency_ratio" in rules and sample.slowness is None:
        return f"{sample.old.timed()} of {CALIBRATION} latencies of the old backend"
    compared, _, not_compared = sample.answers
    if DIFFERENCE_RATE in rules and compared < min_samples:
        uncompared = f"; {not_compared} could not be compared" if not_compared else ""
        return f"{compared} of {min_samples} compared answers{uncompared}"
    return ""


def describe(name: str, limit: float, sample: Sample) -> str:
    """Say in words what a rule compares, with the figures so far."""
    return RULES[name].finding.format(limit=limit, **sample._asdict())


def shown(tally: Tally) -> dict[str, Any]:
    """Return a side's figures for status."""
    return {
        "queries": tally.queries,
        "errors": tally.errors,
        "error_rate": tally.errors / tally.queries if tally.queries else None,
        "p95_latency_s": tally.p95_s,
        "overdue": tally.overdue,
    }
