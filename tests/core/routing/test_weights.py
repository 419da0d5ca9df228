"""New and slow replicas take what is theirs, unless they are alone; no query waits for them."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from typing import Any

import pytest

from greenroom.core.routing.leases import HeldLease, HeldShare, Used
from greenroom.core.routing.load import busy
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BackendTable
from greenroom.core.routing.tickets import Assign, Grant, NewQuery, Revoke
from greenroom.core.routing.weights import (
    EVEN,
    LEAST,
    LEVELS,
    MOST_FACTOR,
    MOST_POWER,
    WINDOW_S,
    Pace,
    Paces,
    Taken,
    Weight,
)
from tests.core.routing.crowds import Crowd
from tests.core.routing.queries import Query, endpoint, ongoing, replica

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
        begun = [
            self.router.submit(NewQuery("c", Query(next(self._ids))), self.now)
            for _ in range(count)
        ]
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
                self.took(self.router.answered(ended.replica, done, self.now, is_awaited=False))
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
    assert loaded.router.state.replicas["b#4"].weight is EVEN


def test_it_has_one_query_at_a_time_at_first() -> None:
    loaded = Loaded("b#1", "b#2")
    loaded.begin(8)
    loaded.goes_on(20)
    loaded.has("b#1", "b#2", "b#3")
    assert loaded.begin(3) == 3
    assert ongoing(loaded.router) == {"b#1": 5, "b#2": 5, "b#3": 1}


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
    assert ongoing(loaded.router) == {"b#1": 4, "b#2": 4, "b#3": 4}


def test_a_load_counts_as_more_while_it_warms_up() -> None:
    weight = Weight(warm_at=10.0, warms_s=10.0)
    levels = [weight.level(3, now) for now in (0.0, 5.0, 9.0, 10.0)]
    assert levels == [int(3 * LEVELS / LEAST), 6 * LEVELS, int(3 * LEVELS / 0.9), 3 * LEVELS]
    assert weight.level(0, 0.0) == 0
    assert (weight.warm_in_s(4.0), weight.warm_in_s(11.0), EVEN.warm_in_s(0.0)) == (6.0, 0.0, 0.0)


# --- Slow replicas --------------------------------------------------------------------------------

HALF_SLOW = (1.0, 3.0, 1.0, 3.0)


def crowd(
    paces: tuple[float, ...], slots: int, load: float = 0.6, seed: int = 1, **settings: Any
) -> Crowd:
    """Return a crowd whose queries take a second on average, and offer this load."""
    chance = random.Random(seed + 100)  # not in step with when they come
    settings = {"learn_weights": True, **settings}
    at_full_speed = min(slots, settings.get("processors") or slots)
    made = Crowd(
        slots * len(paces), lambda _: chance.expovariate(1.0), paces=paces, seed=seed, **settings
    )
    made.asks("e", load * at_full_speed * sum(1.0 / pace for pace in paces))
    return made


def slow_share(made: Crowd) -> float:
    """Return the share of the later half of queries that the second and fourth replica had."""
    later = Counter(made.began_at[len(made.began_at) // 2 :])
    return (later["r2"] + later["r4"]) / later.total()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("slots", [1, 4, 30])
@pytest.mark.parametrize("load", [0.3, 0.95])
def test_equal_replicas_are_used_as_without_weights(slots: int, load: float, seed: int) -> None:
    crowds = [crowd((1.0,) * 3, slots, load, seed, learn_weights=learn) for learn in (True, False)]
    for each in crowds:
        each.run(3_000 / (load * slots))
    learned, counted = (each.began_at for each in crowds)
    assert len(learned) > 5_000
    assert learned == counted


@pytest.mark.parametrize("slots", [1, 4, 30])
def test_slow_ones_get_less_than_their_share_by_count(slots: int) -> None:
    learned, counted = (crowd(HALF_SLOW, slots, learn_weights=learn) for learn in (True, False))
    shares = []
    for each in (learned, counted):
        each.run(8_000 / slots)
        shares.append(slow_share(each))
    assert 0.01 < shares[0] < shares[1] - 0.02
    for tag in ("r2", "r4"):
        assert 2.0**MOST_POWER < learned.router.state.replicas[tag].weight.pace < 4.5**MOST_POWER
    assert {learned.router.state.replicas[tag].weight for tag in ("r1", "r3")} == {EVEN}


def test_where_queries_do_not_delay_each_other_slow_ones_get_hardly_any() -> None:
    """No order gives them less than Erlang's formula: 0.02 % of queries find the others full."""
    made = crowd(HALF_SLOW, 100)
    made.run(400)
    assert slow_share(made) < 0.03


