"""How much slower or faster, and how many differ, with 95 % confidence."""

from __future__ import annotations

import random

import pytest

from greenroom.core.comparing.latencies import percentile, ratio, share


def test_a_version_that_is_slower_by_a_factor_is_found_in_the_noise_that_both_share() -> None:
    rng = random.Random(7)
    old = [rng.lognormvariate(-4, 1) for _ in range(400)]
    new = [each * 1.2 * rng.lognormvariate(0, 0.2) for each in old]
    found = ratio(old, new)
    assert found is not None
    assert 1.1 < found.low < found.value < found.high < 1.3


def test_its_interval_has_the_true_ratio_in_it_95_times_in_100() -> None:
    rng, inside = random.Random(3), 0
    for _ in range(400):
        old = [rng.lognormvariate(0, 1) for _ in range(50)]
        found = ratio(old, [each * 1.5 * rng.lognormvariate(0, 0.5) for each in old])
        assert found is not None
        inside += found.low <= 1.5 <= found.high
    assert 0.92 <= inside / 400 <= 0.98


def test_too_few_pairs_say_nothing() -> None:
    assert ratio([1.0] * 29, [2.0] * 29) is None
    assert ratio([1.0] * 30, [2.0] * 30) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    [(0, 0, 0, 1), (0, 10, 0, 0.2775), (10, 10, 0.7225, 1), (5, 10, 0.2366, 0.7634)],
)
def test_a_share_has_wilsons_interval(count: int, of: int, low: float, high: float) -> None:
    found = share(count, of)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_a_percentile_is_the_smallest_value_that_so_many_are_not_beyond() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, part) for part in (0.01, 0.2, 0.5, 0.99, 1)] == [1, 1, 3, 5, 5]
