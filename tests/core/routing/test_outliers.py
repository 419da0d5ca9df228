"""A replica that fails where others would not is found; queries that fail anywhere eject none."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from greenroom.core.routing.leases import Used
from greenroom.core.routing.outliers import (
    FAILURES,
    FIRST_S,
    FORGIVEN_S,
    LONGEST_S,
    TRIAL_QUERIES,
    TRIAL_S,
    WINDOW_S,
    Outliers,
    OutlierState,
    has_failed,
)
from greenroom.core.routing.router import Router
from greenroom.core.routing.tickets import Assign, Grant, NewQuery, Observer, Revoke
from tests.core.routing.queries import Query, backend, endpoint

REPLICAS = ["a", "b", "c"]


class Backend:
    """Replicas that fail by ``chance``, each query's input besides by ``poison``."""

    def __init__(self, chances, seed=0, poison=0.0):
        self.random = random.Random(seed)
        self.chances = chances
        self.poison = poison
        self.outliers = Outliers(self.random.random)
        self.now = 0.0
        self.got = dict.fromkeys(chances, 0)

    def query(self, wanted=None):
        """Send a query to a replica, by chance if none is wanted, unless it is to go elsewhere."""
        self.now += 0.01
        self.outliers.check(self.now)
        usable = [tag for tag in self.chances if not self.outliers.is_out(tag)]
        tag = next(iter(self.outliers.probed), None)
        trial = None
        if tag is None:
            tag = wanted if wanted in usable else self.random.choice(usable)
            if self.state(tag) is OutlierState.ON_TRIAL:
                trial = self.outliers.draw(tag)
                if not trial.is_kept:
                    tag = self.random.choice([each for each in usable if each != tag])
        self.got[tag] += 1
        failed = self.random.random() < max(self.chances[tag], self.poison)
        self.outliers.ended(tag, trial, failed=failed, replicas=len(self.chances), now=self.now)
        return failed

    def state(self, tag):
        return self.outliers.state(tag)


@pytest.mark.parametrize("chance", [1.0, 0.3])
def test_a_replica_that_fails_is_ejected_soon(chance):
    backend = Backend({"a": chance, "b": 0.0, "c": 0.0})
    queries = 0
    while not backend.outliers.out and queries < 300 / chance**2:  # of these a keeps a sixth
        backend.query()
        queries += 1
    assert backend.outliers.out == ["a"]
    before = backend.got["a"]
    for _ in range(int(FIRST_S / 0.01) - 10):
        assert not backend.query()
    assert backend.got["a"] == before


@pytest.mark.parametrize("poison", [1.0, 0.5, 0.05])
@pytest.mark.parametrize("wanted", [None, "a"])
def test_inputs_that_fail_anywhere_eject_none(poison, wanted):
    for seed in range(5):
        backend = Backend(dict.fromkeys(REPLICAS, 0.0), seed, poison)
        for _ in range(10_000):
            backend.query(wanted)
            assert not backend.outliers.out


def test_who_sends_them_to_an_idle_replica_one_by_one_ejects_none_while_others_serve():
    backend = Backend(dict.fromkeys(REPLICAS, 0.0))
    for _ in range(10_000):
        backend.poison = 1.0
        backend.query("a")
        backend.poison = 0.0
        backend.query("b")
    assert not backend.outliers.out


def test_where_all_fail_all_are_used_and_at_most_half_are_out():
    backend = Backend({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0})
    for _ in range(20_000):
        backend.query()
        assert len(backend.outliers.out) <= 2
    out = backend.outliers.out
    assert len(out) == 2
    assert backend.outliers.let_in(1, backend.now) == out[:1]
    assert backend.outliers.out == out[1:]


def failing(outliers, now, tag="a", times=FAILURES):
    """Let a replica fail; return whether it is on trial by that."""
    outliers.failed(tag, times, replicas=3, now=now)
    return outliers.state(tag) is OutlierState.ON_TRIAL


def eject(outliers, now, tag="a"):
    assert failing(outliers, now, tag)
    while not outliers.is_out(tag):
        trial = outliers.draw(tag)
        if trial.is_kept:
            outliers.ended(tag, trial, failed=True, replicas=3, now=now)
        else:
            outliers.ended("c", trial, failed=False, replicas=3, now=now)