@pytest.mark.parametrize("load", [0.6, 0.9])
def test_where_they_share_a_processor_slow_ones_get_what_they_can_do(load: float) -> None:
    """The more of them there are, the more each is delayed."""
    made = crowd(HALF_SLOW, 30, load, processors=1)
    made.run(6_000)
    assert 0.18 < slow_share(made) < 0.26
    assert {made.router.state.replicas[tag].weight for tag in ("r1", "r3")} == {EVEN}
    for tag in ("r2", "r4"):
        assert 1.0 < made.router.state.replicas[tag].weight.pace < 3.0


def test_full_ones_of_the_slow_are_levelled() -> None:
    made = crowd((1.0, 3.0, 1.0, 3.0), 100, load=0.95)
    made.run(200)
    most = 0
    for _ in range(100):
        made.run(0.5)
        load = ongoing(made.router)
        most = max(most, abs(load["r2"] - load["r4"]))
    assert min(load.values()) > 60
    assert most < 20


@pytest.mark.parametrize("slots", [1, 4, 30])
def test_limits_hold_and_no_replica_is_idle_while_queries_wait(slots: int) -> None:
    made = crowd(HALF_SLOW, slots, load=1.3, max_queued_requests=5)
    made.run(3_000 / slots)  # learned, and full
    assert ongoing(made.router) == dict.fromkeys(made.paces, slots)
    most = 0
    for _ in range(300):
        made.run(0.05)
        most = max(most, *ongoing(made.router).values())
        is_waiting = busy(made.router.state)["b"][0] > 0
        assert not is_waiting or set(ongoing(made.router).values()) == {slots}
    assert most == slots


def test_one_that_is_slow_no_more_comes_to_its_share_again() -> None:
    made = crowd((1.0, 1.0, 8.0), 4)
    made.run(600)
    assert made.router.state.replicas["r3"].weight.pace > 4
    made.paces["r3"] = 1.0
    made.run(2_000)
    assert made.router.state.replicas["r3"].weight is EVEN


def test_one_that_gets_nothing_while_others_are_idle_is_tried_again() -> None:
    made = crowd((1.0, 1.0, 8.0), 1, load=0.2)
    made.run(3_000)
    assert made.router.state.replicas["r3"].weight.pace > 2
    made.paces["r3"] = 1.0
    made.run(20_000)
    assert made.router.state.replicas["r3"].weight is EVEN


def test_a_difference_has_its_limit() -> None:
    made = crowd((1.0, 30.0), 30, load=0.3)
    made.run(3_000)
    assert made.router.state.replicas["r2"].weight.pace == MOST_FACTOR**MOST_POWER


@pytest.mark.parametrize("seed", range(8))
def test_what_queries_have_in_common_is_not_taken_for_a_difference_of_replicas(seed: int) -> None:
    """Each batch of thirty takes its own time, and all replicas become slow and quick together."""
    chance = random.Random(seed)
    paces, made = [Pace() for _ in range(4)], Paces()
    for window in range(200):
        all_take = 10.0 if window // 20 % 2 else 1.0
        for pace in paces:
            batch_takes = chance.lognormvariate(0.0, 0.5)
            for _ in range(30):
                pace.taken.add(all_take * batch_takes * chance.uniform(0.9, 1.1), 0)
        made.compare(paces, 0.0, window * WINDOW_S)
        assert max(pace.factor for pace in paces) < 2  # one in 4,000 windows may seem so
    assert {pace.factor for pace in paces} == {1.0}


@pytest.mark.parametrize(("of_the_quick", "is_slow"), [(800, True), (20, False)])
def test_one_that_had_few_queries_may_be_quicker_by_chance(
    of_the_quick: int, *, is_slow: bool
) -> None:
    paces, made = [Pace(), Pace()], Paces()
    for window in range(6):
        for pace, queries, takes in zip(paces, (of_the_quick, 800), (1.0, 1.5), strict=True):
            for number in range(queries):
                pace.taken.add(takes * (3.0 if number % 2 else 1 / 3.0), 0)
        made.compare(paces, 0.0, window * WINDOW_S)
    assert (paces[1].factor > 1.0) is is_slow


def test_what_gets_no_queries_any_more_is_unknown_after_a_while() -> None:
    paces, made = [Pace(), Pace()], Paces()
    quick, slow = paces
    for window in range(120):
        for number in range(60):
            quick.taken.add(1.0 + number % 3 / 10, 0)
            if window < 20:
                slow.taken.add(3.0 + number % 3 / 10, 0)
        made.compare(paces, 0.0, window * WINDOW_S)
        assert window != 40 or slow.factor > 2.0
    assert slow.factor == 1.0


