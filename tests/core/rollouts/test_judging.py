"""The evidence by which rollouts go back: how often it misleads, how soon it tells, what counts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from greenroom.core.rollouts import judging
from greenroom.core.rollouts.judging import (
    BUCKETS,
    OVERDUE_S,
    STAKES,
    Sample,
    Slowness,
    Tallies,
    Tally,
    bound_of,
    bucket_of,
    calibrate,
    evidence_by_rule,
    excess,
    increase,
)
from greenroom.core.routing.tickets import Ended, Retried, Ticket
from tests.support.judged import STEPS, Version, count

ALPHA = 0.01
RULES = {"error_rate_increase": 0.0, "p95_latency_ratio": 1.0}  # the hardest: no margin at all


def is_sent_back(
    new: Version,
    old: Version,
    rng: random.Random,
    rules: dict[str, float],
    *,
    reports: int = 10,
    queries: int = 1000,
    load: Callable[[int], float] = lambda _: 1.0,
) -> bool:
    """Look after every report, as the controller does; the load and the errors change with it."""
    for share in STEPS:
        sides, slowness = (Tally(), Tally()), None
        for number in range(reports):
            now = load(number)
            trouble = 1 + 20 * (number % 7 == 3)  # something that both sides depend on fails
            for tally, each, part in zip(sides, (new, old), (share, 1 - share), strict=True):
                count(tally, queries * part * now, each.troubled(trouble), rng)
            if slowness is None:
                slowness = calibrate(sides[1], sides[0], rules.get("p95_latency_ratio", 1.0))
            evidence = evidence_by_rule(rules, Sample(*sides, share, slowness))
            if sum(evidence.values()) / (len(rules) * len(STEPS)) >= 1 / ALPHA:
                return True
    return False


def test_of_a_thousand_rollouts_of_the_same_code_hardly_any_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judging, "SLACK_S", 0.0)
    rng = random.Random(20)
    same = Version(0.01)
    gone_back = sum(is_sent_back(same, same, rng, RULES) for _ in range(1000))
    assert gone_back <= 1000 * ALPHA


def test_errors_and_slowness_within_the_margins_do_not_count() -> None:
    rng = random.Random(21)
    rules = {"error_rate_increase": 0.01, "p95_latency_ratio": 2.0, "error_rate": 0.2}
    worse = Version(0.015, slower=1.4)
    # The trouble of both sides makes the increase 0.0095 at its worst moment.
    old = Version(0.01451, slower=1.0)
    gone_back = sum(is_sent_back(worse, old, rng, rules) for _ in range(200))
    assert gone_back <= 200 * ALPHA


@pytest.mark.parametrize("new", [Version(0.06), Version(0.01, slower=3.0)], ids=["bad", "slow"])
def test_a_backend_that_breaks_a_rule_is_sent_back(new: Version) -> None:
    rng = random.Random(22)
    found = sum(is_sent_back(new, Version(0.002), rng, RULES) for _ in range(50))
    assert found == 50


def tally_of(*latencies_s: float) -> Tally:
    tally = Tally()
    for latency_s in latencies_s:
        tally.count(200, (latency_s,))
    return tally


def slow_evidence(*, old_s: float, new_s: float, ratio: float = 1.5) -> float:
    """Return what a thousand queries of each latency are evidence for."""
    slowness = calibrate(tally_of(*[old_s] * 100), Tally(), ratio)
    sides = tally_of(*[new_s] * 1000), tally_of(*[old_s] * 1100)
    rules = {"p95_latency_ratio": ratio}
    return evidence_by_rule(rules, Sample(*sides, 0.5, slowness))["p95_latency_ratio"]


def test_what_a_small_share_of_the_queries_makes_of_a_latency_is_no_slowness() -> None:
    """A replica that sleeps between its queries waits some milliseconds for a CPU."""
    assert slow_evidence(old_s=0.003, new_s=0.012) <= 1
    assert slow_evidence(old_s=0.003, new_s=0.015) >= 1 / ALPHA
    assert slow_evidence(old_s=0.1, new_s=0.14) <= 1
    assert slow_evidence(old_s=0.1, new_s=0.17) >= 1 / ALPHA


def bad_until_known(share: float, margin: float, rng: random.Random) -> int:
    """Return how many of v2's 5 % bad answers it takes, v1 having none, with three steps."""
    new_bad = queries = 0
    while increase(new_bad, 0, queries, share, margin) < len(STEPS) / ALPHA:
        new_bad += 1
        queries += math.ceil(math.log(rng.random()) / math.log(1 - share * 0.05))
    return new_bad


