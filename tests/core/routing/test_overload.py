"""Five times more than a backend can do: what is let in, what waits, what is answered.

With simulated time, so that every decision is the router's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.core.routing.crowds import Crowd, quantile

SLOTS, RUN_S = 10, 0.1
CAPACITY = SLOTS / RUN_S  # queries per second


def steady(_endpoint: str) -> float:
    return RUN_S


def varying(seed: int) -> Callable[[str], float]:
    """Return run times of the same mean, exponentially distributed."""
    rng = random.Random(seed)
    return lambda _endpoint: rng.expovariate(1 / RUN_S)


@pytest.mark.parametrize("run_s", [steady, varying(7)], ids=["steady", "varying"])
def test_with_a_queue_limit_five_times_the_capacity_costs_no_capacity(
    run_s: Callable[[str], float],
) -> None:
    crowd = Crowd(SLOTS, run_s, max_queued_requests=20)
    crowd.asks("e", 5 * CAPACITY)
    crowd.run(60.0)
    took = crowd.answered("e")
    assert len(took) > 0.95 * CAPACITY * 60
    assert quantile(took, 0.99) < 2 * (20 / CAPACITY + RUN_S) + 5 * RUN_S * (run_s is not steady)


@pytest.mark.parametrize(
    ("run_s", "timeout_s"),
    [(steady, 0.5), (steady, 1.0), (steady, 5.0), (varying(8), 1.0), (varying(8), 5.0)],
)
def test_with_deadlines_five_times_the_capacity_costs_no_capacity(
    run_s: Callable[[str], float], timeout_s: float
) -> None:
    crowd = Crowd(SLOTS, run_s)
    crowd.asks("e", 5 * CAPACITY, timeout_s=timeout_s)
    crowd.run(60.0)
    took = crowd.answered("e")
    assert len(took) > 0.9 * CAPACITY * 60
    assert took[-1] <= timeout_s
    assert crowd.run_late == 0
    late = [o for o in crowd.outcomes["e"] if o.kind == "QueryTimeoutError"]
    assert len(late) < 0.1 * len(took), "the others hear at once that they would wait in vain"


def test_a_refusal_says_when_the_queue_will_be_empty() -> None:
    crowd = Crowd(SLOTS, steady, max_queued_requests=50)
    crowd.asks("e", 5 * CAPACITY)
    crowd.run(30.0)
    found = [o.retry_after_s for o in crowd.outcomes["e"] if o.kind == "BackPressureError"]
    assert all(s == pytest.approx(50 / CAPACITY, rel=0.25) for s in found[len(found) // 2 :])


@pytest.mark.parametrize("settings", [{"max_queued_requests": 20}, {"request_timeout_s": 1.0}])
def test_a_flood_of_one_endpoint_does_not_slow_another_of_the_same_backend(
    settings: dict[str, float],
) -> None:
    alone = Crowd(SLOTS, steady, **settings)
    alone.asks("polite", 0.2 * CAPACITY)
    alone.run(60.0)
    beside = Crowd(SLOTS, steady, **settings)
    beside.asks("flood", 5 * CAPACITY)
    beside.asks("polite", 0.2 * CAPACITY)
    beside.run(60.0)
    assert {o.kind for o in beside.outcomes["polite"]} == {""}
    slower_s = quantile(beside.answered("polite"), 0.99) - quantile(alone.answered("polite"), 0.99)
    assert slower_s < RUN_S, "it waits for one slot, and for none of the flood that waits"
    assert len(beside.answered("flood")) > 0.75 * CAPACITY * 60


def test_two_floods_share_a_backend_evenly() -> None:
    crowd = Crowd(SLOTS, steady, max_queued_requests=20)
    crowd.asks("e", 5 * CAPACITY)
    crowd.asks("f", 2 * CAPACITY)
    crowd.run(60.0)
    shares = [len(crowd.answered(name)) for name in ("e", "f")]
    assert sum(shares) > 0.95 * CAPACITY * 60
    assert min(shares) > 0.45 * sum(shares)


def test_what_hangs_for_a_while_does_not_keep_queries_out_afterwards() -> None:
    run_s = RUN_S
    crowd = Crowd(SLOTS, lambda _: run_s)
    crowd.asks("e", 0.9 * CAPACITY, timeout_s=1.0)
    crowd.run(10.0)
    run_s = 3.0
    crowd.run(20.0)
    run_s = RUN_S
    crowd.run(10.0)
    before = len(crowd.answered("e"))
    crowd.run(20.0)
    assert len(crowd.answered("e")) - before > 0.8 * CAPACITY * 20
