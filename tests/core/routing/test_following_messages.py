"""Queries that more follows: large bodies, and WebSockets, which stay open."""

from __future__ import annotations

from greenroom.core.routing.load import overdue
from greenroom.core.routing.tickets import SOCKET, Effect, NewQuery
from tests.core.routing.queries import (
    Ended,
    Query,
    WatchedRouter,
    assigned,
    backend,
    numbers,
    only,
    router,
)


def submit(made: WatchedRouter, follows: str, timeout_s: float | None = None) -> list[Effect]:
    query = Query(1, http_method="GET", follows=follows, timeout_s=timeout_s)
    return made.submit(NewQuery("c", query), 0.0) + made.mirror(0.0)


def test_a_time_limit_is_for_the_opening_of_a_websocket_alone() -> None:
    made = router(backend("r1"))
    (number,) = numbers(submit(made, SOCKET, timeout_s=1.0))
    made.begun("r1", [number], 0.5)
    assert made.next_due_at() is None
    assert made.expire(2.0) == []
    made.answered("r1", [(number, 101)], 3600.0)
    (ended,) = only(Ended, made.delivered("r1", [number]))
    assert (ended.status, ended.seconds) == (101, 0.5), "the metrics hear of the opening"
    assert made.is_empty


def test_an_open_websocket_takes_a_slot_and_is_not_slow() -> None:
    made = router(backend("r1", limit=1))
    (number,) = numbers(submit(made, SOCKET))
    assert overdue(made.state, 10.0) == {("e", "b"): 1}, "it is being opened for long"
    made.begun("r1", [number], 10.0)
    assert overdue(made.state, 20.0) == {}
    assert assigned(made.submit(NewQuery("c", Query(2)), 20.0)) == []
    assert assigned(made.answered("r1", [(number, 101)], 3600.0)) == [("r1", 2)]
    soon = made.submit(NewQuery("c", Query(3, timeout_s=2.0)), 3600.0)
    assert assigned(soon + made.finished("r1", [(2, 200)], 3600.0)) == [("r1", 3)], (
        "how long it was open says nothing"
    )
