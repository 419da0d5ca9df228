"""Mirrored queries run where there is room, and no caller's query pays for them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from greenroom.core.routing.load import busy, by_endpoint
from greenroom.core.routing.mirroring import MIRROR_S
from greenroom.core.routing.tables import BackendTable
from greenroom.core.routing.tickets import Assign, Cancel, Compare, NewQuery, Pairing, Refuse
from tests.core.routing.queries import (
    Dropped,
    Ended,
    Query,
    Starved,
    WatchedRouter,
    backend,
    endpoint,
    only,
)


def shadowed(*tables: BackendTable, proportion: float = 1.0, **settings: Any) -> WatchedRouter:
    """Return a router with endpoint "e" on backend "b", and backend "s" as its shadow."""
    made = WatchedRouter(lambda: 0.5)
    for table in tables:
        made.set_backend(table.tag, table, 0.0)
    made.set_endpoint("e", endpoint(shadows={"s": proportion}, **settings), 0.0)
    return made


def submit(made: WatchedRouter, *ids: int, now: float = 0.0, **query: Any) -> list[Any]:
    effects = []
    for i in ids:
        effects += made.submit(NewQuery("c", Query(i, **query)), now)
        effects += made.mirror(now)
    return effects


def mirrored(effects: list[Any]) -> list[tuple[str, int]]:
    """Return (replica, query id) of each mirrored query that was assigned."""
    return [(e.replica, e.ticket.query.id) for e in only(Assign, effects) if e.ticket.is_mirrored]


def originals(effects: list[Any]) -> list[tuple[str, int]]:
    return [
        (e.replica, e.ticket.query.id) for e in only(Assign, effects) if not e.ticket.is_mirrored
    ]


def ends(effects: list[Any]) -> list[tuple[str, int, bool]]:
    return [(e.backend, e.status, e.is_mirrored) for e in only(Ended, effects)]


def finish(made: WatchedRouter, effects: list[Any], replica: str, now: float = 1.0) -> list[Any]:
    """Let a replica answer all that ``effects`` gave it."""
    numbers = [e.ticket.number for e in only(Assign, effects) if e.replica == replica]
    return made.finished(replica, [(number, 200) for number in numbers], now)


MIB = 1024 * 1024
S1 = backend("s1", tag="s", limit=2)


def test_a_query_goes_to_its_backend_first_and_then_to_the_shadow() -> None:
    made = shadowed(backend("r1"), S1)
    effects = submit(made, 1)
    assert [(e.replica, e.ticket.is_mirrored) for e in effects] == [("r1", False), ("s1", True)]
    original, twin = (e.ticket for e in effects)
    assert twin.query is original.query, "the body is shared"
    assert (twin.endpoint, twin.route) == (original.endpoint, original.route)
    assert ends(finish(made, effects, "s1")) == [("s", 200, True)]
    assert ends(finish(made, effects, "r1")) == [("b", 200, False)]
    assert made.is_empty


def test_each_shadow_gets_its_proportion_whatever_the_others_get() -> None:
    drawn = random.Random(6)
    shadows = {"a": 0.2, "all": 1.0, "c": 0.5, "none": 0.0}
    made = WatchedRouter(drawn.random)
    made.set_backend("b", backend("r1", limit=20_000), 0.0)
    made.set_endpoint("e", endpoint(shadows=shadows), 0.0)
    effects = submit(made, *range(20_000))  # no shadow has a table, so all are dropped
    counts = Counter(each.backend for each in only(Dropped, effects))
    assert counts["all"] == 20_000
    assert "none" not in counts
    assert counts["a"] == pytest.approx(4_000, rel=0.06)
    assert counts["c"] == pytest.approx(10_000, rel=0.03)


def test_a_shadow_that_has_traffic_keeps_half_of_its_slots_for_it() -> None:
    made = WatchedRouter(lambda: 0.5)
    made.set_backend("b", backend("r1", limit=4), 0.0)
    made.set_endpoint("e", endpoint(shadows={"b": 1.0}), 0.0)
    effects = submit(made, 1, 2)
    assert originals(effects) == [("r1", 1), ("r1", 2)]
    assert mirrored(effects) == [("r1", 1)]
    assert originals(submit(made, 3)) == [("r1", 3)], "whatever mirrored queries wait"
    made.set_endpoint("e", endpoint(to="other"), 1.0)
    assert busy(made.state)["b"] == (0, 4), "its mirrored queries were dropped"


def test_a_shadow_that_loses_its_traffic_may_use_all_its_slots() -> None:
    made = shadowed(backend("r1", limit=9), backend("s1", tag="s", limit=4))
    made.set_endpoint("f", endpoint("f", to="s"), 0.0)
    assert len(mirrored(submit(made, 1, 2, 3, 4))) == 2
    assert originals(submit(made, 5, endpoint="f")) == [("s1", 5)]
    assert len(mirrored(made.set_endpoint("f", None, 1.0))) == 1
    made.set_backend("s", None, 1.0)
    made.set_backend("s", backend("s2", tag="s", limit=4), 1.0)
    assert len(mirrored(submit(made, 6, 7, 8, 9))) == 4


def test_queries_go_before_mirrored_ones_that_wait() -> None:
    made = WatchedRouter(lambda: 0.5)
    made.set_backend("b", backend("r1", limit=1), 0.0)
    made.set_endpoint("e", endpoint(shadows={"b": 1.0}), 0.0)
    first = submit(made, 1)
    submit(made, 2, 3)
    assert busy(made.state) == {"b": (5, 1)}
    order = []
    effects = first
    for _ in range(6):
        order += [(e.ticket.query.id, e.ticket.is_mirrored) for e in only(Assign, effects)]
        effects = finish(made, effects, "r1")
    assert order == [(1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
    assert made.is_empty


def test_a_query_leaves_before_it_is_mirrored() -> None:
    made = shadowed(backend("r1"), S1)
    effects = made.submit(NewQuery("c", Query(1)), 0.0)
    assert originals(effects) == [("r1", 1)]
    assert mirrored(effects) == []
    assert made.next_due_at() == MIRROR_S
    finish(made, effects, "r1")  # answered, so quickly
    assert mirrored(made.mirror(2.0)) == [("s1", 1)]
    assert made.next_due_at() is None
    assert made.mirror(3.0) == []


# --- Mirrored queries are made some ms later ------------------------------------------------------


def test_of_many_mirrored_queries_some_are_made_at_a_time() -> None:
    made = shadowed(backend("r1", limit=99), backend("s1", tag="s", limit=99))
    for number in range(40):
        made.submit(NewQuery("c", Query(number)), 0.0)
    made_at_once = []
    while made.next_due_at() is not None:
        made_at_once.append(len(mirrored(made.mirror(1.0))))
    assert made_at_once == [20, 10, 8, 2]


# --- A shadow at its limit ------------------------------------------------------------------------


def test_a_full_shadow_queues_a_bounded_number_and_drops_the_rest() -> None:
    made = shadowed(backend("r1", limit=10_000), backend("s1", tag="s", limit=1))
    effects = submit(made, *range(1, 201))
    assert len(originals(effects)) == 200
    assert mirrored(effects) == [("s1", 1)]
    assert only(Dropped, effects) == [Dropped("e", "s")] * 99
    assert busy(made.state)["s"] == (100, 1)
    assert only(Refuse, effects) == []


def test_mirrored_queries_hold_a_bounded_number_of_bytes_queued_or_not() -> None:
    made = shadowed(backend("r1", limit=99), backend("s1", tag="s", limit=3))
    body = bytes(8 * MIB)
    effects = submit(made, *range(1, 10), call=body)
    assert len(mirrored(effects)) == 3
    assert busy(made.state)["s"] == (1, 3)
    assert len(only(Dropped, effects)) == 5
    finish(made, effects, "s1")
    assert len(mirrored(submit(made, 11, call=body))) == 1


def test_what_the_shadow_answers_itself_is_not_compared_with_its_own_answer() -> None:
    compares = {"s": ("id", {})}
    made = shadowed(backend("r1"), S1, to="s", compares=compares)
    effects = submit(made, 1)
    assert (originals(effects), mirrored(effects)) == ([("s1", 1)], [])
    assert not only(Dropped, effects)


def test_mirrored_queries_wait_for_a_first_replica_and_say_that_there_is_none() -> None:
    made = shadowed(backend("r1"), backend(tag="s"))
    effects = submit(made, 1, 2)
    assert only(Starved, effects) == [Starved("s")]
    assert busy(made.state) == {"b": (0, 2), "s": (2, 0)}
    assert mirrored(made.set_backend("s", S1, 1.0)) == [("s1", 1), ("s1", 2)]


def test_an_unavailable_or_unknown_shadow_drops_mirrored_queries() -> None:
    made = shadowed(backend("r1"), backend(tag="s", unavailable="it failed"))
    assert only(Dropped, submit(made, 1)) == [Dropped("e", "s")]
    made.set_backend("s", None, 1.0)
    effects = submit(made, 2)
    assert only(Dropped, effects) == [Dropped("e", "s")]
    assert originals(effects) == [("r1", 2)]
    assert "s" not in busy(made.state)


# --- A shadow that hangs, dies or goes ------------------------------------------------------------


def test_a_mirrored_query_goes_on_when_the_caller_leaves_with_its_answer_on_the_way() -> None:
    made = shadowed(backend("r1"), S1)
    effects = submit(made, 1)
    made.answered("r1", [(effects[0].ticket.number, 200)], 1.0)
    assert ends(made.cancel("c", 1, 1.0)) == [("b", 200, False)]
    assert made.caller_gone("c", 1.0) == []


@pytest.mark.parametrize("how", ["cancelled", "caller lost"])
def test_mirrored_queries_are_dropped_with_an_original_that_is_not_wanted(how: str) -> None:
    """A stream that a client leaves would go on in the shadow for ever."""
    made = shadowed(backend("r1", limit=9), backend("s1", tag="s", limit=1))
    effects = submit(made, 1, 2)
    done = submit(made, 3)
    finish(made, done, "r1")
    dropped = made.caller_gone("c", 1.0) if how == "caller lost" else made.cancel("c", 1, 1.0)
    assert [e.replica for e in only(Cancel, dropped)][:2] == ["r1", "s1"]
    waiting = 1 if how == "caller lost" else 0
    assert len(only(Dropped, dropped)) == waiting
    number = effects[1].ticket.number
    assert ends(made.finished("s1", [(number, 499)], 2.0)) == [("s", 499, True)]


def test_they_are_dropped_too_where_the_replica_tells_of_the_end_before_the_caller() -> None:
    made = shadowed(backend("r1"), backend("s1", tag="s"))
    number = submit(made, 1)[0].ticket.number
    made.begun("r1", [number], 0.5)
    told = made.answered("r1", [(number, 499)], 1.0, is_awaited=False)
    assert [e.replica for e in only(Cancel, told)] == ["s1"]
    assert made.cancel("c", 1, 1.0) == []


def test_a_mirrored_query_past_its_time_is_cancelled_and_no_caller_hears() -> None:
    made = shadowed(backend("r1"), backend("s1", tag="s", limit=1, request_timeout_s=5.0))
    effects = submit(made, 1, 2)
    assert made.next_due_at() == 5.0
    late = made.expire(5.0)
    assert late == [Cancel("s1", effects[1].ticket.number), Dropped("e", "s")]
    assert ends(made.finished("s1", [(effects[1].ticket.number, 499)], 6.0)) == [("s", 408, True)]


def test_load_is_reported_by_endpoint_with_mirrored_queries_apart() -> None:
    made = shadowed(backend("r1", limit=1), backend("s1", tag="s", limit=1))
    made.set_endpoint("idle", endpoint("idle", shadows={"s": 0.1}), 0.0)
    submit(made, 1, 2, 3)
    assert by_endpoint(made.state) == (
        {("e", "b"): (2, 1), ("idle", "b"): (0, 0)},
        {("e", "s"): (2, 1), ("idle", "s"): (0, 0)},
    )


# --- Callers notice nothing -----------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "submit", "submit", "finish", "reject", "die", "cancel", "wait"]
        ),
        st.integers(0, 9),
        st.sampled_from(["nothing", "finish", "die", "full", "gone"]),
    ),
    max_size=60,
)


class Play:
    """One life of a router; the same steps, with and without shadows, must look the same."""

    def __init__(self, shadows: dict[str, float]) -> None:
        self.router = WatchedRouter(lambda: 0.5)
        self.now = 0.0
        self.held: dict[str, list[int]] = {"r1": [], "r2": [], "s1": []}
        self.tickets: dict[int, Any] = {}
        self.seen: list[Any] = []
        self.router.set_backend("b", backend("r1", "r2", limit=2, max_queued_requests=3), 0.0)
        self.router.set_backend("s", backend("s1", tag="s", limit=2), 0.0)
        self.router.set_endpoint("e", endpoint(shadows=shadows), 0.0)

    def run(self, effects: list[Any]) -> None:
        """Note what callers and their replicas see of it."""
        for effect in effects:
            if isinstance(effect, Assign):
                self.held[effect.replica].append(effect.ticket.number)
                self.tickets[effect.ticket.number] = effect.ticket
            if isinstance(effect, Assign | Cancel):
                is_new = isinstance(effect, Assign)
                ticket = effect.ticket if is_new else self.tickets[effect.number]
                if not ticket.is_mirrored:
                    self.seen.append((is_new, effect.replica, ticket.query.id))
            elif isinstance(effect, Refuse) or (
                isinstance(effect, Ended) and not effect.is_mirrored
            ):
                self.seen.append(effect)

    def step(self, number: int, what: str, index: int) -> None:
        replica = ("r1", "r2")[index % 2]
        if what == "submit":
            self.run(
                self.router.submit(
                    NewQuery("c", Query(number, timeout_s=None if index else 1.0)), self.now
                )
            )
            if index < 5:
                self.run(self.router.mirror(self.now))
        elif what == "cancel":
            self.run(self.router.cancel("c", number - index, self.now))
        elif what == "wait":
            self.now += 0.3
            self.run(self.router.mirror(self.now))
            self.run(self.router.expire(self.now))
            self.run(self.router.expire(self.now))
        else:
            self.report(replica, what)

    def report(self, replica: str, what: str) -> None:
        numbers, self.held[replica] = self.held[replica], []
        if what == "finish":
            self.run(self.router.answered(replica, [(n, 200) for n in numbers], self.now))
            self.run(self.router.delivered(replica, numbers))
        elif what == "reject":
            self.run(self.router.rejected(replica, numbers, self.now, draining=False))
        else:
            self.run(self.router.replica_gone(replica, (), self.now))
            tag = "s" if replica == "s1" else "b"
            names = ("s1",) if replica == "s1" else ("r1", "r2")
            table = backend(*names, tag=tag, limit=2, max_queued_requests=3 if tag == "b" else -1)
            self.run(self.router.set_backend(tag, table, self.now))

    def shadow_step(self, what: str) -> None:
        if what in {"finish", "die"}:
            self.report("s1", what)
        elif what == "full":
            self.run(self.router.set_backend("s", backend("s1", tag="s", limit=1), self.now))
        elif what == "gone":
            self.run(self.router.set_backend("s", None, self.now))
            self.held["s1"] = []
            self.run(self.router.set_backend("s", backend(tag="s"), self.now))


@given(steps=STEPS)
@settings(max_examples=150)
def test_callers_and_their_replicas_see_the_same_with_a_shadow_and_without(
    steps: list[tuple[str, int, str]],
) -> None:
    plain, with_shadow = Play({}), Play({"s": 1.0})
    for number, (what, index, in_shadow) in enumerate(steps, 100):
        plain.step(number, what, index)
        with_shadow.step(number, what, index)
        with_shadow.shadow_step(in_shadow)
    assert with_shadow.seen == plain.seen


# --- Comparison -----------------------------------------------------------------------------------

COMPARES = {"s": ("id", {"how": "json"})}


def test_a_query_and_its_mirrored_one_are_paired_at_one_of_the_shadows_replicas() -> None:
    made = shadowed(backend("r1", limit=9), backend("s1", "s2", tag="s"), compares=COMPARES)
    places = set()
    for number in range(4):
        original, twin = (e.ticket for e in only(Assign, submit(made, number)))
        (pairing,) = original.compare
        assert pairing.settings is None
        paired = Pairing(twin.number, pairing.replica, COMPARES["s"])
        assert twin.compare == (paired,)
        assert pairing.number == twin.number
        places.add(pairing.replica)
    assert places == {"s1", "s2"}


def test_where_an_answer_is_compared_is_sent_once_it_is_mirrored() -> None:
    made = shadowed(backend("r1", limit=1), S1, compares=COMPARES)
    (runs,) = only(Assign, made.submit(NewQuery("c", Query(1)), 0.0))
    made.submit(NewQuery("c", Query(2)), 0.0)  # waits
    assert runs.ticket.compare is None, "that it is compared is known, and not where"
    effects = made.mirror(0.0)
    assert [(e.replica, e.ticket) for e in only(Compare, effects)] == [("r1", runs.ticket)]
    assert runs.ticket.compare
    (waited,) = only(Assign, finish(made, [runs], "r1"))
    assert waited.ticket.compare, "its assignment tells it"


def test_an_answer_is_compared_nowhere_where_its_mirrored_query_was_dropped() -> None:
    made = shadowed(backend("r1"), backend("s1", tag="s", limit=1), compares=COMPARES)
    (assigned,) = only(Assign, made.submit(NewQuery("c", Query(1)), 0.0))
    made.set_backend("s", None, 0.0)
    assert only(Compare, made.mirror(0.0)) == [Compare("r1", assigned.ticket)]
    assert assigned.ticket.compare == ()


def test_without_a_comparison_or_a_replica_for_it_nothing_is_paired() -> None:
    for made in (
        shadowed(backend("r1"), S1),
        shadowed(backend("r1"), backend(tag="s"), compares=COMPARES),
    ):
        assert not submit(made, 1)[0].ticket.compare
