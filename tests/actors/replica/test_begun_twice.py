"""A query that comes to the same replica again: by the next router, or after a broken link.

And what comes of a query after its end, or that of its router or caller.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from greenroom.actors.caller.streams import NobodyListensError
from greenroom.actors.messages import queries as m
from greenroom.actors.messages.queries import END
from greenroom.actors.replica import data_plane
from greenroom.actors.replica.data_plane import ProxyLink, Run
from greenroom.core.routing.tickets import BODY
from tests.actors.one_process import OneProcess, Place
from tests.support.queries import query
from tests.support.timing import until


@pytest.fixture
def world(one_process):
    return one_process(lambda: None, limit=4)


@pytest.fixture
def cancelled(world, monkeypatch):
    """Return the keys of the runs that user code was to end."""
    keys: list[Any] = []
    monkeypatch.setattr(world.user_code, "cancel", lambda run: keys.append(run.key))
    return keys


class Reports(list[Any]):
    """What a router hears of its queries, in place of the outbox to it."""

    def put(self, report: Any) -> None:
        self.append(report)

    def put_patiently(self, report: Any, _within_s: float) -> None:
        self.append(report)


def run_by(world: OneProcess, proxy: str, ticket: int, found: Any = None) -> Run:
    address, incarnation = world.proxy.myAddress, world.caller.process.incarnation
    assignment = m.Assignment(
        ticket=ticket,
        query=query(7),
        caller=pickle.dumps(address),
        caller_incarnation=incarnation,
        endpoint="e",
        route="/",
        timeout_s=None,
    )
    world.queries.running += 1
    link = ProxyLink(proxy, Reports() if found is None else found)
    return Run(world.queries, assignment, world.queries.caller(incarnation, address), link)


@pytest.fixture
def cut_off(world, monkeypatch):
    """Have nothing arrive that the replica sends."""

    def send(_target: Any, _message: Any, _on_sent: Any, on_failed: Callable[[], None]) -> None:
        world.loop.call_soon(on_failed)

    monkeypatch.setattr(world.queries.port.loop, "send", send)


def pass_turns(world: OneProcess) -> None:
    for _ in range(5):
        world.run(asyncio.sleep(0))


def test_the_second_is_ended_and_the_first_goes_on(world, cancelled):
    first, second = run_by(world, "old", 5), run_by(world, "new", 1)
    first.begin(200, ())
    second.begin(200, ())
    assert first.sender is not None
    assert second.sender is None
    assert cancelled == [("new", 1)]
    second.answer(m.StreamEnded(7, 200))  # before it is ended: nobody may take it for the first's
    assert world.queries.undelivered == 0


def test_a_caller_can_still_end_the_first_when_the_second_has_ended(world, cancelled):
    first, second = run_by(world, "old", 5), run_by(world, "new", 1)
    first.begin(200, ())
    second.end()
    stop = m.ControlStreams(incarnation=world.caller.process.incarnation, taken=(), stopped=(7,))
    world.queries.port.address.arrived(stop, None)
    assert cancelled == [("old", 5)]


def test_a_caller_that_was_cut_off_goes_on_with_its_stream(world, cancelled):
    run, process = run_by(world, "proxy", 5), world.caller.process
    run.begin(200, ())
    caller = world.queries.callers[process.incarnation]
    caller.watch(process)  # as under a lease
    world.queries.port.machine.end(process)
    pass_turns(world)
    assert not cancelled, "its router may end it"
    stop = m.ControlStreams(incarnation=process.incarnation, taken=(), stopped=(7,))
    world.queries.port.address.arrived(stop, None)
    assert cancelled == [("proxy", 5)]
    caller.watch(process)
    assert process.incarnation in world.queries.port.machine.watching(), "it may die yet"


@pytest.mark.parametrize("begun", [True, False])
def test_tasks_left_running_hear_that_nobody_listens(world, *, begun):
    run = run_by(world, "new", 1)
    if begun:
        run.begin(200, ())
    run.end()
    with pytest.raises(NobodyListensError):
        world.run(run.send(b"part"))
    with pytest.raises(NobodyListensError):
        run.begin(200, ())
    run.answer(m.StreamEnded(7, 200))
    assert run.caller is not None
    assert not run.caller.streams
    assert world.queries.undelivered == 0


@pytest.mark.parametrize("dies", ["caller", "router"])
def test_what_nobody_else_could_end_ends_with_its_caller_or_router(
    world, cancelled, monkeypatch, dies
):
    caller, router = Place(world.loop), m.Process(1, 1, "router")
    said: list[Any] = []
    caller.on(m.AnswerQueries, lambda message, _sender: said.extend(message.answers))
    monkeypatch.setattr(data_plane, "ORPHANED_S", 0.001)
    monkeypatch.setattr(world.user_code, "run", lambda _run: None)
    incarnation, port = world.queries.port.process.incarnation, world.queries.port.address
    plain = run_by(world, "any", 1).assignment._replace(
        caller=pickle.dumps(caller), caller_incarnation=caller.process.incarnation
    )
    copy = plain._replace(ticket=2, caller=None)
    followed = plain._replace(ticket=3, query=query(8, follows=BODY))
    order = m.RunQueries(incarnation, router, (plain, copy, followed))
    port.arrived(order, world.proxy.myAddress)
    (number,) = world.queries.uploads
    part = m.StreamPart(number, b"")
    feed = m.FeedQueries(incarnation=incarnation, process=caller.process, parts=(part,))
    port.arrived(feed, caller)
    world.queries.port.machine.end(router if dies == "router" else caller.process)
    pass_turns(world)
    assert cancelled == [("router", 2 if dies == "router" else 3)]
    if dies == "router":  # again and again, until the caller is known to be dead
        world.run(until(lambda: min(said.count(m.StillRuns(each)) for each in (7, 8)) > 2))


@pytest.mark.parametrize("is_for_this", [True, False])
def test_what_follows_a_query_of_a_dead_replica_is_not_taken_for_another(
    world, monkeypatch, is_for_this
):
    """Addresses are used again, and each replica counts from one."""
    monkeypatch.setattr(world.user_code, "run", lambda _run: None)
    run, port, caller = run_by(world, "any", 1), world.queries.port, world.caller
    followed = run.assignment._replace(query=query(8, follows=BODY))
    order = m.RunQueries(port.process.incarnation, m.Process(1, 1, "router"), (followed,))
    port.arrived(order, world.proxy.myAddress)
    ((number, run),) = world.queries.uploads.items()
    upload = run.upload
    assert upload is not None
    incarnation = port.process.incarnation if is_for_this else "a dead one"
    part = m.StreamPart(number, b"", END)
    port.arrived(
        m.FeedQueries(incarnation=incarnation, process=caller.process, parts=(part,)), caller
    )
    assert upload.is_complete is is_for_this


@pytest.mark.parametrize("is_given_back", [True, False])
def test_no_place_is_kept_for_the_answer_of_a_query_that_was_given_back(world, is_given_back):
    run = run_by(world, "any", 1)
    run.assignment = run.assignment._replace(compare=None)
    run.queries.runs[run.key] = run
    run.queries.copies.meet(run.key, ((1, b"other", b""),), has_answer=False)
    if is_given_back:
        assert run.give_back()
    run.end()
    assert run.queries.copies.is_empty is is_given_back


def test_what_runs_is_not_run_again_by_a_router_that_had_forgotten_it(world, monkeypatch):
    runs: list[Run] = []
    monkeypatch.setattr(world.user_code, "run", runs.append)
    proxy = world.proxy.process
    order = m.RunQueries(
        incarnation=world.queries.port.process.incarnation,
        proxy=proxy,
        assignments=(run_by(world, "any", 5).assignment,),
    )
    world.queries.running = 0
    for _ in range(2):
        world.queries.port.address.arrived(order, world.proxy.myAddress)
    assert [run.key for run in runs] == [(proxy.incarnation, 5)]
    assert world.queries.running == 1


@pytest.mark.usefixtures("cut_off")
@pytest.mark.parametrize("ends_first", [True, False])
def test_a_router_hears_that_an_answer_did_not_reach_its_caller(world, *, ends_first):
    """Else nobody would ever answer a caller that lives behind a broken link."""
    found = Reports()
    run = run_by(world, "proxy", 5, found)
    run.answer(m.ValueAnswer(7, b""))
    if ends_first:
        run.end()
    pass_turns(world)
    if not ends_first:
        run.end()
    assert found == [("answered", (5, 200)), ("undelivered", 5)]
    assert world.queries.undelivered == 0


@pytest.mark.usefixtures("cut_off")
def test_a_router_hears_that_a_stream_broke_off_on_its_way(world, cancelled):
    found = Reports()
    run = run_by(world, "proxy", 5, found)
    run.begin(200, ())
    pass_turns(world)
    assert cancelled == [("proxy", 5)]
    run.end()
    assert found == [("begun", 5), ("undelivered", 5)]


def test_a_query_that_user_code_cancels_before_it_begins_leaves_no_slot_taken(world):
    run = run_by(world, "new", 1)
    world.user_code.run(run)
    for task in asyncio.all_tasks(world.loop):  # as a handler may that begins in the same turn
        if "UserCode" in task.get_coro().__qualname__:  # type: ignore[union-attr]
            task.cancel()
    world.run(until(lambda: run.has_ended))
    assert world.queries.running == 0