def test_by_option_nothing_is_learned_and_what_was_is_forgotten() -> None:
    made = crowd((1.0, 3.0), 10, learn_weights=False)
    made.run(500)
    assert made.router.state.replicas["r2"].weight is EVEN
    made = crowd((1.0, 3.0), 10)
    made.run(500)
    assert made.router.state.replicas["r2"].weight.pace > 2
    tables = tuple(map(replica, made.paces))
    made.router.set_backend("b", BackendTable(tag="b", replicas=tables), made.now)
    assert made.router.state.replicas["r2"].weight.pace == 1.0


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_what_fails_or_is_refused_does_not_count_as_quick(status: int) -> None:
    router = Router(lambda: 0.0)
    tables = (replica("b#1"), replica("b#2"))
    table = BackendTable(tag="b", replicas=tables, learn_weights=True, outlier_ejection=False)
    router.set_backend("b", table, 0.0)
    router.set_endpoint("e", endpoint("e", to="b"), 0.0)
    now = 0.0
    for number in range(2_000):
        (assigned,) = router.submit(NewQuery("c", Query(number)), now)
        is_bad = assigned.replica == "b#1"
        now += 0.001 if is_bad else 1.0
        router.answered(
            assigned.replica, [(assigned.ticket.number, status if is_bad else 200)], now
        )
        router.delivered(assigned.replica, [assigned.ticket.number])
    assert router.state.replicas["b#2"].weight is EVEN


# --- Slow replicas under leases -------------------------------------------------------------------


class LeasedRouter:
    """A router that has granted a lease for two replicas to one caller."""

    def __init__(self, *, delays: bool = False) -> None:
        self.router, self.now, self.delays = Router(lambda: 0.0), 0.0, delays
        tables = (replica("b#1"), replica("b#2"))
        table = BackendTable(tag="b", replicas=tables, learn_weights=True)
        self.router.set_backend("b", table, 0.0)
        self.router.set_endpoint("e", endpoint("e", to="b"), 0.0)
        self.router.leases.lessees["c"] = True
        self._ids = itertools.count()
        self.lease = self.granted()

    def granted(self) -> Any:
        effects = [
            e
            for _ in range(2)
            for e in self.router.submit(NewQuery("c", Query(next(self._ids))), self.now)
        ]
        (grant,) = [each for each in effects if isinstance(each, Grant)]
        return grant.lease

    def reports(self, **took_s: float) -> list[Any]:
        """Let the caller report thirty queries at each replica that took so long."""
        self.now += WINDOW_S
        taken = {}
        for name, seconds in took_s.items():
            counted = Taken()
            for number in range(30):
                load = 20 + number % 3 if self.delays else 20
                counted.add(seconds * (1.0 + number % 3 / 10), load)
            taken[f"b#{name[1:]}"] = tuple(counted.take())
        return self.router.leases.used("c", self.lease.number, Used(0, {}, took=taken), self.now)


@pytest.mark.parametrize(
    ("delays", "times"),
    [(False, 3.0**MOST_POWER), (True, 3.0)],
    ids=["queries do not delay each other", "they do"],
)
def test_what_is_learned_under_a_lease_revokes_it_and_the_next_has_fewer_slots_there(
    delays: bool, times: float
) -> None:
    leased = LeasedRouter(delays=delays)
    assert len(set(leased.lease.slots.values())) == 1
    effects = [each for _ in range(10) for each in leased.reports(r1=1.0, r2=3.0)]
    assert effects == [Revoke(leased.lease)]
    assert leased.router.state.replicas["b#2"].weight.pace == pytest.approx(times, rel=0.01)
    leased.router.leases.returned("c", leased.lease.number, {}, leased.now)
    slots = leased.granted().slots
    assert abs(slots["b#2"] - slots["b#1"] / times) <= 1


def test_what_was_leased_of_replicas_that_are_gone_is_ignored() -> None:
    leased = LeasedRouter()
    leased.router.set_backend("b", BackendTable(tag="b", learn_weights=True), 0.0)
    assert [each for _ in range(10) for each in leased.reports(r1=1.0, r2=3.0)] == []


def test_equal_replicas_keep_their_lease() -> None:
    leased = LeasedRouter()
    assert [each for _ in range(30) for each in leased.reports(r1=1.0, r2=1.1)] == []


def test_a_caller_uses_and_reports_replicas_of_a_lease_by_what_they_take() -> None:
    quick, slow = HeldShare("quick", 50), HeldShare("slow", 50, None, Weight(pace=3.0))
    lease = HeldLease(1, "lease", "e", "b", (), None, [slow, quick], 0.0)
    assert [lease.take(0.0) for _ in range(2)] == [quick, slow]
    for _ in range(38):
        lease.take(0.0)
    assert lease.in_use() == {"quick": 30, "slow": 10}
    for status in (200, 201, 404, 499, 500):
        lease.free(slow, 0.0, status, 3.0)
    took = lease.take_used().took
    assert {name: taken[0] for name, taken in took.items()} == {"slow": 2}
    assert lease.take_used().took == {}
