"""Which queries are run again when their replica has died, and how many."""

from __future__ import annotations

import itertools

import pytest

from greenroom.core.routing.retries import MAX_ATTEMPTS, SPARE, RetryBudget, may_retry
from greenroom.core.routing.tables import BackendTable
from greenroom.core.routing.tickets import Assign, Effects, NewQuery, Refuse
from tests.core.routing.queries import (
    Query,
    Retried,
    RetryRefused,
    WatchedRouter,
    assigned,
    backend,
    endpoint,
    numbers,
    ongoing,
    only,
    replica,
    router,
)


@pytest.mark.parametrize(
    ("handle", "of_endpoint", "deployment", "method", "may"),
    [
        (True, False, False, "POST", True),
        (False, True, True, "GET", False),
        (None, True, False, "POST", True),
        (None, False, True, "GET", False),
        (None, None, True, "POST", True),
        (None, None, False, "GET", False),
        *(
            (None, None, None, m, True)
            for m in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE")
        ),
        *((None, None, None, m, False) for m in ("POST", "PATCH", "PURGE", "")),
    ],
)
def test_the_nearest_setting_decides(
    handle: bool | None,
    of_endpoint: bool | None,
    deployment: bool | None,
    method: str,
    may: bool,
) -> None:
    query = Query(1, retryable=handle, http_method=method)
    assert may_retry(method, (handle, of_endpoint, deployment)) is may
    made = router(backend("r1", "r2", retryable=deployment))
    made.set_endpoint("e", endpoint(retryable=of_endpoint), 0.0)
    made.submit(NewQuery("c", query), 0.0)
    assert bool(assigned(made.replica_gone("r1", (), 1.0))) is may
    sent_elsewhere = Query(2, retryable=handle, http_method=method)
    assert bool(assigned(made.submit(NewQuery("c", sent_elsewhere, resent=True), 1.0))) is may


def test_what_may_have_run_by_a_router_that_died_is_refused_where_it_may_not_be_retried() -> None:
    made = router(backend("r1"))
    (refusal,) = only(
        Refuse, made.submit(NewQuery("c", Query(1, retryable=None), resent=True), 0.0)
    )
    assert refusal.kind == "ReplicaUnavailableError"
    assert refusal.text == "e: the proxy died with this query under way; it may have run"
    assert made.is_empty


def deadly(made: WatchedRouter, effects: Effects, lives: itertools.count[int]) -> int:
    """Let each query kill its replica, which is replaced; return how many queries were run."""
    runs = 0
    while started := only(Assign, effects):
        runs += len(started)
        effects = [e for tag in {each.replica for each in started} for e in dies(made, tag, lives)]
    return runs


def dies(made: WatchedRouter, tag: str, lives: itertools.count[int]) -> Effects:
    effects = made.replica_gone(tag, (), 1.0)
    replicas = tuple(replica(f"r{i}", next(lives)) for i in range(4))
    table = BackendTable(tag="b", replicas=replicas, max_ongoing_requests=25)
    return effects + made.set_backend("b", table, 1.0)


@pytest.mark.parametrize("queries", [1, 7, 100, 1000])
def test_where_every_query_kills_its_replica_the_load_is_at_most_doubled(queries: int) -> None:
    made, lives = router(backend("r0", "r1", "r2", "r3", limit=25)), itertools.count(2)
    effects = [e for i in range(queries) for e in made.submit(NewQuery("c", Query(i)), 0.0)]
    runs = deadly(made, effects, lives)
    assert queries <= runs <= 2 * queries
    assert made.is_empty


def test_what_is_retried_too_often_hears_why_and_is_counted() -> None:
    made = router(backend("r1", "r2", "r3", limit=9))
    effects = made.submit(NewQuery("c", Query(1)), 0.0)
    effects = made.replica_gone(effects[0].replica, (), 1.0)
    assert only(Retried, effects) == [Retried("e", "b")]
    effects = made.replica_gone(only(Assign, effects)[0].replica, (), 1.0)
    assert only(RetryRefused, effects) == [RetryRefused("e", "b")]
    (refusal,) = only(Refuse, effects)
    assert (refusal.kind, refusal.retry_after_s) == ("ReplicaUnavailableError", 1.0)
    assert refusal.text == (
        "e: the replica died with this query under way, and it is not sent to another: "
        "retries are limited to as many as there are queries, and used up"
    )


