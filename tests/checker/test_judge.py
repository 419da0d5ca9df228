"""Histories made by hand, good and bad: the judge tells them apart."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checker.histories import (
    NEVER,
    OK,
    REFUSED,
    UNKNOWN,
    History,
    Isolation,
    Journal,
    Operation,
    Request,
    Run,
    read_history,
    weights_of,
)
from tests.checker.judge import violations
from tests.checker.linearizability import Call, unexplained

ROOT = Path(__file__).parents[2]
V0, V1 = {"v0": 1.0}, {"v1": 1.0}
SPLIT = {"v0": 0.25, "v1": 0.75}
_ids = itertools.count()


def op(kind: str, value: Any, asked_at: float, answered_at: float, outcome: str = OK) -> Operation:
    return Operation(
        endpoint="e",
        kind=kind,
        value=weights_of(value),
        asked_at=asked_at,
        answered_at=answered_at,
        outcome=outcome,
    )


def lost(kind: str, value: Any, asked_at: float) -> Operation:
    return op(kind, value, asked_at, NEVER, UNKNOWN)


def answer(version: str | None, asked_at: float, answered_at: float, host: str = "a") -> Request:
    key = f"q{next(_ids)}"
    status, text = (404, "no such path") if version is None else (200, f"{version} {key}")
    return Request(
        id=key,
        host=host,
        endpoint="e",
        method="GET",
        asked_at=asked_at,
        answered_at=answered_at,
        status=status,
        text=text,
    )


def history(*known: Operation | Request | Run | Isolation, limit: int = 2) -> History:
    """Return a history of these, in which each answered request has run once."""
    made = History(limit=limit)
    for each in known:
        kept: list[Any] = {
            Operation: made.operations,
            Request: made.requests,
            Run: made.runs,
            Isolation: made.isolations,
        }[type(each)]
        kept.append(each)
        if isinstance(each, Request) and each.status == 200:
            made.runs.append(run(each.id, each.text.split()[0], 0, 1, f"p{each.id}"))
    return made


def run(key: str, version: str, began_at: float, ended_at: float, process: str = "p") -> Run:
    return Run(id=key, version=version, process=process, began_at=began_at, ended_at=ended_at)


MADE = op("create", V0, 1, 2)
GOOD_CHANGES = {
    "one after the other": [MADE, op("set", V1, 3, 4), op("read", V1, 5, 6)],
    "a read that overlaps a change sees what was before": [
        MADE, op("set", V1, 3, 6), op("read", V0, 4, 5),
    ],
    "or what is after": [MADE, op("set", V1, 3, 6), op("read", V1, 4, 5)],
    "concurrent changes in either order": [
        MADE, op("set", V1, 3, 6), op("set", SPLIT, 3, 6), op("read", V1, 7, 8),
    ],
    "a change without an answer has happened": [MADE, lost("set", V1, 3), op("read", V1, 5, 6)],
    "or has not": [MADE, lost("set", V1, 3), op("read", V0, 5, 6)],
    "or happens much later": [
        MADE, lost("set", V1, 3), op("set", SPLIT, 4, 5), op("read", SPLIT, 6, 7),
        op("read", V1, 8, 9),
    ],
    "a repeated create changes nothing": [
        MADE, op("set", V1, 3, 4), op("create", V0, 5, 6), op("read", V1, 7, 8),
    ],
    "another one is refused": [MADE, op("create", V1, 3, 4, REFUSED), op("read", V0, 5, 6)],
    "traffic of no endpoint is refused": [op("set", V0, 1, 2, REFUSED), op("read", None, 3, 4)],
    "what is deleted can be made anew": [
        MADE, op("delete", None, 3, 4), op("delete", None, 5, 6), op("create", V1, 7, 8),
        op("read", V1, 9, 10),
    ],
}  # fmt: skip
BAD_CHANGES = {
    "an acknowledged change is lost": [MADE, op("set", V1, 3, 4), op("read", V0, 5, 6)],
    "a create is lost": [MADE, op("read", None, 3, 4)],
    "what was read is not read again": [
        MADE, lost("set", V1, 3), op("read", V1, 4, 5), op("read", V0, 6, 7),
    ],
    "two reads disagree on an order": [
        MADE, op("set", V1, 3, 20), op("set", SPLIT, 3, 20),
        op("read", V1, 4, 5), op("read", SPLIT, 6, 7), op("read", V1, 8, 9),
    ],
    "a refused change has happened": [MADE, op("create", V1, 3, 4, REFUSED), op("read", V1, 5, 6)],
    "a change is refused without a reason": [MADE, op("set", V1, 3, 4, REFUSED)],
    "a change of nothing is acknowledged": [op("set", V0, 1, 2)],
    "nobody asked for what is read": [MADE, op("read", SPLIT, 3, 4)],
    "a change happens before it is asked for": [MADE, op("read", V1, 3, 4), op("set", V1, 5, 6)],
}  # fmt: skip


@pytest.mark.parametrize("operations", GOOD_CHANGES.values(), ids=GOOD_CHANGES.keys())
def test_changes_that_some_order_explains_are_linearizable(operations: list[Operation]) -> None:
    assert violations(history(*operations)) == []


@pytest.mark.parametrize("operations", BAD_CHANGES.values(), ids=BAD_CHANGES.keys())
def test_changes_that_no_order_explains_are_not(operations: list[Operation]) -> None:
    (found,) = violations(history(*operations))
    assert "changes of e are not linearizable" in found


def test_each_endpoint_has_an_order_of_its_own() -> None:
    others = [op("create", V1, 1, 2), op("read", V1, 3, 4)]
    of_other = [
        Operation(
            endpoint="other",
            kind=each.kind,
            value=each.value,
            asked_at=each.asked_at,
            answered_at=each.answered_at,
            outcome=each.outcome,
        )
        for each in others
    ]
    assert violations(history(MADE, op("read", V0, 3, 4), *of_other)) == []


def test_the_search_finds_the_one_order_of_many_concurrent_operations() -> None:
    """Without remembering where it was it would take 2**30 steps, and more."""

    def step(state: int, number: int) -> tuple[bool, int]:
        return number == state + 1, number

    calls = [Call(0.0, 100.0, number) for number in range(30, 0, -1)]
    assert unexplained(calls, 0, step) is None
    assert unexplained([*calls, Call(101.0, 102.0, 40)], 0, step) == 40


GOOD_ANSWERS = {
    "the version before, while it changes": [op("set", V1, 3, 8), answer("v0", 6, 7)],
    "the version after, while it changes": [op("set", V1, 3, 8), answer("v1", 4, 5)],
    "asked for before the acknowledgement": [op("set", V1, 3, 8), answer("v0", 7, 99)],
    "each of a split": [op("set", SPLIT, 3, 4), answer("v0", 5, 6), answer("v1", 5, 6)],
    "a change that may have happened": [
        lost("set", V1, 3), answer("v0", 50, 51), answer("v1", 50, 51),
    ],
    "nothing before it is made": [answer(None, 0, 0.5)],
    "nothing after it is deleted": [op("delete", None, 3, 4), answer(None, 5, 6)],
    "a repeated create ends nothing": [
        op("set", V1, 3, 4), op("create", V0, 5, 6), answer("v1", 7, 8),
    ],
    "a version that is back": [op("set", V1, 3, 4), op("set", V0, 5, 6), answer("v0", 7, 8)],
    "of a host that is cut off, what it knew": [
        Isolation(host="b", begun_at=3, ended_at=20), op("set", V1, 5, 6),
        answer("v0", 10, 11, "b"),
    ],
}  # fmt: skip
BAD_ANSWERS = {
    "the version before": [op("set", V1, 3, 4), answer("v0", 5, 6)],
    "a version that is still to come": [answer("v1", 3, 4), op("set", V1, 5, 6)],
    "a version of a refused change": [op("create", V1, 3, 4, REFUSED), answer("v1", 5, 6)],
    "a version without weight": [op("set", SPLIT, 3, 4), op("set", V0, 5, 6), answer("v1", 7, 8)],
    "no endpoint where one is": [answer(None, 3, 4)],
    "a version of what is deleted": [op("delete", None, 3, 4), answer("v0", 5, 6)],
    "an old one of another host than that which is cut off": [
        Isolation(host="b", begun_at=3, ended_at=20), op("set", V1, 5, 6),
        answer("v0", 10, 11, "a"),
    ],
    "an old one after the host is back": [
        Isolation(host="b", begun_at=3, ended_at=9), op("set", V1, 5, 6),
        answer("v0", 10, 11, "b"),
    ],
    "one of before the cut": [
        op("set", V1, 3, 4), Isolation(host="b", begun_at=5, ended_at=9), answer("v0", 7, 8, "b"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("known", GOOD_ANSWERS.values(), ids=GOOD_ANSWERS.keys())
def test_answers_by_what_was_in_force_are_right(known: list[Any]) -> None:
    assert violations(history(MADE, *known)) == []


@pytest.mark.parametrize("known", BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_answers_by_what_was_not_in_force_are_wrong(known: list[Any]) -> None:
    (found,) = violations(history(MADE, *known))
    assert "was not in force at any time" in found


def request(key: str, method: str, status: int = 0, text: str = "") -> Request:
    answered_at = 4 if status else NEVER
    return Request(
        id=key,
        host="a",
        endpoint="e",
        method=method,
        asked_at=3,
        answered_at=answered_at,
        status=status,
        text=text,
    )


def test_a_post_runs_once_at_most_answered_or_not() -> None:
    twice = [run("one", "v0", 3, 4), run("one", "v0", 5, 6)]
    once = history(MADE, request("one", "POST"))
    assert violations(once) == []
    once.runs += twice[:1]
    assert violations(once) == []
    once.runs += twice[1:]
    (found,) = violations(once)
    assert "ran 2 times" in found
    again = history(MADE, request("one", "GET"))
    again.runs += twice
    assert violations(again) == []


def test_an_answer_is_of_its_own_request_and_of_a_run() -> None:
    made = history(MADE)
    made.requests.append(request("one", "POST", 200, "v0 other"))
    made.runs.append(run("one", "v0", 3, 4))
    assert "the answer to another request" in violations(made)[0]
    made.requests[:] = [request("one", "POST", 200, "v0 one")]
    assert violations(made) == []
    made.runs[:] = [run("one", "v1", 3, 4)]
    assert "by a version that never ran it" in violations(made)[0]


def test_a_replica_runs_no_more_than_its_limit() -> None:
    three = [run("one", "v0", 1, 4), run("two", "v0", 2, 3), run("three", "v0", 3, 5)]
    assert violations(history(*three)) == []
    (found,) = violations(history(*three, run("four", "v0", 3.5, NEVER)))
    assert found == "p ran 3 requests at a time, and may run 2"
    other = run("four", "v0", 3.5, NEVER, process="other")
    assert violations(history(*three, other)) == []


def test_what_a_killed_client_and_a_killed_replica_have_written_down_is_read(
    tmp_path: Path,
) -> None:
    clients = Journal(tmp_path / "clients-a")
    clients.write("asked", "1", "e", "set", V0)
    clients.write("answered", "1", OK, None)
    clients.write("asked", "2", "e", "read", None)
    clients.write("answered", "2", OK, V0)
    clients.write("asked", "3", "e", "read", None)
    clients.write("asked", "4", "e", "delete", None)
    clients.write("sent", "5", "a", "e", "GET")
    clients.write("got", "5", 200, "v0 5")
    clients.write("sent", "6", "a", "e", "POST")
    clients.close()
    replica = Journal(tmp_path / "replica-1")
    replica.write("began", "5", "v0")
    replica.write("began", "6", "v0")
    replica.write("ended", "5", "v0")
    replica.close()
    found = read_history(tmp_path, tmp_path, limit=2)
    seen = [(each.kind, each.value, each.outcome) for each in found.operations]
    v0 = weights_of(V0)
    assert seen == [("set", v0, OK), ("read", v0, OK), ("delete", None, UNKNOWN)]
    assert [(each.id, each.status, each.text) for each in found.requests] == [
        ("5", 200, "v0 5"),
        ("6", 0, ""),
    ]
    assert [(each.id, each.ended_at == NEVER) for each in found.runs] == [("5", False), ("6", True)]
    assert all(each.asked_at < each.answered_at for each in found.requests)


def test_the_judge_knows_nothing_of_the_product() -> None:
    text = "import sys, tests.checker.judge; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, check=True, capture_output=True, text=True
    )
    modules = done.stdout.split()
    assert "tests.checker.linearizability" in modules
    assert not [name for name in modules if name.startswith("greenroom.")]
