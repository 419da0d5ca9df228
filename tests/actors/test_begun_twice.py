"""A query whose answer has begun, run again in the same replica by the next router."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from tests.actors.one_process import OneProcess
from tests.support.queries import query
from understudy.actors import messages as m
from understudy.actors.queries import Run


@pytest.fixture
def world() -> Iterator[OneProcess]:
    made = OneProcess(lambda: None, limit=4)
    yield made
    made.close()


@pytest.fixture
def cancelled(world: OneProcess, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the keys of the runs that user code was to end."""
    keys: list[Any] = []
    monkeypatch.setattr(world.user_code, "cancel", keys.append)
    return keys


def run_by(world: OneProcess, proxy: str, ticket: int) -> Run:
    caller = world.caller.process.incarnation
    assignment = m.Assignment(
        ticket=ticket,
        query=query(7),
        caller=pickle.dumps(world.proxy.myAddress),
        caller_incarnation=caller,
        endpoint="e",
        route="/",
        timeout_s=None,
    )
    world.queries.running += 1
    return Run(world.queries, proxy, assignment)


def test_the_second_is_ended_and_the_first_goes_on(world: OneProcess, cancelled: list[Any]) -> None:
    first, second = run_by(world, "old", 5), run_by(world, "new", 1)
    first.begin(200, ())
    second.begin(200, ())
    assert first.sender is not None
    assert second.sender is None
    assert cancelled == [("new", 1)]
    second.answer(m.StreamEnded(7, 200))  # before it is ended: nobody may take it for the first's
    assert world.queries.undelivered == 0


def test_a_caller_can_still_end_the_first_when_the_second_has_ended(
    world: OneProcess, cancelled: list[Any]
) -> None:
    first, second = run_by(world, "old", 5), run_by(world, "new", 1)
    first.begin(200, ())
    second.end()
    stop = m.ControlStreams(incarnation=world.caller.process.incarnation, taken=(), stopped=(7,))
    world.queries._control(stop, None)
    assert cancelled == [("old", 5)]
