"""A proxy, told by the test what its controller would tell it."""

from __future__ import annotations

import asyncio
import subprocess
import time
from typing import Any

import pytest

from greenroom.actors.messages import control as cm
from greenroom.actors.messages.queries import QueriesFinished
from greenroom.actors.runtime.processes import identify
from greenroom.core.routing.tables import BACKEND_PREFIX, BackendTable, EndpointTable, ReplicaTable
from tests.actors.one_process import OneProcess, Place
from tests.core.routing.queries import ongoing
from tests.support.timing import until


async def echo(text: str) -> str:
    return text


@pytest.fixture
def one(one_process):
    return one_process(echo, limit=8)


def test_a_table_that_still_has_a_dead_replica_costs_a_query_no_attempt(one):
    """Every attempt counts: a query is given up when three replicas have died under it."""
    with subprocess.Popen(["sleep", "60"]) as child:
        process = identify(child.pid)
        assert process is not None
        dead = ReplicaTable(tag="dead", address=Place(one.loop), process=process)
        child.kill()
    place: Any = one.queries.port.address
    lives = ReplicaTable(tag="r1", address=place, process=place.process)

    def publish(*replicas: ReplicaTable) -> None:
        table = BackendTable(tag="b", replicas=replicas, max_ongoing_requests=8)
        one.proxy.dispatcher.take_tables([(f"{BACKEND_PREFIX}b", table)], time.monotonic())

    async def ask() -> Any:
        answer = one.handle.remote("hello")
        for _ in range(5):
            publish(dead)  # as a controller does that has not heard of its death
            assert "dead" not in ongoing(one.proxy.dispatcher.router)
            await asyncio.sleep(0.02)
        publish(dead, lives)
        return await answer

    assert one.run(ask()) == "hello"


def test_what_an_earlier_process_of_a_replica_says_frees_no_slot(one, monkeypatch):
    monkeypatch.setattr(one.user_code, "run", lambda _run: None)  # it never ends
    dispatcher = one.proxy.dispatcher

    async def ask() -> None:
        answer = one.handle.remote("hello")
        await until(lambda: ongoing(dispatcher.router) == {"r1": 1})
        for incarnation, left in (("first", 1), (one.queries.port.process.incarnation, 0)):
            said = {"replica": "r1", "incarnation": incarnation, "answered": ((1, 200),)}
            dispatcher.finished(QueriesFinished(**said))
            assert ongoing(dispatcher.router) == {"r1": left}
        answer.cancel()

    one.run(ask())


def test_a_caller_that_was_abandoned_attaches_again(one):
    async def ask(text: str) -> Any:
        return await one.handle.options(retryable=True).remote(text)

    for text in ("before", "after"):
        assert one.run(ask(text)) == text
        one.proxy.dispatcher.detach(one.caller.process.incarnation)


class Pushing:
    """A controller of the proxy's; each numbers its tables on its own."""

    def __init__(self, one: OneProcess, upto: int = 0, *routes: str) -> None:
        self.place, self._proxy = Place(one.loop), one.proxy
        self.push(upto, *routes, complete=True)

    def push(self, upto: int, *routes: str, gone: tuple[str, ...] = (), complete: bool = False):
        """Tell of endpoints that are named like their routes; return the routes there are."""
        tables: dict[str, Any] = {
            f"endpoint/{route}": EndpointTable(name=route, route=route, traffic={"b": 1.0})
            for route in routes
        }
        tables |= {f"endpoint/{route}": None for route in gone}
        changed = cm.Changed(
            controller=self.place.process,
            snapshots={key: (upto, table) for key, table in tables.items()},
            upto=upto,
            complete=complete,
        )
        self._proxy.receiveMessage(changed, self.place)
        return set(self._proxy.dispatcher.router.state.routes.all())


def test_tables_come_bit_by_bit_and_go(one):
    controller = Pushing(one)
    controller.push(5, "/a", "/b")
    assert controller.push(6, "/c") == {"/a", "/b", "/c"}
    assert controller.push(7, gone=("/a", "/never there")) == {"/b", "/c"}


def test_what_is_not_in_a_complete_set_is_gone(one):
    first = Pushing(one, 5, "/a", "/b")
    heard: list[Any] = []
    place = Place(one.loop)
    place.on(cm.Listen, lambda message, _sender: heard.append(message.seen))
    later = cm.MeetController(controller=place, process=place.process, by=first.place.process)
    one.proxy.receiveMessage(later, first.place)
    first.place = place
    routes = first.push(3, "/b", "/c", complete=True)
    assert routes == {"/b", "/c"}, "another controller's ids are its own"
    one.run(until(lambda: heard[-1:] == [3]))
