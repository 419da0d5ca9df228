"""Sticky sessions: one replica for each, while it runs; who waits, and who moves."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st

from greenroom.core.config import SessionAffinity
from greenroom.core.routing.sessions import Session, new_cookie, session_of
from greenroom.core.routing.tables import EndpointTable
from greenroom.core.routing.tickets import Assign, NewQuery
from tests.core.routing.queries import Query, Retried, WatchedRouter, backend, only, router

BY_COOKIE = SessionAffinity(cookie="s")
BY_HEADER = SessionAffinity(header="X-Session-ID")


def homes(made: WatchedRouter, sessions: range, first: int = 0) -> dict[str, str]:
    """Return session -> the replica that gets its query; all are answered at once."""
    found = {}
    for number in sessions:
        found[f"s{number}"], ticket = sent(made, number + first, f"s{number}")
        made.finished(found[f"s{number}"], [(ticket, 200)], 0.0)
    return found


def sent(made: WatchedRouter, number: int, session: str) -> tuple[str, int]:
    """Submit a query that has room; return its replica and ticket."""
    (effect,) = made.submit(NewQuery("c", Query(number, session_id=session)), 0.0)
    assert isinstance(effect, Assign)
    return effect.replica, effect.ticket.number


def assigned(effects: list[Any]) -> list[tuple[str, int]]:
    return [(e.replica, e.ticket.query.id) for e in effects if isinstance(e, Assign)]


def test_only_the_sessions_of_a_replica_that_is_gone_move() -> None:
    before = homes(router(backend("b#1", "b#2", "b#3")), range(60))
    after = homes(router(backend("b#1", "b#3")), range(60))
    assert all(after[s] == home for s, home in before.items() if home != "b#2")


def test_a_query_waits_for_its_replica_and_lets_others_pass() -> None:
    made = router(backend("b#1", "b#2", limit=1))
    home, running = sent(made, 1, "s")
    other = {"b#1": "b#2", "b#2": "b#1"}[home]
    assert assigned(made.submit(NewQuery("c", Query(2, session_id="s")), 0.0)) == []
    assert assigned(made.submit(NewQuery("c", Query(3)), 0.0)) == [(other, 3)]
    assert assigned(made.finished(home, [(running, 200)], 0.0)) == [(home, 2)]


def test_what_waits_for_a_replica_that_dies_goes_elsewhere_after_what_it_had() -> None:
    made = router(backend("b#1", "b#2", limit=2))
    home, _ = sent(made, 1, "s")
    sent(made, 2, "s")
    made.submit(NewQuery("c", Query(3, session_id="s")), 0.0)
    effects = made.replica_gone(home, (), 0.0)
    assert [query for _, query in assigned(effects)] == [1, 2]


def test_without_a_replica_sessions_wait_and_then_find_homes() -> None:
    made = router(backend(limit=1, is_wanted=True))
    for number in range(4):
        made.submit(NewQuery("c", Query(number, session_id=f"s{number}")), 0.0)
    given = assigned(made.set_backend("b", backend("b#1", limit=4), 0.0))
    assert sorted(given) == [("b#1", number) for number in range(4)]


def test_what_a_session_retries_is_charged_to_the_backend_where_it_stays() -> None:
    made = router(backend("b#1", "b#2", limit=50), backend("d#1", "d#2", tag="d", limit=50))
    made.set_endpoint("e", EndpointTable(name="e", traffic={"b": 1.0, "d": 1.0}), 0.0)
    found = Counter[str]()
    for number in range(20):
        home, ticket = sent(made, number, f"s{number}")
        made.finished(home, [(ticket, 500)], 0.0)
        again = Query(100 + number, session_id=f"s{number}")
        effects = made.submit(NewQuery("c", again, failed=(home, 0.1)), 0.0)
        ((replica, _),) = assigned(effects)
        (retried,) = only(Retried, effects)
        assert home[0] == replica[0] == retried.backend
        found[retried.backend] += 1
    assert found.keys() == {"b", "d"}


def headers(**named: str) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.replace("_", "-").encode(), v.encode()) for name, v in named.items())


@pytest.mark.parametrize(
    ("affinity", "given", "session"),
    [
        (BY_HEADER, headers(x_session_id="mine"), Session("mine")),
        (BY_HEADER, headers(cookie="s=mine"), None),
        (BY_COOKIE, headers(cookie="a=1; s=key.r1; b=2"), Session("key", "r1")),
        (BY_COOKIE, headers(cookie="s=a.b.r1"), Session("a.b", "r1")),
        (BY_COOKIE, headers(cookie="s=no-dot"), Session("no-dot")),
        (BY_COOKIE, headers(cookie="s="), None),
        (BY_COOKIE, headers(cookie="; ;=; s"), None),
        (SessionAffinity(cookie="s", set_cookie=False), headers(cookie="s=a.b"), Session("a.b")),
    ],
)
def test_sessions_are_read_from_headers_and_cookies(
    affinity: SessionAffinity, given: Any, session: Session | None
) -> None:
    assert session_of(Query(1, with_headers=given), affinity) == session


def test_a_cookie_is_made_and_renewed_only_where_it_names_another_replica() -> None:
    made = new_cookie(BY_COOKIE, (), "/app", "b#r1")
    assert made is not None
    value, *attributes = made.decode().split("; ")
    assert attributes == ["Path=/app", "HttpOnly", "SameSite=Lax"]
    sent_back = headers(cookie=value)
    assert new_cookie(BY_COOKIE, sent_back, "/app", "b#r1") is None
    moved = new_cookie(BY_COOKIE, sent_back, "/app", "b#r2")
    assert moved is not None
    assert moved.decode().split(".")[0] == value.split(".")[0], "the session has its key still"
    for foreign in ('";evil"\r\n', "abc"):
        renewed = new_cookie(BY_COOKIE, headers(cookie=f"s={foreign}.r1"), "/", "b#r2")
        assert renewed is not None
        assert not renewed.startswith(f"s={foreign}.".encode())
    assert new_cookie(BY_HEADER, (), "/", "b#r1") is None


def test_a_cookie_keeps_its_replica_when_others_come() -> None:
    key = headers(cookie="s=0123.3")
    tables = [backend("b#3", session_affinity=BY_COOKIE.model_dump())]
    tables.append(backend("b#1", "b#2", "b#3", *(f"b#{n}" for n in range(4, 40)), limit=100))
    made = router(tables[0])
    for number, table in enumerate(tables):
        many = type(table)(
            tag="b",
            replicas=table.replicas,
            max_ongoing_requests=100,
            session_affinity=BY_COOKIE.model_dump(),
        )
        made.set_backend("b", many, 0.0)
        query = Query(number, http_method="GET", with_headers=key)
        assert assigned(made.submit(NewQuery("c", query), 0.0)) == [("b#3", number)]


@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_a_session_is_never_at_two_replicas_that_both_run(
    chance: random.Random, limit: int
) -> None:
    """Replicas go one after the other; queries run at their homes, and all run in the end."""
    everyone = [f"b#{n}" for n in range(4)]
    present = list(everyone)
    made = router(backend(*present, limit=limit))
    running: list[tuple[str, int]] = []
    number = 0
    last: dict[str, str] = {}

    def record(effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Assign):
                session = effect.ticket.query.session_id
                assert effect.replica in present
                if session and last.get(session) in present:
                    assert last[session] == effect.replica
                last[session] = effect.replica
                running.append((effect.replica, effect.ticket.number))

    for _ in range(40):
        kind = chance.random()
        if kind < 0.5:
            number += 1
            session = chance.choice(["", "s1", "s2", "s3"])
            record(made.submit(NewQuery("c", Query(number, session_id=session)), 0.0))
        elif kind < 0.8 and running:
            replica, ticket = running.pop(chance.randrange(len(running)))
            record(made.finished(replica, [(ticket, 200)], 0.0))
        elif len(present) > 1 and kind < 0.9:
            present.remove(chance.choice(present))
            record(made.set_backend("b", backend(*present, limit=limit), 0.0))
    while running:
        replica, ticket = running.pop()
        record(made.finished(replica, [(ticket, 200)], 0.0))
    assert made.is_empty
