"""Dispatch leases between a caller, a proxy and a replica, on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.caller import held_leases as caller_leases, proxy_link
from greenroom.actors.messages.control import MeetProxy
from greenroom.actors.messages.queries import (
    CloseLeases,
    LeasedSlots,
    LeaseGranted,
    OpenLease,
    Process,
)
from greenroom.actors.proxy import leases as desks
from greenroom.core.errors import DeploymentUnavailableError, ReplicaUnavailableError
from greenroom.core.routing.leases import FENCE_S, IDLE_S
from greenroom.core.routing.tables import ENDPOINT_PREFIX, EndpointTable
from greenroom.serve.handle import DeploymentHandle
from tests.actors.one_process import OneProcess, Place
from tests.core.routing.queries import ongoing
from tests.support.timing import until

DEADLINE_S = 10.0
ELSEWHERE = (f"{ENDPOINT_PREFIX}e", EndpointTable(name="e", traffic={"other": 1.0}))


class Model:
    """Takes as long as it is told, and notes how long it may."""

    async def __call__(self, seconds: float = 0.0) -> float:
        self.may_take_s = serve.get_request_context().remaining_s
        await asyncio.sleep(seconds)
        return seconds


class Leased:
    """One process of each kind, and a handle."""

    def __init__(self, one: OneProcess) -> None:
        self.one, self.leases, self.handle = one, one.caller.leases, one.handle

    async def hold(self) -> int:
        """Send queries until there is a lease; return how many."""
        deadline, count = time.monotonic() + DEADLINE_S, 0
        while not self.leases.held:
            count += 1
            assert time.monotonic() < deadline
            with contextlib.suppress(TimeoutError):  # on a busy machine, where that is short
                await self.handle.remote()
        return count

    def change(self) -> list[bool]:
        """Take the traffic away; return what is filled when that may be acknowledged."""
        confirmed: list[bool] = []
        dispatcher = self.one.proxy.dispatcher
        dispatcher.take_tables([ELSEWHERE], time.monotonic())
        dispatcher.leases.when_confirmed(lambda: confirmed.append(True))
        return confirmed

    def counted(self) -> float:
        families = {each.name: each for each in self.one.proxy.dispatcher.metrics()}
        return sum(families["greenroom_requests_total"].samples.values())  # type: ignore[arg-type]

    def load(self) -> dict[str, int]:
        return ongoing(self.one.proxy.dispatcher.router)


@pytest.fixture
def leased(request, one_process, monkeypatch):
    """Return what keeps its leases: for IDLE_S any process may be held up."""
    monkeypatch.setattr(caller_leases, "IDLE_S", 3600.0)
    return Leased(one_process(Model, limit=8, **getattr(request, "param", {})))


def on_its_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a test on the loop of what it has leased."""

    @functools.wraps(test)
    def run(leased: Leased, **others: Any) -> None:
        leased.one.run(test(leased, **others))

    return run


@on_its_loop
async def test_queries_go_straight_to_the_replica_and_are_counted_all_the_same(leased, monkeypatch):
    monkeypatch.setattr(caller_leases, "IDLE_S", IDLE_S)
    submitted: list[Any] = []
    submit = leased.one.proxy.dispatcher.submit
    leased.one.proxy.dispatcher.submit = (  # type: ignore[method-assign]
        lambda message, sender: submitted.extend(message.queries) or submit(message, sender)
    )

    for _ in range(300):
        await leased.handle.remote()
    await until(lambda: leased.counted() == 300)
    await until(lambda: leased.load() == {"r1": 0})
    assert not leased.leases.held, "what is not used is returned"
    await until(lambda: not leased.one.queries.leases)
    assert len(submitted) < 100


@on_its_loop
async def test_a_change_is_acknowledged_when_the_caller_has_returned_its_lease(leased, monkeypatch):
    monkeypatch.setattr(desks, "FENCE_S", 3600.0)  # so that no replica refuses it meanwhile
    await leased.hold()
    running = leased.handle.remote(0.2)
    await until(lambda: leased.one.queries.running)
    confirmed = leased.change()
    assert not confirmed
    await until(lambda: confirmed)
    assert not leased.leases.held
    assert await running == 0.2, "what has begun runs to its end"
    await until(lambda: leased.load() == {"r1": 0})
    assert leased.counted(), "and is counted"


@on_its_loop
async def test_the_replica_refuses_what_a_caller_sends_that_does_not_answer(leased):
    await leased.hold()
    leased.leases.revoked = lambda _message: None  # type: ignore[method-assign]
    running = leased.handle.remote(FENCE_S + 0.4)
    await until(lambda: leased.one.queries.running)
    confirmed = leased.change()
    assert not confirmed
    await until(lambda: confirmed)
    assert leased.leases.held
    with pytest.raises(DeploymentUnavailableError, match="no backend with traffic"):
        await leased.handle.remote()
    assert await running


@on_its_loop
async def test_a_lease_that_was_fenced_before_its_caller_showed_it_is_refused(leased):
    opened: list[Any] = []
    port: Any = leased.one.queries.port.address

    await leased.hold()
    await until(lambda: leased.one.queries.leases)
    ((name, lease),) = leased.one.queries.leases.items()
    caller, incarnation = leased.one.caller.process, port.process.incarnation
    for suffix, is_fence in (("old/1", True), ("old/2", False)):
        another = OpenLease(
            incarnation=incarnation,
            lease=name + suffix,
            proxy=lease.proxy,
            caller=caller,
            endpoint="e",
            route="/",
        )
        close = CloseLeases(incarnation=incarnation, leases=(another.lease,), is_fence=is_fence)
        for message in (close, another):
            port.arrived(message, Place(leased.one.loop))
        opened.append(another.lease in leased.one.queries.leases)
    assert opened == [False, True]


