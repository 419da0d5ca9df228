"""First in, first out: per endpoint and backend, whatever replicas do."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import given, settings, strategies as st

from greenroom.core.routing.balancing import SATURATED_S
from greenroom.core.routing.load import busy
from greenroom.core.routing.tables import BackendTable, EndpointTable, ReplicaTable
from greenroom.core.routing.tickets import Assign, NewQuery, Ticket
from tests.core.routing.queries import Query, WatchedRouter, assigned, backend, endpoint, only

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(["e", "f"]), st.sampled_from(["k1", "k2"])),
        st.tuples(st.just("finish"), st.integers(0, 9), st.integers(1, 3)),
        st.tuples(st.just("reject"), st.integers(0, 9), st.integers(1, 3)),
    ),
    max_size=60,
)


class Replicas:
    """What replicas hold, and the order in which each backend began an endpoint's queries."""

    def __init__(self) -> None:
        self.held: dict[str, list[Ticket]] = defaultdict(list)
        self.begun: dict[tuple[str, str], list[int]] = defaultdict(list)

    def take(self, effects: list[Any]) -> None:
        for effect in only(Assign, effects):
            self.held[effect.replica].append(effect.ticket)
            order = self.begun[effect.ticket.endpoint, effect.ticket.backend]
            if effect.ticket.query.id not in order:  # else it was rejected, and comes again
                order.append(effect.ticket.query.id)

    def give(self, index: int, count: int) -> tuple[str, list[int]]:
        """Return one of those that are busy, and the first tickets that it has."""
        busy = [replica for replica in sorted(self.held) if self.held[replica]]
        if not busy:
            return "", []
        replica = busy[index % len(busy)]
        given, self.held[replica] = self.held[replica][:count], self.held[replica][count:]
        return replica, [ticket.number for ticket in given]


@given(steps=STEPS)
@settings(max_examples=100)
def test_queries_of_an_endpoint_reach_a_backend_in_their_order(
    steps: list[tuple[str, Any, Any]],
) -> None:
    made, replicas = WatchedRouter(lambda: 0.5), Replicas()
    for tag in ("a", "b"):
        made.set_backend(tag, backend(f"{tag}1", f"{tag}2", tag=tag, limit=2), 0.0)
    for name in ("e", "f"):
        made.set_endpoint(name, EndpointTable(name=name, traffic={"a": 0.5, "b": 0.5}), 0.0)
    for number, (what, first, second) in enumerate(steps):
        now = number * SATURATED_S
        replicas.take(made.expire(now))
        if what == "submit":
            replicas.take(made.submit(NewQuery("c", Query(number, first, shard_key=second)), now))
            continue
        replica, numbers = replicas.give(first, second)
        if what == "finish":
            replicas.take(made.finished(replica, [(n, 200) for n in numbers], now))
        else:
            replicas.take(made.rejected(replica, numbers, now, draining=False))
    for order in replicas.begun.values():
        assert order == sorted(order)


def test_replicas_of_the_routers_own_host_are_taken_while_they_have_room() -> None:
    made = WatchedRouter(lambda: 0.5, "here")
    replicas = [
        ReplicaTable(tag=f"{host}{number}", address=None, process=(host, number), host=host)
        for host in ("here", "there")
        for number in (1, 2)
    ]
    table = BackendTable(tag="b", replicas=tuple(replicas), max_ongoing_requests=2)
    made.set_backend("b", table, 0.0)
    made.set_endpoint("e", endpoint(), 0.0)
    places = [
        place
        for number in range(9)
        for place, _ in assigned(made.submit(NewQuery("c", Query(number)), 0.0))
    ]
    assert sorted(places[:4]) == ["here1", "here1", "here2", "here2"]
    assert sorted(places[4:]) == ["there1", "there1", "there2", "there2"]
    assert busy(made.state)["b"] == (1, 8)
    freed = made.finished("there1", [(5, 200)], 1.0)
    assert [place for place, _ in assigned(freed)] == ["there1"]
    made.finished("here1", [(1, 200)], 1.0)
    made.finished("there1", [(7, 200)], 1.0)
    next_one = made.submit(NewQuery("c", Query(20)), 2.0)
    assert [place for place, _ in assigned(next_one)] == ["here1"]
