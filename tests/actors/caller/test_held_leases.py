"""Random lives of dispatch leases: real callers, a real desk and router, and late messages.

Only what carries messages, the clock and the replicas are made up. Each link keeps the order of its
messages and delays them as long as the machine likes, so that a grant may arrive after the return
of its lease, an answer after the death of who gave it, and a fence before the queries that it is
to keep out.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.actors.caller import caller as callers, held_leases, proxy_link
from greenroom.actors.messages import queries as m
from greenroom.actors.proxy import leases as desks
from greenroom.core.rollouts.judging import OVERDUE_S
from greenroom.core.routing import tickets
from greenroom.core.routing.dispatching import WAIT_S
from greenroom.core.routing.leases import IDLE_S, ORPHAN_S, Used
from greenroom.core.routing.load import busy, overdue
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BackendTable, EndpointTable, ReplicaTable, backend_of
from greenroom.core.routing.tickets import NewQuery
from greenroom.core.routing.traffic import Split, key_of
from tests.core.routing.queries import finished, ongoing
from tests.support.leftovers import where_named
from tests.support.lone_loop import LoneLoop, Sent, close_loops
from tests.support.queries import query

LIMIT = 6  # of which a replica has one slot that is never leased
TIMEOUT_S, SLOW_START_S = 60.0, 10.0
PROXY = m.Process(1, 1, "proxy")
INDEX = st.integers(0, 50)


class Wires:
    """Messages on their way, in order for each pair of processes, which have one clock."""

    def __init__(self) -> None:
        self.under_way: dict[tuple[str, str], deque[tuple[Any, Callable[[], None]]]] = {}
        self.loops: dict[str, LoneLoop] = {}  # of the processes

    def loop(self, name: str) -> LoneLoop:
        """Return the loop of a process that begins."""

        def takes(sent: Sent) -> None:
            way = self.under_way.setdefault((name, sent.target), deque())
            way.append((sent.message, sent.arrived))

        made = LoneLoop(next(iter(self.loops.values()), None))
        made.outside.takes = takes
        self.loops[name] = made
        return made

    @property
    def now(self) -> float:
        return self.loops["proxy"].asyncio.time()

    def sleep(self, seconds: float) -> None:
        self.loops["proxy"].pass_time(seconds)
        for loop in self.loops.values():
            assert not loop.raised

    def end_turn(self) -> None:
        self.sleep(0.0)


class Replica:
    """A replica as far as leases go: it runs what an open lease brings, and refuses the rest."""

    def __init__(self, table: ReplicaTable, split: Split, loop: LoneLoop) -> None:
        self.table = table
        self._split = split
        self.process: Any = table.process
        self.running: dict[tuple[str, int], str] = {}  # (caller, query) -> lease
        self.closed: dict[str, int] = {}  # lease -> the first query that may not run under it
        self.open: dict[str, str] = {}  # lease -> its caller
        self._fenced: set[str] = set()
        self._loop = loop

    @property
    def known(self) -> int:
        """How many queries the router knows of.

        What runs under a lease that it has fenced is none of them: a replica counts it, and rejects
        what would be too much.
        """
        return sum(lease not in self._fenced for lease in self.running.values())

    def take(self, sender: str, message: Any) -> None:
        if isinstance(message, m.OpenLease):
            self.open[message.lease] = message.caller.incarnation
        elif isinstance(message, m.CloseLeases):
            self.open = {name: it for name, it in self.open.items() if name not in message.leases}
            self._fenced |= set(message.leases) if message.is_fence else set()
        else:
            assert isinstance(message, m.RunLeased)
            for lease, each in message.queries:
                if lease in self.open:
                    assert each.id < self.closed.get(lease, each.id + 1), "sent after the change"
                    chosen = self._split.choose(key_of(each, sender))
                    assert chosen == backend_of(self.table), "the router would choose another"
                    self.running[sender, each.id] = lease
                else:
                    self.answer(sender, m.NotRun(each.id))
            for number in message.cancelled:
                if self.running.pop((sender, number), None):
                    self.answer(sender, m.RunEnded(number))

    def answer(self, caller: str, answer: Any) -> None:
        self._loop.send(caller, m.AnswerQueries(incarnation=caller, answers=(answer,)))

    def end(self, caller: str, number: int) -> None:
        del self.running[caller, number]
        self.answer(caller, m.ValueAnswer(number, b""))

    def forget(self, caller: str) -> None:
        self.running = {key: lease for key, lease in self.running.items() if key[0] != caller}
        self.open = {name: it for name, it in self.open.items() if it != caller}


class Caller(callers.Caller):
    """A caller, and how many of its queries were answered."""

    def __init__(self, name: str, wires: Wires) -> None:
        super().__init__(wires.loop(name), m.Process(10, 1, name))
        self.name = name
        self.met_proxy("proxy", PROXY)
        self.attached(m.AttachCallerReply(proxy=PROXY, ready=True))

    def send(self, number: int, **settings: Any) -> bool:
        """Send a query; return whether a lease has room for it."""
        self.submit(query(number, **settings), lambda _answer: None)
        return self.has_leased(number)

    def has_leased(self, number: int) -> bool:
        return number in self.queries and self.queries[number].share is not None

    def waits(self, number: int) -> bool:
        return number in self.queries and self.queries[number].is_wanted

    def take(self, sender: str, message: Any) -> None:
        if isinstance(message, m.LeaseGranted):
            self.leases.granted(message)
        elif isinstance(message, m.RevokeLeases):
            self.leases.revoked(message)
        else:
            self.answered(message, sender)

    def ended(self, answer: Any) -> None:
        """Hear the answer to a query that passed the router."""
        self.answered(m.AnswerQueries(incarnation=self.name, answers=(answer,)), "replica")


class LeaseModel(RuleBasedStateMachine):
    """Two callers and up to three replicas of one backend, of whom any may die at any time."""

    traffic: ClassVar = {"b": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.wires = Wires()
        clock = SimpleNamespace(monotonic=lambda: self.wires.now)
        clocks = callers, desks, held_leases, proxy_link
        self._patches = [mock.patch.object(each, "time", clock) for each in clocks]
        for patch in self._patches:
            patch.start()
        self.ids = itertools.count(1)
        self.gone: set[str] = set()  # callers and replicas that have died
        self.router = Router(random.Random(0).random)
        self.replicas: dict[str, Replica] = {}
        self.callers: dict[str, Caller] = {}
        self.assigned: defaultdict[str, dict[int, tickets.Ticket]] = defaultdict(dict)
        self.attached: dict[Any, Any] = {}  # the callers
        self.loop = self.wires.loop("proxy")
        self.timer: Any = None  # of what the router has due
        self.desk = desks.LeaseDesk(
            self.loop,
            PROXY,
            self.router,
            self.perform,
            self.attached,
        )
        for _ in self.traffic:
            self.add_replica()
        table = EndpointTable(name="e", traffic=self.traffic)
        self.perform(self.router.set_endpoint("e", table, self.wires.now))
        for which in range(2):
            self.add_caller()
            # So soon after each other that leases are worth it.
            self.send(which, 2 if len(self.traffic) == 1 else 8)
            self.deliver_all()

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, tickets.Assign):
                self.assigned[effect.replica][effect.ticket.number] = effect.ticket
            elif isinstance(effect, tickets.Grant):
                self.desk.grant(effect)
            elif isinstance(effect, tickets.Revoke):
                self.desk.revoke(effect)
            elif isinstance(effect, tickets.Refuse) and effect.caller in self.callers:
                answer = m.FailedAnswer(*effect[1:4])
                self.callers[str(effect.caller)].ended(answer)
        if self.timer is not None:
            self.timer.cancel()
        due_at = self.router.next_due_at()
        delay_s = 0.0 if due_at is None else due_at - self.wires.now
        self.timer = None if due_at is None else self.loop.call_later(delay_s, self.expire)

    def expire(self) -> None:
        self.timer = None
        self.perform(self.router.expire(self.wires.now))

    def publish(self) -> None:
        for tag in self.traffic:
            tables = [
                each.table for each in self.replicas.values() if backend_of(each.table) == tag
            ]
            table = BackendTable(
                tag=tag,
                replicas=tuple(tables),
                max_ongoing_requests=LIMIT,
                request_timeout_s=TIMEOUT_S,
                slow_start_s=SLOW_START_S,
            )
            self.perform(self.router.set_backend(tag, table, self.wires.now))

    def add_caller(self) -> None:
        name = f"caller {next(self.ids)}"
        self.callers[name] = Caller(name, self.wires)
        self.attached[name] = SimpleNamespace(address=name, routes_known=-1)
        self.router.leases.lessees[name] = True

    # --- What happens -----------------------------------------------------------------------------

    @rule()
    def add_replica(self) -> None:
        if len(self.replicas) < 3:
            having = Counter(backend_of(replica.table) for replica in self.replicas.values())
            tag = f"{min(self.traffic, key=lambda each: having[each])}#{next(self.ids)}"
            table = ReplicaTable(
                tag=tag, address=tag, process=m.Process(2, next(self.ids), tag), host=""
            )
            split = Split(self.traffic)
            self.replicas[tag] = Replica(table, split, self.wires.loop(tag))
            self.publish()

    @rule(which=INDEX, count=st.integers(1, 8))
    def send(self, which: int, count: int) -> None:
        caller = _pick(self.callers, which)
        for _ in range(count):
            caller.send(next(self.ids))
        self.wires.end_turn()

    @rule(which=INDEX, number=INDEX)
    def cancel(self, which: int, number: int) -> None:
        caller = _pick(self.callers, which)
        under_lease = {n: n for n in caller.queries if caller.has_leased(n)}
        if under_lease:
            caller.cancel(_pick(under_lease, number))
        self.wires.end_turn()

    @rule(which=INDEX, count=st.integers(1, 4))
    def deliver(self, which: int, count: int) -> None:
        """Deliver the oldest messages of one link."""
        ways = {way: queue for way, queue in self.wires.under_way.items() if queue}
        if not ways:
            return
        way = list(ways)[which % len(ways)]
        for _ in range(min(count, len(ways[way]))):
            message, on_sent = ways[way].popleft()
            self._arrived(*way, message)
            on_sent()
        self.wires.end_turn()

    def _arrived(self, sender: str, target: str, message: Any) -> None:
        if target in self.callers:
            self.callers[target].take(sender, message)
        elif target in self.replicas:
            self.replicas[target].take(sender, message)
        elif target == "proxy" and sender in self.callers:
            if isinstance(message, m.LeasesUsed):
                self.desk.used(message)
            elif isinstance(message, m.SubmitQueries):
                died = dict(message.lost)
                for each in message.queries:
                    new = NewQuery(sender, each, attempts=died.get(each.id, 0))
                    self.perform(self.router.submit(new, self.wires.now))
                for number in message.cancelled:
                    self.perform(self.router.cancel(sender, number, self.wires.now))

    @rule(which=INDEX, number=INDEX)
    def end_query(self, which: int, number: int) -> None:
        """Have a replica end a query, or tell the router that it has ended one of its own."""
        replica = _pick(self.replicas, which) if self.replicas else None
        if replica is None:
            return
        tag, own = replica.table.tag, self.assigned[replica.table.tag]
        ends: list[Any] = [*replica.running, *own]
        if not ends:
            return
        ended = ends[number % len(ends)]
        if isinstance(ended, tuple):
            replica.end(*ended)
            return
        ticket = own.pop(ended)
        if (caller := self.callers.get(str(ticket.caller))) is not None:
            caller.ended(m.ValueAnswer(ticket.query.id, b""))
        self.perform(finished(self.router, tag, [(ended, 200)], self.wires.now))

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.1, 0.6]))
    def sleep(self, seconds: float) -> None:
        self.wires.sleep(seconds)

    @rule()
    def change_endpoint(self) -> None:
        """Change a table that leases are granted by: its acknowledgement waits for all of them."""
        table = EndpointTable(name="e", traffic=self.traffic, route=f"/{next(self.ids)}")
        self.perform(self.router.set_endpoint("e", table, self.wires.now))
        ends = {f"proxy/{number}" for number in self.router.leases.unconfirmed}
        self.desk.when_confirmed(lambda: self._closed(ends))

    def _closed(self, leases: set[str]) -> None:
        """Nothing may run under these leases but what was sent before now."""
        for replica in self.replicas.values():
            replica.closed |= dict.fromkeys(leases - replica.closed.keys(), next(self.ids))

    @rule(which=INDEX)
    def kill_replica(self, which: int) -> None:
        if not self.replicas:
            return
        replica = _pick(self.replicas, which)
        tag = replica.table.tag
        del self.replicas[tag]
        self.gone.add(tag)
        self.assigned.pop(tag, None)
        del self.wires.loops[tag]
        self.loop.machine.ended.add(replica.process)
        self.loop.end(replica.process)
        self.perform(self.router.replica_gone(tag, (), self.wires.now))
        self.publish()
        self.wires.end_turn()

    @rule(which=INDEX)
    def kill_caller(self, which: int) -> None:
        caller = _pick(self.callers, which)
        del self.callers[caller.name], self.attached[caller.name]
        self.gone.add(caller.name)
        loop = self.wires.loops.pop(caller.name)
        loop.close()
        loop.stop()
        for way in [way for way in self.wires.under_way if way[0] == caller.name]:
            del self.wires.under_way[way]
        for replica in self.replicas.values():
            replica.forget(caller.name)  # it hears of the end before the router, or refuses more
        self.perform(self.router.caller_gone(caller.name, self.wires.now))
        self.desk.check_confirmed()
        self.add_caller()

    # --- What is true at any time -----------------------------------------------------------------

    @invariant()
    def no_replica_has_more_than_its_limit(self) -> None:
        for tag, replica in self.replicas.items():
            assert replica.known + len(self.assigned[tag]) <= LIMIT

    @invariant()
    def each_lease_runs_no_more_than_its_slots(self) -> None:
        for caller in self.callers.values():
            for lease in caller.leases.held.values():
                assert all(0 <= share.ongoing <= share.slots for share in lease.shares)

    def teardown(self) -> None:
        """Let all come to its end; nothing may be left of it then."""
        try:
            self._assert_nothing_waits_for_ever()
            self.converge()
            self._assert_empty()
        finally:
            for patch in self._patches:
                patch.stop()
            close_loops()

    def _assert_nothing_waits_for_ever(self) -> None:
        """Where queries wait, all leases beside them are revoked, though nothing ends meanwhile."""
        for _ in range(3):
            self.deliver_all()
            self.sleep(2 * WAIT_S)
        waiting = {tag for tag, (queued, _) in busy(self.router.state).items() if queued}
        held = {tag for caller in self.callers.values() for _, tag in caller.leases.held}
        assert not waiting & held

    def converge(self) -> None:
        while len({backend_of(each.table) for each in self.replicas.values()}) < len(self.traffic):
            self.add_replica()
        for _ in range(1000):
            self.deliver_all()
            if any(each.running for each in self.replicas.values()) or any(self.assigned.values()):
                self.end_all()
            elif any(self.callers[name].leases.held for name in self.callers):
                self.sleep(0.1)
            elif not any(self.wires.under_way.values()):
                break
        self.sleep(1.0)  # timers that look once more
        self.deliver_all()

    def end_all(self) -> None:
        for which, replica in enumerate(self.replicas.values()):
            while replica.running or self.assigned[replica.table.tag]:
                self.end_query(which, 0)

    def deliver_all(self) -> None:
        while any(self.wires.under_way.values()):
            self.deliver(0, 1)
            self.no_replica_has_more_than_its_limit()

    def _assert_empty(self) -> None:
        living: Counter[m.Process] = Counter()
        for caller in self.callers.values():
            state = vars(caller.leases)
            assert not {**state["_returned"], **state["_splits"]}
            assert not caller.leases.held
            assert not caller.queries, "each query was answered, and its slot is free"
            living.update(
                self.replicas[each.address].process  # type: ignore[index]
                for each in state["_targets"].values()
            )
        assert not any(replica.open for replica in self.replicas.values()), "all were closed"
        watched = Counter(self.loop.watched())
        assert watched == living, "whom a caller may send to, and only they, are watched"
        assert not [name for name, loop in self.wires.loops.items() if loop.due()]
        self.loop.machine.ended.clear()
        kept_by = [self.router, self.desk, *self.callers.values()]
        assert not [where for each in kept_by for where in where_named(each, self.gone)]
        assert not self.router.leases.unconfirmed
        assert not any(ongoing(self.router).values())


def _pick(things: dict[Any, Any], which: int) -> Any:
    return list(things.values())[which % len(things)]


class SplitLeaseModel(LeaseModel):
    """The same of two backends."""

    traffic: ClassVar = {"b": 0.5, "c": 0.5}


TestLeaseModel = LeaseModel.TestCase
TestLeaseModel.settings = settings(max_examples=200, stateful_step_count=40)
TestSplitLeaseModel = SplitLeaseModel.TestCase
TestSplitLeaseModel.settings = settings(max_examples=200, stateful_step_count=40)


@pytest.fixture
def model():
    """Return a model whose first caller has a lease."""
    model = LeaseModel()
    assert list(_pick(model.callers, 0).leases.held) == [("e", "b")]
    yield model
    model.teardown()


@pytest.mark.parametrize("is_met", [True, False])
def test_a_new_proxy_confirms_tables_once_its_replicas_have_met_it_or_no_old_lease_can_live(
    model, is_met
):
    """A lease of the proxy before it is open at a replica until that has heard of this one."""
    confirmed: list[bool] = []
    table = _pick(model.replicas, 0).table
    model.desk.introduce(table, "this is the proxy now")
    model.desk.when_confirmed(lambda: confirmed.append(True))
    model.sleep(0.9 * ORPHAN_S)
    assert not confirmed
    if is_met:
        _, met = model.wires.under_way["proxy", table.address].popleft()
        met()
    else:
        model.sleep(0.1 * ORPHAN_S)
        model.wires.under_way["proxy", table.address].clear()
    assert confirmed


@pytest.mark.parametrize(
    ("own_s", "limit_s"), [(None, TIMEOUT_S), (2 * TIMEOUT_S, TIMEOUT_S), (1.0, 1.0)]
)
def test_a_query_under_a_lease_goes_to_the_replica_alone_with_the_time_limit(model, own_s, limit_s):
    caller, replica = _pick(model.callers, 0), _pick(model.replicas, 0)
    number = next(model.ids)
    assert caller.send(number, timeout_s=own_s)
    model.wires.end_turn()
    assert not model.wires.under_way[caller.name, "proxy"]
    ((run, _),) = model.wires.under_way[caller.name, replica.table.address]
    assert [(each.id, each.timeout_s) for _, each in run.queries] == [(number, limit_s)]
    model.deliver_all()
    assert (caller.name, number) in replica.running
    model.sleep(limit_s)
    assert not caller.waits(number)


def test_the_only_query_leaves_at_once_and_others_gather_in_a_turn(model):
    caller, replica = _pick(model.callers, 0), _pick(model.replicas, 0)
    model.end_all()
    model.deliver_all()
    assert not caller.queries
    numbers = [next(model.ids) for _ in range(3)]

    def sent() -> list[list[int]]:
        way = model.wires.under_way[caller.name, replica.table.address]
        return [[each.id for _, each in run.queries] for run, _ in way]

    assert caller.send(numbers[0])
    assert sent() == [numbers[:1]]
    assert caller.send(numbers[1])
    assert caller.send(numbers[2])
    assert sent() == [numbers[:1]]
    model.wires.end_turn()
    assert sent() == [numbers[:1], numbers[1:]]


@pytest.mark.parametrize(
    "settings",
    [{"follows": "stream"}, {"multiplexed_model_id": "x"}, {"session_id": "s"}, {"endpoint": "f"}],
)
def test_what_the_router_has_to_decide_is_not_sent_under_a_lease(model, settings):
    assert not _pick(model.callers, 0).send(next(model.ids), **settings)


def grant(model: LeaseModel, number: int) -> m.LeaseGranted:
    """Return what the proxy says of a lease of that number, with a slot more than any has."""
    replica = _pick(model.replicas, 0).table
    return m.LeaseGranted(
        proxy=PROXY,
        lease=f"proxy/{number}",
        number=number,
        endpoint="e",
        methods=(),
        timeout_s=None,
        slots=(m.LeasedSlots(replica.tag, replica.process, replica.address, LIMIT),),
        backend="b",
        traffic=model.traffic,
    )


def test_a_grant_of_more_that_arrives_after_the_return_of_its_lease_is_not_used(model):
    caller = _pick(model.callers, 0)
    held = caller.leases.held["e", "b"]
    caller.leases.revoked(m.RevokeLeases(proxy=PROXY, numbers=(held.number,)))
    caller.leases.granted(grant(model, held.number))
    assert not caller.send(next(model.ids))


def test_a_grant_that_comes_when_its_caller_has_left_is_not_used(model):
    """Its process may live on, and a replica that stops waits for leases that are open."""
    caller = _pick(model.callers, 0)
    number = caller.leases.held["e", "b"].number
    caller.leave(lambda: None)
    caller.leases.granted(grant(model, number + 1))
    assert not caller.leases.held
    model.kill_caller(0)


def test_what_is_late_or_of_another_proxy_changes_nothing_of_a_lease(model):
    caller = _pick(model.callers, 0)
    held, other = caller.leases.held["e", "b"], m.Process(9, 9, "the proxy before")
    slots = [share.slots for share in held.shares]
    caller.leases.granted(grant(model, held.number - 1))
    caller.leases.granted(replace(grant(model, held.number + 1), proxy=other))
    caller.leases.revoked(m.RevokeLeases(proxy=other, numbers=(held.number,)))
    assert caller.leases.held == {("e", "b"): held}
    assert [share.slots for share in held.shares] == slots
    caller.leases.granted(grant(model, held.number + 1))
    assert held.is_returned, "another one takes its place"


def test_a_lease_and_its_last_slot_are_returned_at_once(model):
    """Others wait for the slots, and changes for the lease."""
    caller, replica = _pick(model.callers, 0), _pick(model.replicas, 0)
    number, held = next(model.ids), caller.leases.held["e", "b"]
    assert caller.send(number)
    model.wires.end_turn()
    model.deliver_all()
    caller.leases.revoked(m.RevokeLeases(proxy=PROXY, numbers=(held.number,)))
    model.wires.end_turn()
    replica.end(caller.name, number)
    answer, _ = model.wires.under_way[replica.table.tag, caller.name].pop()
    caller.answered(answer, replica.table.tag)
    model.wires.end_turn()
    reports = [each.returned for each in sent_to_proxy(model, caller, m.LeasesUsed)]
    in_use = {replica.table.tag: 1}
    assert reports == [((held.number, in_use),), ((held.number, {}),)]


def test_what_was_sent_just_before_a_lease_is_revoked_runs_under_it(model):
    caller, replica = _pick(model.callers, 0), _pick(model.replicas, 0)
    number, held = next(model.ids), caller.leases.held["e", "b"]
    assert caller.send(number)  # and it has not left yet, as a message to close the lease might
    caller.leases.revoked(m.RevokeLeases(proxy=PROXY, numbers=(held.number,)))
    model.wires.end_turn()
    model.deliver_all()
    assert replica.running == {(caller.name, number): held.name}


def test_leases_end_when_the_next_proxy_is_met_whose_numbers_begin_anew(model):
    caller, proxy = _pick(model.callers, 0), m.Process(9, 9, "the next proxy")
    assert caller.send(next(model.ids))  # so that something is in use
    caller.proxy_gone()
    caller.met_proxy("proxy", proxy)
    caller.leases.report()
    assert not sent_to_proxy(model, caller, m.LeasesUsed)
    assert not caller.send(next(model.ids))
    caller.leases.granted(replace(grant(model, 1), proxy=proxy))
    assert caller.send(next(model.ids))
    model.kill_caller(0)


def test_a_query_that_is_given_up_counts_once_and_is_not_sent_if_it_has_not_left(model):
    caller, replica = _pick(model.callers, 0), _pick(model.replicas, 0)
    model.end_all()
    model.deliver_all()
    caller.leases.report()
    held, numbers = caller.leases.held["e", "b"], [next(model.ids), next(model.ids)]
    assert caller.send(numbers[0])
    model.wires.end_turn()
    model.deliver_all()
    assert caller.send(numbers[1])
    caller.cancel(numbers[1])
    caller.cancel(numbers[0])
    replica.end(caller.name, numbers[0])  # before it hears of that
    model.wires.end_turn()
    ((last, _),) = model.wires.under_way[caller.name, replica.table.tag]
    assert last.queries == ()
    model.deliver_all()
    assert not caller.queries
    assert held.take_used().ended == {499: [0.0, 0.0]}


def sent_to_proxy(model: LeaseModel, caller: Caller, kind: type[Any]) -> list[Any]:
    return [each for each, _ in model.wires.under_way[caller.name, "proxy"] if type(each) is kind]


def test_a_report_says_by_replica_what_failed_and_what_others_took(model):
    caller, tag = _pick(model.callers, 0), _pick(model.replicas, 0).table.tag
    number, numbers = caller.leases.held["e", "b"].number, [next(model.ids), next(model.ids)]
    assert all(map(caller.send, numbers))
    model.wires.end_turn()
    caller.ended(m.FailedAnswer(numbers[0], "UserCodeError", "it failed"))
    caller.ended(m.ValueAnswer(numbers[1], b""))
    caller.leases.report()
    (report,) = sent_to_proxy(model, caller, m.LeasesUsed)
    assert report.failed == {number: {tag: 1}}
    assert report.took[number].keys() == {tag}


def test_of_an_answer_that_has_begun_under_a_lease_the_router_may_only_say_why_it_ends(model):
    caller, replica = _pick(model.callers, 0), _pick(model.replicas, 0)
    number = next(model.ids)
    assert caller.send(number)
    model.wires.end_turn()
    model.deliver_all()
    replica.answer(caller.name, m.StreamBegun(number, 200, (), replica.process))
    model.deliver_all()
    model.kill_replica(0)
    (submitted,) = sent_to_proxy(model, caller, m.SubmitQueries)
    assert [(each.id, each.retryable) for each in submitted.queries] == [(number, False)]


def test_a_grant_says_all_that_its_caller_decides_by_and_routes_once(model):
    caller, tag = _pick(model.callers, 0), _pick(model.replicas, 0).table.tag
    table = EndpointTable(name="e", traffic=model.traffic, route="/x", methods=("GET",))
    model.perform(model.router.set_endpoint("e", table, model.wires.now))
    model.deliver_all()
    replica = model.router.state.replicas[tag]
    replica.weight = replica.weight._replace(pace=2.0)
    for number in (97, 98):
        model.desk.grant(tickets.Grant(tickets.Lease(number, caller.name, "e", "b", {tag: 2})))
    first, second = [message for message, _ in model.wires.under_way["proxy", caller.name]]
    assert (first.methods, first.route, first.routes) == (("GET",), "/x", {"/x": "e"})
    assert [(each.slots, each.pace) for each in first.slots] == [(2, 2.0)]
    assert second.routes is None
    table = EndpointTable(name="e", traffic=model.traffic, route="/y")
    model.perform(model.router.set_endpoint("e", table, model.wires.now))
    model.desk.grant(tickets.Grant(tickets.Lease(99, caller.name, "e", "b", {tag: 2})))
    assert model.wires.under_way["proxy", caller.name][-1][0].routes == {"/y": "e"}, "they changed"
    model.wires.under_way["proxy", caller.name].clear()


def test_a_change_is_confirmed_at_once_when_the_last_caller_with_a_lease_dies(model):
    confirmed: list[bool] = []
    table = EndpointTable(name="e", traffic=model.traffic, route="/x")
    model.perform(model.router.set_endpoint("e", table, model.wires.now))
    model.desk.when_confirmed(lambda: confirmed.append(True))
    while model.router.leases.unconfirmed:
        assert not confirmed
        model.kill_caller(0)
    assert confirmed


def test_the_router_hears_all_of_a_report(model):
    failed, took, ended = {"b#1": 1}, {"b#1": (1, 0.5)}, {200: [0.1]}
    report = m.LeasesUsed(
        incarnation="c", used=((7, (3, ended)),), failed={7: failed}, took={7: took}, overdue={7: 2}
    )
    with mock.patch.object(model.router.leases, "used", return_value=[]) as used:
        model.desk.used(report)
    used.assert_called_once_with("c", 7, Used(3, ended, failed, took, 2), model.wires.now)


def test_the_routes_of_a_grant_take_the_place_of_those_before(model):
    caller = _pick(model.callers, 0)
    number = caller.leases.held["e", "b"].number
    for more, route in ((1, "/old"), (2, "/new")):
        caller.leases.granted(replace(grant(model, number + more), routes={route: "e"}))
    assert not caller.send(next(model.ids), endpoint=None, path="/old")
    assert caller.send(next(model.ids), endpoint=None, path="/new")


def test_a_method_that_the_endpoint_does_not_take_is_left_to_the_router(model):
    caller = _pick(model.callers, 0)
    held = caller.leases.held["e", "b"]
    caller.leases.granted(replace(grant(model, held.number + 1), methods=("GET",)))
    assert not caller.send(next(model.ids), http_method="PUT")
    assert caller.send(next(model.ids), http_method="GET")


def test_leases_outlive_their_proxy_for_a_while_only(model):
    caller = _pick(model.callers, 0)
    caller.proxy_gone()
    steps, under_lease = round(2 * ORPHAN_S / IDLE_S), []
    for _ in range(2 * steps):  # so often that they are not returned because they are not used
        under_lease.append(caller.send(next(model.ids)))
        model.wires.end_turn()
        model.deliver_all()
        model.end_all()
        model.deliver_all()
        model.sleep(ORPHAN_S / steps)
    assert all(under_lease[: steps - 1])
    assert not any(under_lease[steps + 1 :])
    caller.met_proxy("proxy", PROXY)
    caller.attached(m.AttachCallerReply(proxy=PROXY, ready=True))


def test_a_new_replica_comes_to_its_share_of_a_lease_as_of_the_routers_queries(model):
    model.sleep(2 * SLOW_START_S)
    model.converge()
    model.add_replica()
    model.sleep(4.0)
    model.send(0, 2)
    model.deliver_all()
    old, new = _pick(model.callers, 0).leases.held["e", "b"].shares
    now = model.wires.now
    assert old.weight.warm_in_s(now) == 0
    assert new.weight.warm_in_s(now) == pytest.approx(SLOW_START_S - 4.0, abs=0.1)
    assert new.weight.warms_s == SLOW_START_S
    assert new.weight is not model.router.state.replicas[new.replica].weight  # its clock is another


def test_what_a_replica_refuses_after_a_fence_goes_to_the_router(model):
    caller, replica = _pick(model.callers, 0), _pick(model.replicas, 0)
    model.send(0, 1)  # and it runs, so that the lease is not returned as unused
    model.deliver_all()
    model.change_endpoint()
    model.wires.sleep(desks.FENCE_S)  # the caller does not hear that its lease is revoked
    while model.wires.under_way["proxy", replica.table.tag]:
        message, closed = model.wires.under_way["proxy", replica.table.tag].popleft()
        replica.take("proxy", message)
        closed()
    assert not model.router.leases.unconfirmed
    number = next(model.ids)
    assert caller.send(number)
    model.wires.end_turn()
    for way in ((caller.name, replica.table.tag), (replica.table.tag, caller.name)):
        model.deliver(list(filter(model.wires.under_way.get, model.wires.under_way)).index(way), 4)
    submitted = sent_to_proxy(model, caller, m.SubmitQueries)
    assert [each.refused for each in submitted] == [(number,)]
    model.converge()
    assert number not in caller.queries


def test_queries_of_a_replica_that_dies_go_to_the_router_and_no_more_are_sent_there(model):
    caller, replica = _pick(model.callers, 0), _pick(model.replicas, 0)
    numbers = [next(model.ids), next(model.ids)]
    assert caller.send(numbers[0])
    model.wires.end_turn()
    model.deliver_all()
    assert (caller.name, numbers[0]) in replica.running
    leased: list[bool] = []
    # And it has not left yet: its turn ends after that in which the death is seen.
    model.loop.asyncio.call_soon(lambda: leased.append(caller.send(numbers[1])))
    model.kill_replica(0)
    assert leased == [True]
    assert not any(map(caller.has_leased, numbers))
    (to_router,) = sent_to_proxy(model, caller, m.SubmitQueries)
    assert [each.id for each in to_router.queries] == numbers
    assert to_router.lost == ((numbers[0], 1),), "the other one had not left"
    assert not caller.send(next(model.ids))


def test_what_is_drawn_for_a_backend_without_a_lease_goes_to_the_router_which_draws_the_same():
    model = SplitLeaseModel()
    caller = _pick(model.callers, 0)
    for _ in range(20):
        model.end_all()
        if len(caller.leases.held) == 2:
            break
        model.send(0, 2)
        model.deliver_all()
    assert caller.leases.held.keys() == {("e", "b"), ("e", "c")}
    lease = caller.leases.held["e", "c"]
    caller.leases.revoked(m.RevokeLeases(proxy=PROXY, numbers=(lease.number,)))
    model.deliver_all()
    under_lease = Counter(caller.send(next(model.ids)) for _ in range(6))
    assert under_lease[True], "half of the queries"
    assert under_lease[False]
    model.wires.end_turn()
    model.deliver_all()
    here = [ticket for own in model.assigned.values() for ticket in own.values()]
    assert {ticket.backend for ticket in here if ticket.caller == caller.name} == {"c"}
    model.teardown()


def test_a_caller_says_how_many_of_its_queries_are_overdue_also_under_returned_leases(model):
    model.end_all()
    model.send(0, 2)
    model.deliver_all()
    caller = _pick(model.callers, 0)
    held = caller.leases.held["e", "b"]
    for _ in range(int(OVERDUE_S) + 1):  # its replica runs other queries all the time
        model.sleep(1.0)
        model.deliver_all()
    assert held.is_returned, "the replica has said nothing"
    assert held.ongoing == 2
    assert overdue(model.router.state, model.wires.now - OVERDUE_S) == {("e", "b"): 2}
    model.cancel(0, 0)  # which the replica has not heard of
    caller.leases.report()
    ways = [way for way, under_way in model.wires.under_way.items() if under_way]
    model.deliver(ways.index((caller.name, "proxy")), 1)
    assert held.ongoing == 2
    assert overdue(model.router.state, model.wires.now - OVERDUE_S) == {("e", "b"): 1}
    model.converge()
    assert not overdue(model.router.state, model.wires.now - OVERDUE_S)