def test_an_ejection_lasts_longer_each_time_and_ends_with_one_query_that_succeeds():
    outliers, now = Outliers(random.Random(1).random), 0.0
    eject(outliers, now)
    for number in range(1_100):  # it fails for days
        lasts_s = min(FIRST_S * 2 ** min(number, 8), LONGEST_S)
        outliers.check(now + lasts_s - 0.01)
        assert not outliers.probed
        assert not outliers.decide
        now += lasts_s
        outliers.check(now)
        assert [*outliers.probed] == ["a"]
        assert outliers.decide
        assert outliers.ended("a", None, failed=True, replicas=3, now=now) == "a"
        assert outliers.is_out("a")
    now += LONGEST_S
    outliers.check(now)
    assert outliers.ended("a", None, failed=False, replicas=3, now=now) == "a"
    assert outliers.state("a") is OutlierState.WELL
    assert not outliers.probed
    now += 1
    eject(outliers, now)  # again: it begins where the last one ended
    outliers.check(now + LONGEST_S - 1)
    assert outliers.state("a") is OutlierState.EJECTED


def test_one_that_is_let_in_as_too_many_are_out_begins_its_count_anew():
    outliers = Outliers(random.Random(1).random)
    eject(outliers, 0.0)
    outliers.check(FIRST_S)
    outliers.ended("a", None, failed=True, replicas=3, now=FIRST_S)
    assert outliers.ejections("a") == 2
    assert outliers.let_in(0, FIRST_S) == ["a"]
    eject(outliers, FIRST_S)
    assert outliers.ejections("a") == 1


def test_after_an_ejection_trials_in_vain_are_counted_anew():
    outliers, now = Outliers(random.Random(1).random), TRIAL_S
    assert failing(outliers, 0.0)
    outliers.check(now)
    now += FIRST_S
    eject(outliers, now)
    now += FIRST_S
    outliers.check(now)
    outliers.ended("a", None, failed=False, replicas=3, now=now)
    assert failing(outliers, now)
    now += TRIAL_S
    outliers.check(now)
    assert failing(outliers, now + FIRST_S)


def test_what_was_is_forgiven():
    outliers = Outliers(random.Random(1).random)
    eject(outliers, 0.0)
    outliers.check(FIRST_S)
    outliers.ended("a", None, failed=False, replicas=3, now=FIRST_S)
    outliers.check(FIRST_S + FORGIVEN_S - 1)
    assert outliers
    outliers.check(FIRST_S + FORGIVEN_S + 1)
    assert not outliers
    now = 2 * FORGIVEN_S
    eject(outliers, now)
    outliers.check(now + FIRST_S)
    assert [*outliers.probed] == ["a"]


def test_few_failures_and_old_ones_are_no_reason_for_a_trial():
    outliers = Outliers(random.random)
    assert not failing(outliers, 0.0, times=FAILURES - 1)
    assert not failing(outliers, WINDOW_S + 0.1, times=FAILURES - 1)
    assert not outliers.decide
    assert failing(outliers, WINDOW_S + 0.2, times=1)
    assert outliers.decide
    alone = Outliers(random.random)
    alone.failed("a", 100, replicas=1, now=0.0)
    assert not alone


@pytest.mark.parametrize(("by", "trials"), [("time", 1_100), ("queries", 8)])
def test_a_trial_without_evidence_ends_and_the_next_one_is_later_each_time(by, trials):
    outliers, now = Outliers(random.Random(1).random), 0.0
    for number in range(trials):
        assert failing(outliers, now)
        if by == "time":
            now += TRIAL_S
            outliers.check(now)
        else:
            for _ in range(TRIAL_QUERIES):
                outliers.ended("a", outliers.draw("a"), failed=False, replicas=3, now=now)
        assert outliers.state("a") is OutlierState.WELL
        rest_s = min(FIRST_S * 2 ** min(number, 8), LONGEST_S)
        assert not failing(outliers, now + rest_s - 0.01)
        now += rest_s


