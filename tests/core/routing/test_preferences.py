"""What a request router has said of a query: ranks of replicas, the best first."""

from __future__ import annotations

from functools import partial
from typing import Any

from greenroom.core.routing.tickets import NewQuery, Preference
from tests.core.routing.queries import Query, WatchedRouter, assigned, backend, endpoint, router

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