@pytest.mark.parametrize("is_idle", [True, False])
@on_its_loop
async def test_a_replica_stops_to_watch_a_caller_that_has_left_it(leased, is_idle):
    """Each connection of a long-lived process would cost the replica a descriptor for good."""
    caller = leased.one.caller.process.incarnation
    replica: Any = leased.one.queries.port.address

    await leased.hold()
    await until(lambda: caller in replica.machine.watching())
    running = None if is_idle else leased.handle.remote(0.3)
    await until(lambda: is_idle or leased.one.queries.running)
    names = tuple(leased.one.queries.leases)
    close = CloseLeases(incarnation=replica.process.incarnation, leases=names)
    replica.arrived(close, Place(leased.one.loop))
    assert (caller in replica.machine.watching()) is not is_idle, "its death would end its query"
    assert running is None or await running == 0.3
    await until(lambda: caller not in replica.machine.watching())


def test_all_replicas_of_a_lease_are_watched_where_more_are_known_than_are_kept(
    leased, monkeypatch
):
    monkeypatch.setattr(caller_leases, "MAX_TARGETS", 2)
    for number in (1_000, 1_001):
        names = [f"{number}-{each}" for each in range(3)]
        slots = [
            LeasedSlots(name, Process(1, 1, name), Place(leased.one.loop), 1) for name in names
        ]
        granted = LeaseGranted(
            proxy=leased.one.proxy.process,
            lease=f"p/{number}",
            number=number,
            endpoint="other",
            methods=(),
            timeout_s=None,
            slots=tuple(slots),
        )
        leased.leases.granted(granted)
        found = leased.one.caller.loop.machine.watching() - {leased.one.proxy.process.incarnation}
        assert found == set(names), "those of the lease before, which are not used, are dropped"


@on_its_loop
async def test_a_query_that_a_replica_has_no_room_for_goes_to_the_router(leased):
    await leased.hold()
    leased.one.queries.limit = 1  # as if other hosts' proxies had sent it queries
    answers = [leased.handle.remote(0.01) for _ in range(4)]
    assert [await answer for answer in answers] == [0.01] * 4


@on_its_loop
async def test_a_cancelled_query_keeps_its_slot_until_it_has_ended(leased):
    await leased.hold()
    running = leased.handle.remote(5.0)
    await until(lambda: leased.one.queries.running)
    lease = leased.leases.held["e", "b"]
    running.cancel()
    assert lease.ongoing == 1
    await until(lambda: not lease.ongoing)
    assert not leased.one.queries.running


@on_its_loop
async def test_a_caller_that_leaves_closes_its_leases_also_those_in_use(leased):
    """Its process may live on for long, and a replica that stops waits for leases that are open."""
    left: list[bool] = []

    count = await leased.hold()
    for _ in range(3):
        await leased.handle.remote()
    running = leased.handle.remote(0.2)
    await until(lambda: leased.one.queries.running and leased.one.queries.leases)
    leased.one.caller.leave(lambda: left.append(True))
    await until(lambda: left)
    leased.one.caller.loop.stop()  # as when its connection is closed
    with pytest.raises(ReplicaUnavailableError, match="closed"):
        await running
    await until(lambda: not leased.one.queries.leases)
    await until(lambda: leased.counted() >= count + 3)


@on_its_loop
async def test_what_a_dead_caller_sent_under_a_lease_ends_with_it(leased):
    await leased.hold()
    running = leased.handle.remote(10 * DEADLINE_S)
    await until(lambda: leased.one.queries.running)
    assert leased.leases.held["e", "b"].ongoing
    leased.one.queries.port.machine.end(leased.one.caller.process)
    await until(lambda: not leased.one.queries.running)
    assert not leased.one.queries.leases
    running.cancel()


@on_its_loop
async def test_leases_of_a_dead_proxy_end_with_the_next_ones_word(leased):
    place = Place(leased.one.loop)
    port: Any = leased.one.queries.port.address
    leases = leased.one.queries.leases

    await leased.hold()
    assert leases
    name = f"{leased.one.proxy.process.incarnation}/never seen"
    fence = CloseLeases(incarnation=port.process.incarnation, leases=(name,), is_fence=True)
    port.arrived(fence, place)
    leased.one.caller.proxy_gone()
    assert await leased.handle.remote() == 0.0, "they go on meanwhile"
    for process, fenced in ((leased.one.proxy.process, {name}), (Process(1, 1, "next"), set())):
        port.arrived(MeetProxy(proxy=place, process=process, is_near=True), place)
        assert leases._fenced == fenced, "kept for as long as somebody may send such leases"
    assert not leases


@on_its_loop
async def test_a_query_under_a_lease_needs_no_proxy(leased, monkeypatch):
    monkeypatch.setattr(proxy_link, "NO_PROXY_S", 0.05)
    place = Place(leased.one.loop)

    await leased.hold()
    running = leased.handle.remote(0.3)
    await until(lambda: leased.one.queries.running)
    leased.one.caller.proxy_gone()
    leased.one.caller.met_proxy(place, place.process)
    with pytest.raises(DeploymentUnavailableError, match="no proxy has had route tables"):
        await DeploymentHandle("other", None, client=leased.one.client).remote()
    assert await running == 0.3


@pytest.mark.parametrize("leased", [{"request_timeout_s": 0.1}], indirect=True)
@on_its_loop
async def test_a_backends_time_limit_holds_under_a_lease(leased):
    await leased.hold()
    with pytest.raises(TimeoutError, match="no answer within"):
        await leased.handle.remote(10 * DEADLINE_S)
    assert leased.one.user_code.servable.instance.may_take_s <= 0.1
    await until(lambda: not leased.one.queries.running)