@pytest.mark.parametrize(
    ("status", "failed"),
    [
        *((200, False), (404, False), (429, False), (499, False), (500, True), (502, True)),
        *((503, False), (504, False)),
    ],
)
def test_only_failures_of_code_count(status, failed):
    assert has_failed(status) is failed


# --- The router -----------------------------------------------------------------------------------


class Recorder(Observer):
    def __init__(self):
        self.events = []

    def ejected(self, event):
        self.events.append(event)


class Hole:
    """A router whose replica "b#1" fails as soon as it has a query; the others are slow."""

    def __init__(self, *tags, failing=("b#1",), limit=100, seed=0, **settings):
        self.random = random.Random(seed)
        self.router = Router(self.random.random)
        self.recorder = Recorder()
        self.router.observers.add(self.recorder)
        self.table = backend(*(tags or ("b#1", "b#2", "b#3")), limit=limit, **settings)
        self.router.set_backend("b", self.table, 0.0)
        self.router.set_endpoint("e", endpoint(), 0.0)
        self.failing = set(failing)
        self.ids = itertools.count(1)
        self.now = 0.0
        self.open = []  # (replica, ticket) that a good replica runs

    def query(self, status=500, **fields):
        """Send a query; the oldest ones of good replicas end, so that ten run; return its place."""
        self.now += 0.01
        effects = self.router.submit(NewQuery("c", Query(next(self.ids), **fields)), self.now)
        return self.take(effects, status)

    def take(self, effects, status=500):
        place = None
        for each in [each for each in effects if isinstance(each, Assign)]:
            place = each.replica
            if place in self.failing:
                self.end(place, each.ticket, status)
            else:
                self.open.append((place, each.ticket))
        while len(self.open) > 10:
            self.end(*self.open.pop(0), 200)
        return place

    def end(self, tag, ticket, status):
        effects = self.router.answered(tag, [(ticket.number, status)], self.now)
        self.router.delivered(tag, [ticket.number])
        self.take(effects)

    def places(self, count, **fields):
        return Counter(self.query(**fields) for _ in range(count))


def test_a_black_hole_gets_a_few_queries_and_then_none_but_probes():
    hole = Hole()
    first, later = hole.places(200), hole.places(700)
    assert first["b#1"] < 60
    assert hole.recorder.events == [("b", "b#1", 1)]
    assert later["b#1"] == 0
    hole.places(300)  # the ejection ends
    assert hole.recorder.events == [("b", "b#1", 1), ("b", "b#1", 2)], "by one probe"
    hole.failing.clear()
    hole.places(4000)
    assert hole.recorder.events[2:] == [("b", "b#1", 0)]
    assert hole.places(300)["b#1"] > 50


def test_one_that_is_out_gets_one_probe_at_a_time():
    hole = Hole()
    hole.places(200)
    hole.failing.clear()
    hole.now += FIRST_S
    before = hole.open
    hole.open = []
    places = [hole.query() for _ in range(9)]
    assert places[0] == "b#1"
    assert "b#1" not in places[1:]
    assert hole.open[0][0] == "b#1"
    hole.end(*hole.open.pop(0), 200)
    assert "b#1" in hole.places(5)
    assert before


def test_poison_from_everybody_ejects_none_in_ten_thousand_queries():
    hole = Hole(failing=("b#1", "b#2", "b#3"))
    places = hole.places(10_000)
    assert not hole.recorder.events
    assert min(places[tag] for tag in ("b#1", "b#2", "b#3")) > 1_000


def replaced(hole, old, new, failing):
    """Let a replica go, and a while later another one come in its place."""
    others = [each.tag for each in hole.table.replicas if each.tag != old]
    hole.failing = {*hole.failing} - {old} | ({new} if failing else set())
    for tags in (others, [*others, new]):
        hole.table = backend(*tags, limit=100)
        hole.router.set_backend("b", hole.table, hole.now)
        hole.now += 3.0