@pytest.mark.parametrize(
    ("share", "margin", "most"),
    [(0.01, 0.0, 3), (0.1, 0.0, 5), (0.01, 0.005, 12), (0.1, 0.005, 12)],
)
def test_five_percent_errors_are_known_after_a_few(share: float, margin: float, most: int) -> None:
    rng = random.Random(23)
    needed = sorted(bad_until_known(share, margin, rng) for _ in range(21))
    assert needed[10] <= most


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("margin", [0.0, 0.01])
def test_bets_are_fair_where_the_hypothesis_just_holds(share: float, margin: float) -> None:
    """The mean of the capital after one query is 1, which is what all guarantees rest on."""
    old = 0.03
    new = old + margin
    mean = (
        share * new * increase(1, 0, 1, share, margin)
        + (1 - share) * old * increase(0, 1, 1, share, margin)
        + (1 - share * new - (1 - share) * old) * increase(0, 0, 1, share, margin)
    )
    assert mean == pytest.approx(1, abs=1e-12)
    limit = 0.05
    fair = limit * excess(1, 1, limit) + (1 - limit) * excess(0, 1, limit)
    assert fair == pytest.approx(1, abs=1e-12)


def test_evidence_begins_with_one_and_does_not_overflow() -> None:
    assert increase(0, 0, 0, 0.1) == excess(0, 0, 0.1) == pytest.approx(1)
    assert increase(10**6, 0, 10**6, 0.01) >= 1e100
    assert increase(0, 10**6, 10**8, 0.01) >= 0
    assert excess(10**6, 10**6, 0.01) >= 1e100
    assert STAKES == 12


# --- What proxies count ---------------------------------------------------------------------------


HTTP = {200: 0, 404: 0, 429: 0, 500: 1, 503: 1, 408: 1}  # status -> bad


@pytest.mark.parametrize("seconds", [1e-6, 0.00025, 0.0003, 0.01, 0.5, 1.0, 29.9, 59.0])
def test_a_bucket_has_what_is_at_most_nine_percent_below_its_bound(seconds: float) -> None:
    bound = bound_of(bucket_of(seconds))
    assert seconds <= bound * (1 + 1e-9)
    assert bound <= max(seconds * 2 ** (1 / 8), 0.00025) * (1 + 1e-9)


def test_a_bound_is_in_its_own_bucket_and_the_last_bucket_has_the_rest() -> None:
    assert [bucket_of(bound_of(bucket)) for bucket in range(BUCKETS)] == list(range(BUCKETS))
    assert bucket_of(1e9) == BUCKETS
    assert math.isinf(bound_of(BUCKETS))


@pytest.mark.parametrize(("status", "bad"), HTTP.items())
def test_bad_are_server_errors_and_time_limits(status: int, bad: int) -> None:
    tally = Tally()
    tally.count(status, (0.01,))
    assert (tally.queries, tally.errors) == (1, bad)


def test_what_the_client_cancelled_is_no_query() -> None:
    tally = Tally()
    tally.count(499, (0.01,))
    assert tally == Tally()


def test_overdue_queries_are_slow_but_not_bad() -> None:
    tally = Tally(overdue=3)
    tally.count(200, (0.01,))
    assert tally.slow(bucket_of(0.01)) == 3
    assert tally.slow(bucket_of(OVERDUE_S * 1.5)) == 0, "it is not known that they take so long"
    assert tally.timed() == 4
    assert tally.percentile(0.25) == bucket_of(0.01)
    assert tally.percentile(0.95) == BUCKETS
    assert Tally().percentile(0.95) is None


def test_a_proxy_counts_what_is_watched_and_begins_anew_with_each_step() -> None:
    tallies = Tallies()
    assert not tallies
    tallies.ended(Ended("e", "v1", 200, [0.01], [0.0]))
    tallies.watch("e", "r.0")
    tallies.ended(Ended("e", "v1", 500, [0.01], [0.0]))
    tallies.ended(Ended("f", "v1", 500, [0.01], [0.0]))
    tallies.retried(Retried(Ticket(1, "c", None, "e", "/", 0.0, backend="v2"), "died"))
    tallies.watch("e", "r.0")
    (found,) = tallies.plain({("e", "v3"): 2, ("f", "v3"): 1}).items()
    endpoint, (token, counted) = found
    assert (endpoint, token) == ("e", "r.0")
    assert counted["v1"] == (1, 1, 0, {bucket_of(0.01): 1})
    assert counted["v2"] == (1, 1, 0, {})
    assert counted["v3"] == (0, 0, 2, {})
    tallies.watch("e", "r.1")
    assert tallies.plain({}) == {"e": ("r.1", {})}
    tallies.watch("e", None)
    assert not tallies
    tallies.watch("e", None)


def test_tallies_of_several_proxies_are_added_and_taken_away_again() -> None:
    one = (2, 1, 0, {3: 2})
    other = (5, 0, 1, {3: 1, 4: 4})
    summed = Tally()
    summed.add(one)
    summed.add(other)
    assert summed.plain() == (7, 1, 1, {3: 3, 4: 4})
    summed.add(other, -1)
    assert summed.plain() == one, "without a bucket that has nothing left"


@pytest.mark.parametrize(("rule", "waits"), [("p95_latency_ratio", True), ("error_rate", False)])
def test_a_rule_that_compares_waits_for_queries_of_the_old_backend_too(
    rule: str, *, waits: bool
) -> None:
    new, old = Tally(queries=500), Tally(queries=150)
    sample = Sample(new, old, 0.5, Slowness(0, 0, 0, 0, 0))
    expected = "150 of 200 queries of the old backend" if waits else ""
    assert judging.too_few({rule: 2.0}, sample, 200) == expected
