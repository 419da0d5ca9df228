"""A real proxy, told by the test what its controller and a caller would tell it."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
from typing import Any

import pytest

from greenroom.actors.messages import control as cm, queries as m
from greenroom.core.routing.tables import BackendTable, EndpointTable, ReplicaTable
from tests.actors.by_hand import Hand, ReplicaByHand
from tests.support.queries import python_call, query
from tests.support.systems import alive, wait_until

PROXY_CLASS = "greenroom.actors.proxy.actor.Proxy"
DEADLINE_S = 30.0


class ProxyByHand:
    """A proxy of this test's own, which takes it for its controller and its caller."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        self.address = hand.locate(PROXY_CLASS, f"proxy {secrets.token_hex(4)}")
        self.process, _ = hand.identify(self.address)
        self._snapshot_id = 0
        self._query_id = 1_000_000
        endpoint = EndpointTable(name="by-hand", traffic={"by-hand": 1.0})
        self.tell({"endpoint/by-hand": endpoint}, upto=0, complete=True)
        hand.send(self.address, m.AttachCaller(process=hand.process))
        hand.wait_for(m.AttachCallerReply, lambda reply: reply.proxy == self.process)

    def publish(self, key: str, table: Any) -> None:
        """Tell it of a newer table."""
        self._snapshot_id += 1
        self.tell({key: table}, upto=self._snapshot_id)

    def tell(
        self,
        tables: dict[str, Any],
        *,
        upto: int,
        complete: bool = False,
        controller: m.Process | None = None,
    ) -> None:
        """Tell it of these tables, as its controller or as another."""
        self.hand.send(
            self.address,
            cm.Changed(
                controller=controller or self.hand.process,
                snapshots={key: (upto, table) for key, table in tables.items()},
                upto=upto,
                complete=complete,
            ),
        )

    def routes(self) -> set[str]:
        """Return the routes that it has."""
        request_id = secrets.token_hex(8)
        self.hand.send(self.address, m.AskProxy(request_id=request_id, what="routes"))
        heard = self.hand.wait_for(m.AskProxyReply, lambda r: r.request_id == request_id)
        return set(heard.message.value)

    def replicas(self, *replicas: ReplicaByHand) -> None:
        """Tell it which replicas there are."""
        tables = tuple(
            ReplicaTable(tag=each.tag, address=each.queries_at, process=each.process)
            for each in replicas
        )
        self.publish("backend/by-hand", BackendTable(tag="by-hand", replicas=tables))

    def submit(self, argument: object) -> int:
        """Have it dispatch a repeatable query; return its id."""
        self._query_id += 1
        submitted = query(self._query_id, endpoint="by-hand", **python_call(argument))
        self.hand.send(
            self.address,
            m.SubmitQueries(
                incarnation=self.hand.process.incarnation, queries=(submitted,), cancelled=()
            ),
        )
        return submitted.id

    def answer(self, query_id: int) -> m.Answer:
        """Return the answer to a query."""
        heard = self.hand.wait_for(
            m.AnswerQueries, lambda message: any(a.query_id == query_id for a in message.answers)
        )
        (answer,) = heard.message.answers
        return answer


@pytest.fixture
def proxy(hand: Hand):
    proxy = ProxyByHand(hand)
    yield proxy
    os.kill(proxy.process.pid, signal.SIGKILL)
    wait_until(lambda: not alive(proxy.process.pid), DEADLINE_S, "its end")


def test_a_table_that_still_has_a_dead_replica_costs_a_query_no_attempt(
    proxy: ProxyByHand, replica_of
) -> None:
    """Every attempt counts: a query is given up when three replicas have died under it."""
    dead, lives = replica_of(lambda text: text), replica_of(lambda text: text)
    proxy.replicas(dead)
    os.kill(dead.process.pid, signal.SIGKILL)
    wait_until(lambda: not dead.alive, DEADLINE_S, "its end")
    query_id = proxy.submit("hello")
    for _ in range(5):
        proxy.replicas(dead)  # as a controller does that has not heard of it
        proxy.hand.identify(proxy.address)
    proxy.replicas(dead, lives)
    answer = proxy.answer(query_id)
    assert isinstance(answer, m.ValueAnswer), answer
    assert pickle.loads(answer.value) == "hello"


def tables(*routes: str) -> dict[str, Any]:
    """Return tables of endpoints that are named like their routes."""
    return {
        f"endpoint/{route}": EndpointTable(name=route, route=route, traffic={"by-hand": 1.0})
        for route in routes
    }


def test_tables_come_bit_by_bit_and_go(proxy: ProxyByHand) -> None:
    proxy.tell(tables("/a", "/b"), upto=5)
    proxy.tell(tables("/c"), upto=6)
    assert proxy.routes() == {"/a", "/b", "/c"}
    proxy.tell({"endpoint//a": None, "endpoint//never there": None}, upto=7)
    assert proxy.routes() == {"/b", "/c"}


def test_what_is_not_in_a_complete_set_is_gone(proxy: ProxyByHand) -> None:
    proxy.tell(tables("/a", "/b"), upto=5)
    later = proxy.hand.router()
    meet = cm.MeetController(controller=proxy.hand.address, process=later, by=proxy.hand.process)
    proxy.hand.send(proxy.address, meet)
    proxy.tell(tables("/b", "/c"), upto=3, complete=True, controller=later)
    assert proxy.routes() == {"/b", "/c"}, "another controller's ids are its own"
    proxy.hand.wait_for(cm.Listen, lambda told: (told.listener, told.seen) == (proxy.process, 3))


def test_news_that_newer_ones_have_overtaken_change_nothing(proxy: ProxyByHand) -> None:
    proxy.tell(tables("/a"), upto=5)
    proxy.tell({"endpoint//a": None} | tables("/old"), upto=4)
    proxy.tell(tables("/old"), upto=4, complete=True)
    assert proxy.routes() == {"/a"}


def test_news_of_a_controller_that_has_not_begun_with_everything_change_nothing(
    proxy: ProxyByHand,
) -> None:
    proxy.tell(tables("/a"), upto=5)
    proxy.tell(tables("/old"), upto=9, controller=proxy.hand.router())
    assert proxy.routes() == {"/a"}