def test_what_has_not_run_is_sent_again_without_any_budget() -> None:
    made = router(backend("r1", limit=1))
    effects = made.submit(NewQuery("c", Query(1)), 0.0)
    for second in range(1, 2 * MAX_ATTEMPTS):
        made.rejected("r1", numbers(effects), float(second), draining=False)
        effects = made.expire(second + 0.5)
        assert assigned(effects) == [("r1", 1)]
    made.set_backend("b", backend("r1", "r2", limit=1), 9.0)
    effects = made.replica_gone("r1", numbers(effects), 9.0)
    assert assigned(effects) == [("r2", 1)]
    assert only(Assign, effects)[0].ticket.attempts == 1
    made.set_backend("b", backend("r1", "r2", "r3", limit=1), 9.0)
    assert only(Retried, made.replica_gone("r2", (), 9.0)), "it paid in once, and took out nothing"


def test_a_budget_holds_what_a_backend_has_slots_and_no_hoard() -> None:
    budget = RetryBudget()
    assert not budget.take_out()
    for _ in range(1000):
        budget.pay_in(50)
    assert sum(budget.take_out() for _ in range(1000)) == 50 + SPARE
    for _ in range(1000):
        budget.pay_in(0)
    assert budget.tokens == SPARE


def test_what_is_owed_is_paid_when_a_budget_is_full() -> None:
    budget = RetryBudget()
    assert [budget.take_out(2) for _ in range(3)] == [True, True, False]
    for _ in range(SPARE + 1):
        budget.pay_in(0)
    assert (budget.tokens, budget.owed) == (SPARE, 1)
    budget.pay_in(0, queries=5)
    assert (budget.tokens, budget.owed) == (SPARE, 0)


def again(
    made: WatchedRouter, number: int, method: str = "GET", took_s: float = 0.5, **more: object
) -> Effects:
    """Have a query come that has failed at r1."""
    query = Query(number, http_method=method, retryable=None, **more)  # type: ignore[arg-type]
    return made.submit(NewQuery("c", query, failed=("r1", took_s)), 1.0)


def test_what_has_failed_is_tried_at_another_replica_though_that_has_more_to_do() -> None:
    made = router(backend("r1", "r2", limit=9))
    for number in range(4):
        made.submit(NewQuery("c", Query(number)), 0.0)
    made.finished("r1", [(ticket, 200) for ticket in (1, 3)], 0.5)
    assert ongoing(made) == {"r1": 0, "r2": 2}
    effects = again(made, 9)
    (sent,) = only(Assign, effects)
    assert only(Retried, effects) == [Retried("e", "b", "failed")]
    assert sent.replica == "r2"
    assert sent.ticket.attempts == 2


@pytest.mark.parametrize(
    ("replicas", "method", "refusal"),
    [
        (("r1",), "GET", "there is no other replica"),
        ((), "GET", "there is no other replica"),
        (("r1", "r2"), "POST", "it may have run"),
    ],
)
def test_what_has_failed_is_refused_where_it_may_not_be_tried_elsewhere(
    replicas: tuple[str, ...], method: str, refusal: str
) -> None:
    made = router(backend(*replicas))
    (refused,) = only(Refuse, again(made, 1, method))
    assert refusal in refused.text
    assert made.is_empty


def test_what_is_tried_elsewhere_has_the_time_that_is_left() -> None:
    made = router(backend("r1", "r2", request_timeout_s=5.0))
    assert assigned(again(made, 1, took_s=4.0))
    assert made.next_due_at() == 2.0  # now is 1.0
    assert [each for each in made.expire(2.0) if isinstance(each, Refuse)]
