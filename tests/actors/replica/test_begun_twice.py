"""A query that comes to the same replica again: by the next router, or after a broken link.

And what comes of a query after its end.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from greenroom.actors.caller.streams import NobodyListensError
from greenroom.actors.messages import queries as m
from greenroom.actors.replica.data_plane import Run
from tests.actors.one_process import OneProcess
from tests.support.queries import query


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
    world.queries.address.arrived(stop, None)
    assert cancelled == [("old", 5)]


@pytest.mark.parametrize("begun", [True, False])
def test_tasks_left_running_hear_that_nobody_listens(world: OneProcess, *, begun: bool) -> None:
    run = run_by(world, "new", 1)
    if begun:
        run.begin(200, ())
    run.end()
    with pytest.raises(NobodyListensError):
        world.loop.run_until_complete(run.send(b"part"))
    with pytest.raises(NobodyListensError):
        run.begin(200, ())
    run.answer(m.StreamEnded(7, 200))
    assert not world.queries.streams
    assert world.queries.undelivered == 0


def test_what_runs_is_not_run_again_by_a_router_that_had_forgotten_it(
    world: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Run] = []
    monkeypatch.setattr(world.user_code, "run", runs.append)
    proxy = world.proxy.process
    order = m.RunQueries(
        incarnation=world.queries.process.incarnation,
        proxy=proxy,
        assignments=(run_by(world, "any", 5).assignment,),
    )
    world.queries.running = 0
    for _ in range(2):
        world.queries.address.arrived(order, world.proxy.myAddress)
    assert [run.key for run in runs] == [(proxy.incarnation, 5)]
    assert world.queries.running == 1


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_router_hears_that_an_answer_did_not_reach_its_caller(
    world: OneProcess, monkeypatch: pytest.MonkeyPatch, *, ends_first: bool
) -> None:
    """Else nobody would ever answer a caller that lives behind a broken link."""
    found: list[Any] = []
    monkeypatch.setattr(world.queries, "_report_soon", lambda _, report: found.append(report))
    run = run_by(world, "proxy", 5)
    run.answer(m.ValueAnswer(7, b""))
    if ends_first:
        run.end()
    world.queries._undeliverable(run.assignment.caller_incarnation, [])  # it waits to leave
    if not ends_first:
        run.end()
    assert found == [("answered", (5, 200)), ("undelivered", 5)]
    assert world.queries.undelivered == 0


def test_a_router_hears_that_a_stream_broke_off_on_its_way(
    world: OneProcess, cancelled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(world.queries, "_report", lambda _, report: found.append(report))
    run = run_by(world, "proxy", 5)
    run.begin(200, ())
    world.queries._undeliverable(
        run.assignment.caller_incarnation, [(m.StreamPart(7, b"", 0), run)]
    )
    assert cancelled == [("proxy", 5)]
    run.end()
    assert found == [("begun", 5), ("undelivered", 5)]


def test_a_query_that_user_code_cancels_before_it_begins_leaves_no_slot_taken(
    world: OneProcess,
) -> None:
    run = run_by(world, "new", 1)
    world.user_code.run(run)
    for task in asyncio.all_tasks(world.loop):  # as a handler may that begins in the same turn
        if "UserCode" in task.get_coro().__qualname__:  # type: ignore[union-attr]
            task.cancel()
    world.loop.run_until_complete(asyncio.sleep(0.01))
    assert run.has_ended
    assert world.queries.running == 0
