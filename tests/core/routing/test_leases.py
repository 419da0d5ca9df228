"""Dispatch leases, case by case; their random lives are in tests/actors/caller."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from greenroom.core.routing.dispatching import PAUSE_S, WAIT_S
from greenroom.core.routing.leases import (
    ASK_WITHIN_S,
    IDLE_S,
    MAX_REPLICAS,
    RECENT_S,
    HeldLease,
    HeldShare,
    Used,
    share_of,
)
from greenroom.core.routing.load import busy, by_endpoint, overdue
from greenroom.core.routing.mirroring import MIRROR_S
from greenroom.core.routing.retries import MAX_ATTEMPTS
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BackendTable, EndpointTable
from greenroom.core.routing.tickets import (
    Assign,
    Ended,
    Grant,
    Lease,
    NewQuery,
    Observer,
    Refuse,
    Revoke,
)
from greenroom.core.routing.traffic import Split, key_of
from tests.core.routing.queries import Query, endpoint, finished, ongoing, replica

SOON_S = ASK_WITHIN_S / 10
LIMIT = 8


def table(limit: int = LIMIT, replicas: tuple[str, ...] = ("b#1",), **more: Any) -> BackendTable:
    tables = tuple(replica(tag) for tag in replicas)
    return BackendTable(tag="b", replicas=tables, max_ongoing_requests=limit, **more)


def leasing(limit: int = LIMIT, *callers: str, **more: Any) -> Router:
    """Return a router whose endpoint "e" has all its traffic at the backend "b"."""
    router = Router(lambda: 0.0)
    router.set_backend("b", table(limit, **more), 0.0)
    router.set_endpoint("e", endpoint("e", to="b"), 0.0)
    for caller in callers or ("c1",):
        router.leases.lessees[caller] = True
    return router


def run(router: Router, caller: str, number: int, now: float) -> list[Any]:
    """Let a query pass the router, from its beginning to its end; return the effects."""
    effects = router.submit(NewQuery(caller, Query(number)), now)
    assigned = [each for each in effects if isinstance(each, Assign)]
    for each in assigned:
        effects += finished(router, each.replica, [(each.ticket.number, 200)], now)
    return effects


def granted(router: Router, caller: str = "c1", now: float = 0.0) -> Lease:
    """Have a caller be told of a lease, by two queries in a row."""
    effects = run(router, caller, 1, now) + run(router, caller, 2, now + SOON_S)
    (lease,) = [each.lease for each in effects if isinstance(each, Grant)]
    return lease


# --- Grants ---------------------------------------------------------------------------------------


def test_one_that_sends_a_query_now_and_then_does_not() -> None:
    router = leasing()
    for number in range(5):
        effects = run(router, "c1", number, 2 * ASK_WITHIN_S * number)
        assert not any(isinstance(each, Grant) for each in effects)


def test_no_lease_is_granted_where_the_router_has_a_say() -> None:
    for limits, change in (
        ({}, lambda router: router.set_endpoint("e", endpoint("e", shadows={"b": 1.0}, to="b"), 0)),
        ({"max_queued_requests": 5}, lambda router: None),
        ({"limit": 1}, lambda router: None),
        ({"request_router": {}}, lambda router: None),
        ({"unavailable": "it is about to end"}, lambda router: None),
    ):
        router = leasing(**limits)
        change(router)
        for number in range(4):
            effects = run(router, "c1", number, number * SOON_S)
            assert not any(isinstance(each, Grant) for each in effects)


def test_mirrored_queries_that_wait_have_leases_revoked_and_none_granted() -> None:
    router = leasing()
    router.set_endpoint("f", endpoint("f", to="other", shadows={"b": 1.0}), 0.0)
    router.set_backend("other", replace(table(), tag="other", replicas=(replica("other#1"),)), 0.0)
    lease, now = granted(router), 1.0
    router.submit(NewQuery("c2", Query(10, endpoint="f")), now)
    assert not router.expire(now + MIRROR_S), "mirrored queries get half of the slots"
    assert Revoke(lease) in router.expire(now + MIRROR_S + WAIT_S)
    (own,) = router.submit(NewQuery("c2", Query(11)), now)
    now += PAUSE_S + 1.0
    assert not router.leases.returned("c1", lease.number, {"b#1": 3}, now), "half are taken"
    for number in (12, 13):
        effects = run(router, "c1", number, now)
        assert not any(isinstance(each, Grant) for each in effects)
    (effect,) = finished(router, "b#1", [(own.ticket.number, 200)], now)
    assert effect.ticket.is_mirrored
    assert any(isinstance(each, Grant) for each in run(router, "c1", 14, now))


def test_a_greedy_caller_returns_what_is_above_its_share_when_another_asks() -> None:
    router, at = leasing(100, "greedy", "modest"), 2 * RECENT_S
    first = granted(router, "greedy")
    assert first.slots == {"b#1": share_of(100, 1)}
    router.leases.used("greedy", first.number, Used(1, {}), at)  # it asks the router no more
    effects = run(router, "modest", 1, at) + run(router, "modest", 2, at + 0.01)
    assert [each for each in effects if not isinstance(each, Assign)] == [Revoke(first)]
    router.leases.returned("greedy", first.number, {}, at + 0.02)
    found = {}
    for number in range(3, 9):
        for caller in ("greedy", "modest"):
            for effect in run(router, caller, number, at + 0.02 + number / 1000):
                if isinstance(effect, Grant):
                    found[caller] = effect.lease
    slots = {caller: lease.slots["b#1"] for caller, lease in found.items()}
    assert slots == {"greedy": 37, "modest": 37}


@pytest.mark.parametrize(("is_revoked", "slots"), [(False, 75), (True, 37)])
def test_a_caller_that_is_alone_again_gets_more_unless_it_is_to_return_its_lease(
    *, is_revoked: bool, slots: int
) -> None:
    router = leasing(100, "c1", "c2")
    router.leases.returned("c2", granted(router, "c2").number, {}, 0.1)
    lease = granted(router, "c1", 0.1)
    assert lease.slots == {"b#1": 37}
    if is_revoked:
        moved(router, "all")
    effects = [e for n in (9, 10) for e in run(router, "c1", n, 2 * RECENT_S)]
    assert [e for e in effects if isinstance(e, Grant)] == [Grant(lease)] * (not is_revoked)
    assert lease.slots == {"b#1": slots}


def test_a_lease_is_of_the_least_loaded_replicas_here_that_may_get_queries() -> None:
    router, tags = leasing(), [f"b#{number}" for number in range(MAX_REPLICAS + 4)]
    tables = [replica(tag, host="far" if tag == "b#1" else "") for tag in tags]
    router.set_backend("b", replace(table(), replicas=tuple(tables)), 0.0)
    for number in range(100, 100 + 2 * len(tags)):
        router.submit(NewQuery("another", Query(number)), 0.0)
    first = {tag: each for tag, each in router.state.replicas.items() if tag not in ("b#1", "b#2")}
    freed = list(first)[3 : 3 + MAX_REPLICAS - 1]
    for tag in (*freed, "b#1", "b#2"):
        numbers = list(router.state.replicas[tag].ongoing)
        finished(router, tag, [(number, 200) for number in numbers], 0.0)
    router.rejected("b#2", [], 0.0, draining=True)
    assert granted(router).slots.keys() <= first.keys()
    (lease,) = router.state.leases.values()
    assert len(lease.slots) == MAX_REPLICAS
    assert set(freed) <= lease.slots.keys()


def split(*, of_splits: bool = True, **more: Any) -> tuple[Router, Callable[[str, int], int]]:
    """Return a router whose endpoint has two backends, and what finds the n-th number for one."""
    router = leasing()
    other = {"replicas": (replica("d#1"),), "max_ongoing_requests": LIMIT} | more
    router.set_backend("d", BackendTable(tag="d", **other), 0.0)
    table = EndpointTable(name="e", traffic={"b": 0.5, "d": 0.5})
    router.set_endpoint("e", table, 0.0)
    router.leases.lessees["c1"] = of_splits

    def number(backend: str, index: int) -> int:
        chosen = Split(table.traffic).choose
        found = (n for n in itertools.count(1) if chosen(key_of(Query(n), "c1")) == backend)
        return next(itertools.islice(found, index, None))

    return router, number


def test_where_traffic_is_split_each_backend_has_a_lease_of_its_own() -> None:
    router, number = split()
    found = []
    for index in range(2):
        for tag in ("b", "d"):
            effects = run(router, "c1", number(tag, index), index * SOON_S)
            found += [(tag, each.lease) for each in effects if isinstance(each, Grant)]
    assert [tag for tag, _ in found] == ["b", "d"]
    assert [lease.slots for _, lease in found] == [{"b#1": 6}, {"d#1": 6}]
    weights = EndpointTable(name="e", traffic={"b": 0.9, "d": 0.1})
    assert router.set_endpoint("e", weights, 1.0) == [Revoke(lease) for _, lease in found]


def test_a_caller_that_cannot_choose_among_backends_has_leases_only_where_there_is_one() -> None:
    router, number = split(of_splits=False)
    for index in range(4):
        effects = run(router, "c1", number("b", index), index * SOON_S)
        assert not any(isinstance(each, Grant) for each in effects)
    router.set_endpoint("e", endpoint("e", to="b"), 1.0)
    granted(router, now=2.0)


def test_what_is_overdue_under_leases_counts_by_their_backends_until_it_has_ended() -> None:
    router = leasing()
    lease = granted(router)
    router.leases.used("c1", lease.number, Used(3, {}, overdue=2), 40.0)
    assert overdue(router.state, 7.0) == {("e", "b"): 2}
    router.leases.returned("c1", lease.number, {"b#1": 1}, 41.0)
    router.leases.used("c1", lease.number, Used(1, {408: [33.0]}, overdue=1), 41.0)
    assert overdue(router.state, 8.0) == {("e", "b"): 1}
    router.leases.returned("c1", lease.number, {}, 42.0)
    assert not overdue(router.state, 9.0)


def moved(router: Router, path: str) -> list[Any]:
    """Have a path lead elsewhere than before, by which all leases are revoked."""
    version = router.state.routes.version
    effects = router.set_endpoint("g", EndpointTable(name="g", route=f"/{path}"), 1.0)
    assert router.state.routes.version > version or not effects
    return effects


# --- Ends -----------------------------------------------------------------------------------------


def test_what_a_change_of_tables_revokes_is_unconfirmed_until_it_is_returned() -> None:
    changes = {
        "traffic": lambda r: r.set_endpoint("e", endpoint("e", to="other"), 1.0),
        "deletion": lambda r: r.set_endpoint("e", None, 1.0),
        "limits": lambda r: r.set_backend("b", table(4), 1.0),
        "replicas": lambda r: r.set_backend("b", table(replicas=("b#1", "b#2")), 1.0),
        "a shadow": lambda r: r.set_endpoint("e", endpoint("e", shadows={"b": 1.0}, to="b"), 1.0),
        "a route": lambda r: r.set_endpoint("f", EndpointTable(name="f", route="/e/f"), 1.0),
    }
    for what, change in changes.items():
        router = leasing()
        lease = granted(router)
        assert Revoke(lease) in change(router), what
        assert router.leases.unconfirmed == {lease.number}
        assert Revoke(lease) not in moved(router, "once"), "its caller knows"
        router.leases.returned("c1", lease.number, {"b#1": 2}, 1.0)
        assert not router.leases.unconfirmed, "nothing begins; what has begun runs on"
        assert Revoke(lease) not in moved(router, "twice"), "it is back"
        assert busy(router.state) == {"b": (0, 2)}
        router.leases.fenced(lease.number, 1.0)  # which its replicas say late
        assert ongoing(router)["b#1"] == 2
        assert router.leases.returned("c1", lease.number, {}, 1.0) == []
        assert ongoing(router).get("b#1", 0) == 0


def test_what_another_says_of_a_callers_lease_changes_nothing() -> None:
    router = leasing(LIMIT, "c1", "c2")
    lease = granted(router)
    router.leases.used("c2", lease.number, Used(3, {200: [0.1]}, overdue=1), 1.0)
    router.leases.returned("c2", lease.number, {}, 1.0)
    router.leases.fenced(lease.number, 1.0)  # nor what replicas say of one that is not revoked
    assert busy(router.state) == {}
    assert not overdue(router.state, 0.0)
    assert ongoing(router) == {"b#1": lease.slots["b#1"]}


def test_a_lease_of_a_backend_that_was_deleted_says_nothing_of_the_next_one_with_its_name() -> None:
    router = leasing()
    first = granted(router)
    router.set_backend("b", None, 1.0)
    router.set_backend("b", table(100), 2.0)
    second = granted(router, now=2.0)
    router.leases.returned("c1", first.number, {}, 3.0)
    again = [e for number in (5, 6) for e in run(router, "c1", number, 3.0)]
    assert not any(isinstance(each, Grant) for each in again), "it has one"
    assert ongoing(router)["b#1"] == sum(second.slots.values())


def test_the_same_table_again_revokes_nothing() -> None:
    router = leasing()
    granted(router)
    assert router.set_backend("b", table(), 1.0) == []
    assert router.set_endpoint("e", endpoint("e", to="b"), 1.0) == []


def test_a_lease_is_gone_with_its_caller_and_when_its_replicas_refuse_it() -> None:
    router = leasing()
    lease = granted(router)
    assert router.caller_gone("c1", 1.0) == []
    assert ongoing(router) == {"b#1": 0}

    router = leasing()
    lease = granted(router)
    router.set_endpoint("e", endpoint("e", to="other"), 1.0)
    assert router.leases.unconfirmed
    assert router.leases.fenced(lease.number, 1.0) == []
    assert not router.leases.unconfirmed
    assert ongoing(router) == {"b#1": 0}
    assert router.leases.returned("c1", lease.number, {}, 2.0) == [], "it may come after all"


def test_a_lease_whose_replicas_have_died_is_revoked_or_gone_if_it_is_back() -> None:
    for is_back in (False, True):
        router = leasing()
        lease = granted(router)
        if is_back:
            router.leases.returned("c1", lease.number, {"b#1": 2}, 1.0)
        assert router.replica_gone("b#1", (), 1.0) == ([] if is_back else [Revoke(lease)])
        assert list(router.state.leases) == ([] if is_back else [lease.number])


def test_a_lease_is_revoked_when_a_query_waits_for_its_backend_unless_the_wait_is_short() -> None:
    router = leasing(4)
    lease = granted(router)
    (assigned,) = router.submit(NewQuery("c2", Query(1)), 1.0)
    assert (
        router.submit(NewQuery("c2", Query(2)), 1.0)
        == router.submit(NewQuery("c2", Query(3)), 1.0)
        == []
    )
    assert router.expire(1.0 + WAIT_S / 2) == [], "not yet"
    (second,) = finished(router, "b#1", [(assigned.ticket.number, 200)], 1.0 + WAIT_S / 2)
    (third,) = finished(router, "b#1", [(second.ticket.number, 200)], 1.0 + WAIT_S / 2)
    assert router.submit(NewQuery("c2", Query(4)), 1.0 + WAIT_S / 2) == []
    assert router.expire(1.0 + WAIT_S) == [], "the first that waits has not for long"
    finished(router, "b#1", [(third.ticket.number, 200)], 1.0 + WAIT_S)
    assert router.expire(1.0 + 2 * WAIT_S) == [], "nothing waits any more"
    assert router.submit(NewQuery("c2", Query(5)), 2.0) == []
    assert router.next_due_at() == 2.0 + WAIT_S
    assert router.expire(2.0 + WAIT_S) == [Revoke(lease)]
    assert router.next_due_at() is None


def test_after_queries_had_to_wait_leases_pause() -> None:
    router = leasing(4)
    lease = granted(router)
    tickets = []
    for number in range(5):
        tickets += [
            e.ticket for e in router.submit(NewQuery("c2", Query(number)), 1.0) if type(e) is Assign
        ]
    assert router.expire(1.0 + WAIT_S) == [Revoke(lease)]
    effects = router.leases.returned("c1", lease.number, {}, 1.0)
    tickets += [e.ticket for e in effects if type(e) is Assign]
    finished(router, "b#1", [(ticket.number, 200) for ticket in tickets], 1.0)
    finished(router, "b#1", [(number, 200) for number in range(1, 50)], 1.0)
    at = 1.0
    grants = []
    for number in range(10, 60):
        at += PAUSE_S / 20
        grants += [at for e in run(router, "c1", number, at) if isinstance(e, Grant)]
    assert grants
    assert grants[0] >= 1.0 + WAIT_S + PAUSE_S


def test_a_lease_leaves_a_router_with_many_queries_room_for_more() -> None:
    router = leasing(100)
    for number in range(60):
        router.submit(NewQuery("has none", Query(number)), 0.0)
    effects = [
        e for number in range(60, 62) for e in router.submit(NewQuery("c1", Query(number)), SOON_S)
    ]
    (lease,) = [each.lease for each in effects if isinstance(each, Grant)]
    assert lease.slots == {"b#1": 13}, "of 100 beside 62 there, with 25 kept for others"
    effects = [
        e
        for number in range(62, 87)
        for e in router.submit(NewQuery("has none", Query(number)), 0.1)
    ]
    assert {type(each) for each in effects} == {Assign}, "nothing waits"


def test_the_first_of_those_that_were_refused_gets_the_only_free_slot() -> None:
    router = leasing(2)
    router.submit(NewQuery("c2", Query(1)), 0.0)
    for number in (4, 3, 2):
        assert router.submit(NewQuery("c1", Query(number), is_refused=True), 0.1) == []
    (assigned,) = [each for each in router.fill(0.1) if isinstance(each, Assign)]
    assert assigned.ticket.query.id == 2


def test_a_query_that_was_lost_under_a_lease_is_retried_by_the_rules_of_all() -> None:
    router = leasing()
    (assigned,) = router.submit(NewQuery("c1", Query(1), attempts=1), 0.0)
    assert assigned.ticket.attempts == 2
    (refused,) = router.submit(NewQuery("c1", Query(2, retryable=False), attempts=1), 0.0)
    assert isinstance(refused, Refuse)
    assert "it may have run" in refused.text
    (refused,) = router.submit(NewQuery("c1", Query(3), attempts=MAX_ATTEMPTS), 0.0)
    assert isinstance(refused, Refuse)
    assert "3 replicas died" in refused.text


def test_observers_hear_of_queries_under_leases() -> None:
    heard = []

    class Listens(Observer):
        def ended(self, event: Ended) -> None:
            heard.append(event)

    router = leasing()
    lease = granted(router)
    router.observers.add(Listens())
    paid = router.state.endpoints["e"].budgets["b"].tokens
    router.leases.used("c1", lease.number, Used(3, {200: [0.1, 0.2], 500: [0.3]}), 1.0)
    assert heard == [("e", "b", 200, [0.1, 0.2], [0, 0]), ("e", "b", 500, [0.3], [0])]
    assert router.state.endpoints["e"].budgets["b"].tokens == paid + 3
    assert router.state.backends["b"].rate.run_s == pytest.approx(0.2)
    assert busy(router.state) == {"b": (0, 3)}
    assert by_endpoint(router.state)[0] == {("e", "b"): (0, 3)}


# --- The caller's side ----------------------------------------------------------------------------


def held(**slots: int) -> HeldLease:
    shares = [HeldShare(tag, count) for tag, count in slots.items()]
    return HeldLease(1, "lease", "e", "b", (), None, shares, 0.0)


def test_replicas_take_turns_and_get_no_more_than_their_slots() -> None:
    lease = held(a=2, b=3)
    taken = Counter(share.replica for _ in range(4) if (share := lease.take(0.0)))
    assert taken == {"a": 2, "b": 2}
    assert lease.take(0.0) is not None
    assert lease.take(0.0) is None
    assert lease.in_use() == {"a": 2, "b": 3}
    lease.extend({"a": 3})
    assert {share.replica: share.slots for share in lease.shares} == {"a": 3, "b": 3}


def test_it_is_returned_when_it_is_idle_or_a_replica_is_silent() -> None:
    lease = held(a=2)
    assert not lease.is_to_be_returned(IDLE_S / 2, 1.0)
    assert lease.is_to_be_returned(IDLE_S, 1.0)
    share = lease.take(5.0)
    assert share is not None
    assert not lease.is_to_be_returned(5.9, 1.0)
    assert lease.is_to_be_returned(6.1, 1.0)
    lease.free(share, 6.1)
    assert not lease.is_to_be_returned(6.1 + IDLE_S / 2, 1.0)


def test_a_report_says_each_thing_once() -> None:
    lease, now = held(a=3), 1.0
    shares = [share for _ in range(3) if (share := lease.take(now))]
    lease.free(shares[0], now, 200, 0.1)
    lease.free(shares[1], now, 500, 0.2)
    lease.give_up(408, 0.3)
    ((tag, took),) = (used := lease.take_used()).took.items()
    assert used[:3] == (1, {200: [0.1], 500: [0.2], 408: [0.3]}, {"a": 1})
    assert (tag, took[0], took[3]) == ("a", 1, 2), "a query, beside two others"
    assert lease.take_used() == Used(1, {}, {}, {})
