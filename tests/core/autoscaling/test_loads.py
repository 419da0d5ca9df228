import random

from greenroom.core.autoscaling.decision import EXPIRE_S, SETTLE_S, Loads


def test_a_report_replaces_the_earlier_one_of_the_same_proxy() -> None:
    loads = Loads(0.0)
    loads.report("p", {"a": (1, 2), "b": (0, 1)}, 0.0)
    assert loads.report("p", {"a": (1, 2)}, 0.0) == {"b"}
    assert loads.report("p", {"a": (1, 2)}, 0.0) == set(), "the same again changes nothing"
    assert loads.busy() == {"a": (1, 2)}
    assert loads.report("p", {}, 0.0) == {"a"}
    assert loads.busy() == {}


def test_what_a_dead_proxy_had_counts_no_more() -> None:
    loads = Loads(0.0)
    loads.report("p", {"a": (1, 2)}, 0.0)
    loads.report("q", {"a": (1, 0)}, 0.0)
    assert loads.forget("p") == {"a"}
    assert loads.forget("p") == set()
    assert loads.of("a") == (1, 0)


def test_sums_are_those_of_the_newest_reports_whatever_came_before() -> None:
    drawn = random.Random(7)
    loads, newest = Loads(0.0), {}
    for _ in range(500):
        proxy = drawn.choice("pqr")
        load = {b: (drawn.randrange(3), drawn.randrange(3)) for b in "abc" if drawn.random() < 0.5}
        newest[proxy] = load
        loads.report(proxy, load, 0.0)
        for backend in "abc":
            each = [report.get(backend, (0, 0)) for report in newest.values()]
            assert loads.of(backend) == (sum(q for q, _ in each), sum(o for _, o in each))


def test_a_proxy_that_has_queries_and_falls_silent_counts_no_more() -> None:
    loads = Loads(0.0)
    loads.report("p", {"a": (1, 2)}, 1.0)
    loads.report("q", {"a": (0, 1)}, 4.0)
    loads.report("idle", {}, 0.0)
    assert loads.check_at == 1.0 + EXPIRE_S
    assert loads.expire(EXPIRE_S) == set(), "not yet"
    assert loads.expire(loads.check_at) == {"a"}
    assert loads.of("a") == (0, 1)
    assert loads.check_at == 4.0 + EXPIRE_S
    assert loads.queues("a") == (0, 0), "q, and the one that has nothing to report"


def test_what_is_known_is_complete_when_every_proxy_has_reported_or_had_its_time() -> None:
    loads = Loads(100.0)
    now = 100.0 + SETTLE_S
    assert not loads.is_complete(now - 0.1), "a new controller may not know of all yet"
    assert loads.is_complete(now)
    loads.expect("p", now)
    assert not loads.is_complete(now)
    loads.report("p", {}, now)
    loads.expect("p", now)
    assert loads.is_complete(now)
    loads.expect("q", now)
    loads.expire(now + EXPIRE_S)
    assert loads.is_complete(now + EXPIRE_S)
    loads.expect("r", now)
    loads.forget("r")
    assert loads.is_complete(now)


def test_queues_are_by_proxy() -> None:
    loads = Loads(0.0)
    loads.report("p", {"a": (3, 2)}, 0.0)
    loads.report("q", {"b": (1, 2)}, 0.0)
    assert sorted(loads.queues("a")) == [0, 3]
    assert loads.queues("never heard of") == (0, 0)
