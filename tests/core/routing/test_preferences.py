"""What a request router has said of a query: ranks of replicas, the best first."""

from __future__ import annotations

from functools import partial
from typing import Any

from greenroom.core.routing.tables import EndpointTable
from greenroom.core.routing.tickets import Grant, NewQuery, Preference
from tests.core.routing.queries import (
    Query,
    WatchedRouter,
    assigned,
    backend,
    endpoint,
    numbers,
    only,
    router,
)

ROUTER = {"request_router_class": "mine.Router"}


def made(*replicas: str, limit: int = 1, **settings: Any) -> WatchedRouter:
    return router(backend(*replicas, limit=limit, request_router=ROUTER, **settings))


def send(to: WatchedRouter, query_id: int, *ranks: tuple[str, ...], of: str = "b") -> Any:
    preference = Preference(of, query_id, ranks)
    return to.submit(NewQuery("c", Query(query_id)), 1.0, preference)


def test_the_first_rank_with_room_is_taken_and_there_the_least_loaded() -> None:
    used = made("b#1", "b#2", "b#3", limit=2)
    ranks = ("b#3",), ("b#1", "b#2")
    chosen = [assigned(send(used, number, *ranks))[0][0] for number in range(1, 7)]
    assert chosen[:2] == ["b#3", "b#3"]
    assert sorted(chosen[2:4]) == ["b#1", "b#2"]
    assert sorted(chosen[4:]) == ["b#1", "b#2"]


def test_others_are_taken_where_none_that_is_named_has_room_and_limits_hold() -> None:
    used = made("b#1", "b#2")
    assert assigned(send(used, 1, ("b#1",))) == [("b#1", 1)]
    assert assigned(send(used, 2, ("b#1",))) == [("b#2", 2)]
    waiting = send(used, 3, ("b#1",))
    assert assigned(waiting) == []
    assert assigned(used.finished("b#2", [(2, 200)], 2.0)) == [("b#2", 3)]


def test_one_that_waits_gets_a_named_replica_if_that_has_room_when_its_turn_comes() -> None:
    used = made("b#1", "b#2")
    first, second = send(used, 1, ("b#1",)), send(used, 2, ("b#2",))
    send(used, 3, ("b#2",))
    assert len(numbers(first + second)) == 2
    assert assigned(used.finished("b#2", numbers_of(second), 2.0)) == [("b#2", 3)]


def numbers_of(effects: Any) -> list[tuple[int, int]]:
    return [(number, 200) for number in numbers(effects)]


def test_strangers_and_replicas_that_are_gone_are_passed_over() -> None:
    used = made("b#1")
    assert assigned(send(used, 1, ("x#9", ""), (), ("b#1",))) == [("b#1", 1)]


def test_a_retry_goes_to_the_next_rank() -> None:
    used = made("b#1", "b#2", "b#3")
    send(used, 1, ("b#2",), ("b#3",), ("b#1",))
    assert assigned(used.replica_gone("b#2", (), 2.0)) == [("b#3", 1)]


def test_which_backend_is_asked_and_when_none_is() -> None:
    used = router(backend("b#1", request_router=ROUTER), backend("p#1", tag="p"))
    asked = partial(used.router.to_ask, "c")
    found = asked(Query(1))
    assert found is not None
    assert found.table.tag == "b"
    assert asked(Query(1, session_id="s")) is None, "sessions go first"
    assert asked(Query(1, endpoint="nowhere")) is None
    used.set_endpoint("plain", endpoint("plain", to="p"), 0.0)
    assert asked(Query(1, endpoint="plain")) is None
    used.set_backend("b", backend(request_router=ROUTER), 0.0)
    assert asked(Query(1)) is None, "there is no replica to choose"


def test_a_query_goes_to_the_backend_that_was_asked_while_that_has_traffic() -> None:
    used = router(backend("b#1", limit=50, request_router=ROUTER), backend("p#1", tag="p"))
    used.set_endpoint("e", EndpointTable(name="e", traffic={"b": 0.5, "p": 0.5}), 0.0)
    asked = [number for number in range(1, 20) if used.router.to_ask("c", Query(number))]
    assert 0 < len(asked) < 19, "some go to p, of which none is asked"
    for number in asked:
        assert assigned(send(used, number, ("b#1",))) == [("b#1", number)]
    used.set_endpoint("e", endpoint(to="p"), 0.0)
    assert assigned(send(used, 20, ("b#1",))) == [("p#1", 20)]


def test_no_lease_goes_past_a_request_router() -> None:
    used = made("b#1", limit=50)
    used.leases.lessees["c"] = True
    for number in range(1, 20):
        effects = send(used, number)
        assert not only(Grant, effects)
        used.finished("b#1", numbers_of(effects), 1.0)