def test_the_successor_of_one_that_was_out_is_probed_first():
    hole = Hole()
    hole.places(200)
    assert hole.recorder.events.pop() == ("b", "b#1", 1)
    replaced(hole, "b#1", "b#4", failing=True)
    assert hole.places(200)["b#4"] == 1
    assert hole.recorder.events.pop() == ("b", "b#4", 2), "it is out again at once"
    replaced(hole, "b#4", "b#5", failing=False)
    assert hole.places(200)["b#5"] > 20
    assert hole.recorder.events.pop() == ("b", "b#5", 0)
    replaced(hole, "b#5", "b#6", failing=True)
    assert hole.places(200)["b#6"] > 15, "one that was well has left no suspicion"


def test_one_that_comes_long_after_one_was_out_is_as_good_as_any():
    hole = Hole()
    hole.places(200)
    hole.now += FIRST_S
    others = [each.tag for each in hole.table.replicas if each.tag != "b#1"]
    hole.router.set_backend("b", backend(*others, limit=100), hole.now)
    hole.now += FORGIVEN_S
    hole.failing = {"b#7"}
    hole.router.set_backend("b", backend(*others, "b#7", limit=100), hole.now)
    assert hole.places(200)["b#7"] > 15


@pytest.mark.parametrize("bad", [2, 3])
def test_half_may_be_out_and_the_rest_are_used_however_bad(bad):
    tags = ("b#1", "b#2", "b#3", "b#4")
    hole = Hole(*tags, failing=tags[:bad])
    hole.places(500)
    out = {replica for _, replica, _ in hole.recorder.events}
    assert len(out) == 2
    assert out <= hole.failing
    assert hole.places(100).keys() == {*tags} - out


def test_one_that_is_out_is_used_again_when_the_others_are_gone():
    hole = Hole()
    hole.places(200)
    for tag in ("b#2", "b#3"):
        hole.take(hole.router.replica_gone(tag, [], hole.now))
    assert hole.query() == "b#1"


def test_by_option_none_is_ejected_and_those_that_are_out_come_back():
    hole = Hole(outlier_ejection=False)
    hole.places(300)
    assert not hole.recorder.events
    hole = Hole()
    hole.places(200)
    hole.router.set_backend("b", replace(hole.table, outlier_ejection=False), hole.now)
    assert hole.places(20)["b#1"] > 0


def test_queries_without_a_choice_do_not_count():
    hole = Hole()
    assert hole.places(300, multiplexed_model_id="m")["b#1"] > 100
    assert not hole.recorder.events
    assert hole.places(300)["b#1"] > 0, "they began no trial"


def test_a_part_of_an_answer_and_a_cancelled_query_say_nothing():
    hole = Hole(failing=())
    for _ in range(50):
        effects = hole.router.submit(NewQuery("c", Query(next(hole.ids))), hole.now)
        (assign,) = [each for each in effects if isinstance(each, Assign)]
        hole.router.begun(assign.replica, [assign.ticket.number], hole.now)
        hole.end(assign.replica, assign.ticket, 500)
        effects = hole.router.submit(NewQuery("c", Query(next(hole.ids))), hole.now)
        (assign,) = [each for each in effects if isinstance(each, Assign)]
        hole.router.cancel("c", assign.ticket.query.id, hole.now)
        hole.end(assign.replica, assign.ticket, 500)
    assert not hole.router.state.backends["b"].outliers


def test_failures_under_leases_begin_a_trial_that_the_router_decides_on():
    hole = Hole()
    hole.router.leases.lessees["c"] = True
    effects = []
    for _ in range(2):
        effects += hole.router.submit(NewQuery("c", Query(next(hole.ids))), hole.now)
    (lease,) = [each.lease for each in effects if isinstance(each, Grant)]
    few = Used(0, {500: (0.001,) * 2}, {"b#1": 2})
    assert hole.router.leases.used("c", lease.number, few, hole.now) == []
    more = Used(0, {500: (0.001,)}, {"b#1": 1})
    assert hole.router.leases.used("c", lease.number, more, hole.now) == [Revoke(lease)]
    hole.router.leases.returned("c", lease.number, {}, hole.now)
    for _ in range(3):
        effects = hole.router.submit(NewQuery("c", Query(next(hole.ids))), hole.now)
        assert not [each for each in effects if isinstance(each, Grant)]
        hole.take(effects)
    hole.places(200)
    assert hole.recorder.events == [("b", "b#1", 1)]
