"""When two answers are the same, and what is said of those that are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from greenroom.core.comparing.comparing import (
    OTHER_CAUSES,
    AllDifferences,
    Compare,
    Differences,
    Outcome,
    Response,
    compare,
)
from greenroom.core.records import CompareRecord

JSON = Compare(how="json")


def answer(value: Any, status: int = 200) -> Response:
    return Response(status, body=json.dumps(value).encode())


def cause(old: Any, new: Any, **settings: Any) -> str:
    return compare(Compare(how="json", **settings), answer(old), answer(new)).cause


@pytest.mark.parametrize(
    "value", [None, 1, "a", [], {}, {"a": [1, {"b": None}]}, float("nan"), [True, False]]
)
def test_equal_answers_have_no_cause(value: Any) -> None:
    assert cause(value, value) == ""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (1, 2, "/: other value"),
        (1, True, "/: other type"),
        (1, "1", "/: other type"),
        (None, 0, "/: other type"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "/a/b: other value"),
        ({"a": 1}, {}, "/a: is missing"),
        ({}, {"a": 1}, "/a: appeared"),
        ([1, 2], [1, 3], "/*: other value"),
        ([1, 2], [1], "/: other length"),
        (
            {"items": [{"n": 1}, {"n": 2}]},
            {"items": [{"n": 1}, {"n": 3}]},
            "/items/*/n: other value",
        ),
        ({}, [], "/: other type"),
        (float("nan"), 1.0, "/: other value"),
    ],
)
def test_a_cause_names_the_place_and_no_position(old: Any, new: Any, expected: str) -> None:
    assert cause(old, new) == expected


def test_numbers_are_equal_within_either_tolerance() -> None:
    assert cause(1, 1.0) == ""
    assert cause(100.0, 100.9) == "/: other value"
    assert cause(100.0, 100.9, relative_tolerance=0.01) == ""
    assert cause(0.0, 1e-7, absolute_tolerance=1e-6) == ""
    assert cause({"p": [0.1]}, {"p": [0.2]}, relative_tolerance=0.01) == "/p/*: other value"


def test_ignored_pointers_may_differ_be_missing_and_stand_for_many() -> None:
    old = {"at": 1, "items": [{"id": 1, "n": 5}, {"id": 2, "n": 5}], "a/b": 1}
    new = {"items": [{"id": 3, "n": 5}, {"id": 4, "n": 5}], "a/b": 2}
    ignore = ("/at", "/items/*/id", "/a~1b")
    assert cause(old, new, ignore=ignore) == ""
    assert cause(old, new, ignore=ignore[:2]) == "/a/b: other value"
    assert cause(old, new, ignore=("/at", "/items/0/id", "/a~1b")) == "/items/*/id: other value"


def test_other_statuses_are_a_difference_whatever_the_bodies() -> None:
    for how in ("status", "json"):
        outcome = compare(Compare(how=how), answer(1), answer(1, status=500))  # type: ignore[arg-type]
        assert outcome == Outcome("status 200 became 500")
    assert compare(Compare(how="status"), answer(1), answer(2)).cause == ""


def test_what_cannot_be_compared_has_a_cause_of_its_own() -> None:
    text, missing = Response(200, body=b"<html>"), Response(200, missing="larger than 256 KiB")
    for old, new, expected in (
        (text, answer(1), "primary: no JSON"),
        (answer(1), text, "shadow: no JSON"),
        (answer(1), missing, "shadow: larger than 256 KiB"),
        (Response(200, body=b"[" * 100_000), answer(1), "primary: no JSON"),
    ):
        outcome = compare(JSON, old, new)
        assert (outcome.cause, outcome.comparable) == (expected, False)
    deep = Response(200, body=b"[" * 150 + b"]" * 150)
    assert compare(JSON, deep, deep) == Outcome("deeper than can be compared", comparable=False)


def test_values_of_handles_are_compared_like_json() -> None:
    assert (
        compare(JSON, Response(200, value={"a": (1, 2)}), Response(200, value={"a": [1, 2]})).cause
        == ""
    )
    assert compare(JSON, Response(200, value=1), Response(200, value=2)).cause == "/: other value"
    assert compare(JSON, Response(200), Response(200)).cause == ""
    assert compare(JSON, Response(200), Response(200, value=1)).cause == "/: appeared"


@pytest.mark.parametrize(
    ("message", "expected"),
    [(None, ""), (True, ""), ("", ""), (False, "the compare function says so"), ("worse", "worse")],
)
def test_a_function_returns_the_cause(message: Any, expected: str) -> None:
    by_function = Compare(how="function", function="f", code=b"code")
    outcome = compare(by_function, answer(1), answer(2, status=500), lambda _old, _new: message)
    assert outcome.cause == expected


# --- Counting -------------------------------------------------------------------------------------


def example(at: float) -> dict[str, Any]:
    return {"at": at, "request_id": f"r{at}"}


def test_differences_are_grouped_by_cause_with_a_bounded_number_of_examples() -> None:
    found = Differences()
    for number in range(10):
        found.count(Outcome(), example(number))
        found.count(Outcome("status 200 became 500"), example(number))
        found.count(Outcome("shadow: no JSON", comparable=False), example(number))
    seen = found.plain()
    assert (seen["compared"], seen["equal"], seen["different"]) == (20, 10, 10)
    assert seen["not_compared"] == 10
    (status, no_json) = seen["causes"]
    assert (status["cause"], status["count"]) == ("status 200 became 500", 10)
    assert [each["at"] for each in status["examples"]] == [5, 6, 7, 8, 9]
    assert not no_json["comparable"]
    again = Differences()
    again.add(seen)
    assert again == found


def test_causes_without_end_are_counted_together() -> None:
    found = Differences()
    for number in range(1000):
        found.count(Outcome(f"cause {number}"), example(number))
    causes = {each["cause"]: each["count"] for each in found.plain()["causes"]}
    assert len(causes) == 31
    assert causes[OTHER_CAUSES] == 970


def test_what_is_kept_of_reports_is_bounded() -> None:
    all_found, found = AllDifferences(), Differences()
    found.count(Outcome("worse"), example(1))
    one = found.plain()
    for number in range(1_105):
        all_found.reported(f"r{number}", {("e", "v2", "id"): one})
        all_found.reported("r", {(f"e{number}", "v2", "id"): one})
    assert all_found.of(("e", "v2", "id"))["different"] == 100
    known = [all_found.of((f"e{number}", "v2", "id"))["different"] for number in range(1_105)]
    assert sum(known) == 999


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        (JSON, "json"),
        (Compare(how="json", ignore=("/id",)), "json, ignore ('/id',)"),
        (Compare(how="function", function="mine.f", code=b"x"), "function mine.f"),
    ],
)
def test_people_read_how_answers_are_compared(settings, shown) -> None:
    assert str(CompareRecord(id="x", settings=settings.model_dump())) == shown
