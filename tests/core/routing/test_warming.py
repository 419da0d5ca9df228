"""A new replica comes to its share little by little, unless it is alone; no query waits for it."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import Any

import pytest

from greenroom.core.routing.leases import HeldLease, HeldShare
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BackendTable
from greenroom.core.routing.tickets import Assign
from greenroom.core.routing.warming import LEAST, WARM, Warming
from tests.core.routing.queries import Query, endpoint, replica

SLOW_S = 10.0


class Loaded:
    """A router with so many queries under way: when one ends, the next begins."""

    def __init__(self, *replicas: str, limit: int = 100, slow_start_s: float = SLOW_S) -> None:
        self.router = Router(lambda: 0.0)
        self.now = 0.0
        self.settings = {"max_ongoing_requests": limit, "slow_start_s": slow_start_s}
        self.has(*replicas)
        self.router.set_endpoint("e", endpoint("e", to="b"), 0.0)
        self.under_way: deque[Assign] = deque()
        self._ids = itertools.count()

    def has(self, *replicas: str) -> None:
        tables = tuple(map(replica, replicas))
        table = BackendTable(tag="b", replicas=tables, **self.settings)  # type: ignore[arg-type]
        self.took(self.router.set_backend("b", table, self.now))

    def took(self, effects: list[Any]) -> list[Assign]:
        assigned = [each for each in effects if isinstance(each, Assign)]
        if assigned:
            self.under_way += assigned
        return assigned

    def begin(self, count: int) -> int:
        """Begin queries; return how many of them did not have to wait."""
        begun = [self.router.submit("c", Query(next(self._ids)), self.now) for _ in range(count)]
        return sum(len(self.took(each)) for each in begun)

    def goes_on(self, seconds: float) -> Counter[str]:
        """Let time pass in which each query takes a second; return where they were on average."""
        steps = int(seconds * 100)
        seen: Counter[str] = Counter()
        for _ in range(steps):
            self.now += 0.01
            for _ in range(max(len(self.under_way) // 100, 1)):
                ended = self.under_way.popleft()
                done = [(ended.ticket.number, 200)]
                self.took(self.router.finished(ended.replica, done, self.now))
                self.begin(1)
            seen.update(each.replica for each in self.under_way)
        return Counter({tag: round(count / steps) for tag, count in seen.items()})


def test_a_new_replica_comes_to_its_share_over_the_time_that_was_set() -> None:
    loaded = Loaded("b#1", "b#2", "b#3")
    loaded.begin(90)
    loaded.goes_on(20)
    loaded.has("b#1", "b#2", "b#3", "b#4")
    shares = [loaded.goes_on(2.5)["b#4"] for _ in range(4)]
    assert 1 <= shares[0] < 90 / 4 / 3
    assert shares == sorted(shares)
    assert 10 <= shares[2] < 90 / 4 - 2
    assert set(loaded.goes_on(5).values()) <= {22, 23}
    assert loaded.router.warming("b#4") is WARM


def test_it_has_one_query_at_a_time_at_first() -> None:
    loaded = Loaded("b#1", "b#2")
    loaded.begin(8)
    loaded.goes_on(20)
    loaded.has("b#1", "b#2", "b#3")
    assert loaded.begin(3) == 3
    assert loaded.router.ongoing() == {"b#1": 5, "b#2": 5, "b#3": 1}


@pytest.mark.parametrize(
    ("slow_start_s", "waited_s"),
    [(0.0, 20.0), (SLOW_S, 0.0)],
    ids=["it is switched off", "all have just come"],
)
def test_it_takes_all_that_it_can_at_once_where(slow_start_s: float, waited_s: float) -> None:
    loaded = Loaded("b#1", "b#2", slow_start_s=slow_start_s)
    loaded.begin(8)
    if waited_s:
        loaded.goes_on(waited_s)
    loaded.has("b#1", "b#2", "b#3")
    loaded.begin(4)
    assert loaded.router.ongoing() == {"b#1": 4, "b#2": 4, "b#3": 4}


def test_it_takes_all_at_once_where_it_is_alone() -> None:
    loaded = Loaded("b#1")
    loaded.begin(4)
    loaded.goes_on(20)
    loaded.has("b#2")  # the other one is retired
    assert loaded.begin(50) == 50
    assert loaded.router.ongoing()["b#2"] == 50


def test_those_that_follow_soon_after_one_another_share_alike_soon() -> None:
    loaded = Loaded("b#1")
    loaded.begin(60)
    loaded.goes_on(0.2)
    loaded.has("b#1", "b#2")
    loaded.goes_on(1.5)
    assert set(loaded.goes_on(1).values()) == {30}


def test_no_query_waits_while_it_has_room() -> None:
    loaded = Loaded("b#1", "b#2", limit=4)
    loaded.begin(8)
    loaded.goes_on(20)
    assert loaded.begin(1) == 0
    loaded.has("b#1", "b#2", "b#3")
    assert loaded.begin(4) == 3
    assert loaded.router.ongoing() == {"b#1": 4, "b#2": 4, "b#3": 4}


def test_one_that_was_gone_from_the_tables_is_as_warm_as_before() -> None:
    loaded = Loaded("b#1", "b#2")
    loaded.begin(8)
    loaded.goes_on(20)
    loaded.has("b#1")  # as a new controller begins
    loaded.has("b#1", "b#2")
    assert loaded.router.warming("b#2") is WARM


def test_a_lease_is_used_as_the_router_would() -> None:
    shares = [HeldShare("old", 50), HeldShare("new", 50, None, Warming(10.0, 10.0))]
    lease = HeldLease(1, "lease", "e", (), None, shares, 0.0)
    for _ in range(9):
        lease.take(0.0)
    assert lease.in_use() == {"old": 8, "new": 1}
    for _ in range(13):
        lease.take(5.0)
    assert 6 <= lease.in_use()["new"] <= 8
    for _ in range(20):
        lease.take(10.0)
    assert lease.in_use() == {"old": 21, "new": 21}


def test_a_load_counts_as_more_while_it_warms_up() -> None:
    warming = Warming(until=10.0, lasts_s=10.0)
    assert [warming.level(3, now) for now in (0.0, 5.0, 9.0, 10.0)] == [int(3 / LEAST), 6, 3, 3]
    assert warming.level(0, 0.0) == 0
    assert (warming.left_s(4.0), warming.left_s(11.0), WARM.left_s(0.0)) == (6.0, 0.0, 0.0)
