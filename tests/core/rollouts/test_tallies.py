"""What proxies count for rollouts."""

from __future__ import annotations

import math

import pytest

from greenroom.core.rollouts.judging import (
    BUCKETS,
    OVERDUE_S,
    Tallies,
    Tally,
    bound_of,
    bucket_of,
    total,
)
from greenroom.core.routing.tickets import Ticket


def ticket(endpoint: str, backend: str) -> Ticket:
    return Ticket(1, "caller", None, endpoint, "/", 0.0, backend)


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
    tally.count(status, 0.01)
    assert (tally.queries, tally.errors) == (1, bad)


def test_what_the_client_cancelled_is_no_query() -> None:
    tally = Tally()
    tally.count(499, 0.01)
    assert tally == Tally()


def test_overdue_queries_are_slow_but_not_bad() -> None:
    tally = Tally(overdue=3)
    tally.count(200, 0.01)
    assert tally.slow(bucket_of(0.01)) == 3
    assert tally.slow(bucket_of(OVERDUE_S * 1.5)) == 0, "it is not known that they take so long"
    assert tally.timed() == 4
    assert tally.percentile(0.25) == bucket_of(0.01)
    assert tally.percentile(0.95) == BUCKETS
    assert Tally().percentile(0.95) is None


def test_a_proxy_counts_what_is_watched_and_begins_anew_with_each_step() -> None:
    tallies = Tallies()
    assert not tallies
    tallies.finished(ticket("e", "v1"), 200, 0.01)
    tallies.watch("e", "r.0")
    tallies.finished(ticket("e", "v1"), 500, 0.01)
    tallies.finished(ticket("f", "v1"), 500, 0.01)
    tallies.retried(ticket("e", "v2"))
    tallies.watch("e", "r.0")
    (told,) = tallies.plain({("e", "v3"): 2, ("f", "v3"): 1}).items()
    endpoint, (token, counted) = told
    assert (endpoint, token) == ("e", "r.0")
    assert counted["v1"] == (1, 1, 0, {bucket_of(0.01): 1})
    assert counted["v2"] == (1, 1, 0, {})
    assert counted["v3"] == (0, 0, 2, {})
    tallies.watch("e", "r.1")
    assert tallies.plain({}) == {"e": ("r.1", {})}
    tallies.watch("e", None)
    assert not tallies
    tallies.watch("e", None)


def test_tallies_of_several_proxies_are_added() -> None:
    one = (2, 1, 0, {3: 2})
    other = (5, 0, 1, {3: 1, 4: 4})
    summed = total([one, other])
    assert summed.plain() == (7, 1, 1, {3: 3, 4: 4})
