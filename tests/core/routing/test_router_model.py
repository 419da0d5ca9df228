"""Random lives of a router, beside a count of what must be true of any."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.core.routing.balancing import SATURATED_S
from greenroom.core.routing.load import busy, by_endpoint
from greenroom.core.routing.retries import MAX_ATTEMPTS, may_retry
from greenroom.core.routing.tables import BackendTable
from greenroom.core.routing.tickets import DROPPED, ENDED, Assign, Cancel, NewQuery, Refuse, Ticket
from tests.core.routing.queries import (
    Dropped,
    Ended,
    Query,
    Retried,
    RetryRefused,
    Starved,
    WatchedRouter,
    endpoint,
    ongoing,
    only,
    replica,
)
from tests.support.leftovers import where_named

BACKENDS = ("a", "b")
CALLERS = st.sampled_from(["c1", "c2"])
INDEX = st.integers(0, 50)


def host_of(replica: str) -> str:
    """Return the host of a replica: every other one is on each of two."""
    return "even" if int(replica[1:]) % 2 == 0 else "odd"


class RouterModel(RuleBasedStateMachine):
    """What replicas hold is told by the effects alone, as the shell performs them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = WatchedRouter(random.Random(0).random)
        self.now = 0.0
        self.ids = iter(range(1, 10**6))
        self.lives = iter(range(1, 10**6))
        self.replicas: dict[str, dict[str, Any]] = {tag: {} for tag in BACKENDS}  # in the tables
        self.held: dict[str, dict[int, Ticket]] = {}  # by replica, dead ones excluded
        self.unconfirmed: dict[str, dict[int, Ticket]] = {}  # answered, and not known to be there
        self.withdrawn: dict[str, set[int]] = {}  # what replicas may still run, and others do
        self.silent: set[str] = set()  # hosts
        self.dead: set[str] = set()
        self.draining: set[str] = set()
        self.resting: dict[str, float] = {}  # until when; they rejected a query
        self.traffic = {f"e-{tag}": tag for tag in BACKENDS}
        self.limits = dict.fromkeys(BACKENDS, 2)
        self.queries: dict[tuple[str, int], Query] = {}
        self.outcomes: dict[tuple[str, int], list[str]] = {}
        self.ends: dict[int, int] = {}  # ended tickets, to be one per ticket
        self.assignments: dict[tuple[str, int], int] = {}
        self.first_runs: Counter[tuple[str, str]] = Counter()  # by endpoint and backend
        self.retries: Counter[tuple[str, str]] = Counter()
        self.cancelled: set[tuple[str, int]] = set()
        for tag in BACKENDS:
            self.run(self.router.set_endpoint(f"e-{tag}", endpoint(f"e-{tag}", to=tag), 0.0))
            self.add_replica(tag)

    def run(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Assign):
                assert effect.replica not in self.dead
                tag = effect.ticket.backend
                assert effect.replica in self.replicas[tag], "only replicas of the newest table"
                held = self.held.setdefault(effect.replica, {})
                held[effect.ticket.number] = effect.ticket
                assert self.load(effect.replica) <= self.limits[tag]
                assert host_of(effect.replica) not in self.silent
                if effect.ticket.is_mirrored:
                    assert effect.ticket.attempts == 1, "a mirrored query runs once"
                    continue
                key = (str(effect.ticket.caller), effect.ticket.query.id)
                pair = (effect.ticket.endpoint, tag)
                self.first_runs[pair] += key not in self.assignments
                self.assignments[key] = self.assignments.get(key, 0) + 1
            elif isinstance(effect, Refuse):
                got = self.outcomes[str(effect.caller), effect.query_id]
                if "answered" not in got:
                    got.append(effect.kind)
            elif isinstance(effect, Cancel):
                if self.held[effect.replica][effect.number].number != effect.number:
                    del self.held[effect.replica][effect.number]  # another replica has it now
                    self.withdrawn.setdefault(effect.replica, set()).add(effect.number)
            elif isinstance(effect, Retried):
                self.retries[effect.endpoint, effect.backend] += 1
            else:
                assert isinstance(effect, Ended | Dropped | RetryRefused | Starved)

    def publish(self, tag: str, **settings: Any) -> None:
        table = BackendTable(
            tag=tag,
            replicas=tuple(self.replicas[tag].values()),
            max_ongoing_requests=self.limits[tag],
            max_queued_requests=6,
            request_timeout_s=5.0,
            **settings,
        )
        self.run(self.router.set_backend(tag, table, self.now))

    # --- Tables ---------------------------------------------------------------------------------

    @rule(tag=st.sampled_from(BACKENDS))
    def add_replica(self, tag: str) -> None:
        life = next(self.lives)
        name = f"{tag}{life}"
        self.replicas[tag][name] = replica(name, life, host=host_of(name))
        self.publish(tag)

    @rule(tag=st.sampled_from(BACKENDS), index=INDEX)
    def retire_replica(self, tag: str, index: int) -> None:
        tags = list(self.replicas[tag])
        if tags:
            del self.replicas[tag][tags[index % len(tags)]]
            self.publish(tag)

    @rule(tag=st.sampled_from(BACKENDS))
    def forget_all_and_learn_again(self, tag: str) -> None:
        known, self.replicas[tag] = self.replicas[tag], {}
        self.publish(tag)
        self.replicas[tag] = known
        self.publish(tag)

    @rule(tag=st.sampled_from(BACKENDS), limit=st.integers(2, 4))
    def raise_limit(self, tag: str, limit: int) -> None:
        self.limits[tag] = max(limit, self.limits[tag])
        self.publish(tag)

    @rule(
        name=st.sampled_from(BACKENDS),
        to=st.sampled_from(BACKENDS),
        shadows=st.dictionaries(st.sampled_from(BACKENDS), st.sampled_from([0.5, 1.0])),
    )
    def move_traffic(self, name: str, to: str, shadows: dict[str, float]) -> None:
        table = endpoint(f"e-{name}", to=to, shadows=shadows)
        self.traffic[f"e-{name}"] = to
        self.run(self.router.set_endpoint(f"e-{name}", table, self.now))

    @rule(tag=st.sampled_from(BACKENDS))
    def remove_and_restore_backend(self, tag: str) -> None:
        self.replicas[tag] = {}
        self.run(self.router.set_backend(tag, None, self.now))
        self.add_replica(tag)

    # --- Queries --------------------------------------------------------------------------------

    @rule(
        caller=CALLERS,
        tag=st.sampled_from(BACKENDS),
        retryable=st.sampled_from([None, True, False]),
        http_method=st.sampled_from(["", "GET"]),
        timeout_s=st.sampled_from([None, 1.0]),
    )
    def submit(self, caller: str, tag: str, **options: Any) -> None:
        query = Query(next(self.ids), f"e-{tag}", **options)
        self.queries[caller, query.id] = query
        self.outcomes[caller, query.id] = []
        self.run(self.router.submit(NewQuery(caller, query), self.now))

    @rule()
    def mirror(self) -> None:
        self.run(self.router.mirror(self.now))

    @rule(index=INDEX)
    def submit_again(self, index: int) -> None:
        open_ones = [key for key, got in self.outcomes.items() if not got]
        if open_ones:
            caller, query_id = open_ones[index % len(open_ones)]
            if (caller, query_id) not in self.cancelled:
                effects = self.router.submit(
                    NewQuery(caller, self.queries[caller, query_id]), self.now
                )
                assert effects == []

    @rule(index=INDEX)
    def cancel(self, index: int) -> None:
        keys = [k for k, got in self.outcomes.items() if not got and k not in self.cancelled]
        if keys:
            caller, query_id = keys[index % len(keys)]
            self.cancelled.add((caller, query_id))
            self.run(self.router.cancel(caller, query_id, self.now))

    @rule(caller=CALLERS)
    def lose_caller(self, caller: str) -> None:
        self.cancelled |= {k for k, got in self.outcomes.items() if k[0] == caller and not got}
        self.run(self.router.caller_gone(caller, self.now))
        left = {
            tag: {number: ticket for number, ticket in known.items() if ticket.caller != caller}
            for tag, known in self.unconfirmed.items()
        }
        self.unconfirmed = {tag: known for tag, known in left.items() if known}

    @rule(seconds=st.sampled_from([0.01, SATURATED_S, 0.5, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.run(self.router.expire(self.now))
        self.run(self.router.expire(self.now))

    # --- Replicas -------------------------------------------------------------------------------

    def take(self, index: int, count: int) -> tuple[str, list[Ticket]]:
        busy = [tag for tag, tickets in self.held.items() if tickets]
        if not busy:
            return "", []
        tag = busy[index % len(busy)]
        numbers = list(self.held[tag])[:count]
        return tag, [self.held[tag].pop(number) for number in numbers]

    def answer(self, ticket: Ticket) -> None:
        if ticket.is_mirrored:
            return
        key = (str(ticket.caller), ticket.query.id)
        got = self.outcomes[key]
        if ticket.state is not DROPPED and "answered" not in got:  # callers ignore seconds
            got.append("answered")

    def not_run(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            if not ticket.is_mirrored:
                self.assignments[str(ticket.caller), ticket.query.id] -= 1

    @rule(index=INDEX, count=st.integers(1, 3))
    def finish(self, index: int, count: int) -> None:
        tag, tickets = self.take(index, count)
        for ticket in tickets:
            self.answer(ticket)
        outcomes = [(ticket.number, 200) for ticket in tickets]
        self.resting.pop(tag, None)
        self.run(self.router.finished(tag, outcomes, self.now))
        assert self.router.finished(tag, outcomes, self.now) == []

    @rule(index=INDEX, count=st.integers(1, 3))
    def answer_some(self, index: int, count: int) -> None:
        tag, tickets = self.take(index, count)
        for ticket in tickets:
            self.answer(ticket)
            if not ticket.is_mirrored and ticket.state is not DROPPED:
                self.unconfirmed.setdefault(tag, {})[ticket.number] = ticket
        outcomes = [(ticket.number, 200) for ticket in tickets]
        self.resting.pop(tag, None)
        self.run(self.router.answered(tag, outcomes, self.now))

    @rule(index=INDEX)
    def deliver_some(self, index: int) -> None:
        tags = list(self.unconfirmed)
        if tags:
            tag = tags[index % len(tags)]
            numbers = list(self.unconfirmed.pop(tag))
            assert len(only(Ended, self.router.delivered(tag, numbers))) == len(numbers)

    @rule(index=INDEX, draining=st.booleans())
    def reject(self, index: int, draining: bool) -> None:
        tag, tickets = self.take(index, 1)
        self.not_run(tickets)
        numbers = [ticket.number for ticket in tickets]
        self.resting[tag] = self.now + SATURATED_S
        if draining:
            self.draining.add(tag)
        self.run(self.router.rejected(tag, numbers, self.now, draining=draining))

    @rule(host=st.sampled_from(["even", "odd"]))
    def silence(self, host: str) -> None:
        self.silent.add(host)
        effects = self.router.hosts.silent(host, self.now)
        for unconfirmed in self.unconfirmed.values():  # those sent to others have other numbers
            for number in [n for n, ticket in unconfirmed.items() if ticket.number != n]:
                del unconfirmed[number]
        self.unconfirmed = {tag: known for tag, known in self.unconfirmed.items() if known}
        self.run(effects)

    @rule(host=st.sampled_from(["even", "odd"]))
    def hear(self, host: str) -> None:
        self.silent.discard(host)
        self.run(self.router.hosts.answers(host, self.now))

    @rule(index=INDEX, answered=st.booleans())
    def report_withdrawn(self, index: int, answered: bool) -> None:
        tags = list(self.withdrawn)
        if tags:
            tag = tags[index % len(tags)]
            outcomes = [(number, 499) for number in self.withdrawn.pop(tag)]
            self.resting.pop(tag, None)
            tell = self.router.answered if answered else self.router.finished
            self.run(tell(tag, outcomes, self.now))

    @rule(index=INDEX, unsent=st.booleans())
    def die(self, index: int, unsent: bool) -> None:
        tags = [tag for each in self.replicas.values() for tag in each] + list(self.held)
        if not tags:
            return
        tag = tags[index % len(tags)]
        tickets = self.held.pop(tag, {})
        self.unconfirmed.pop(tag, None)
        self.withdrawn.pop(tag, None)
        self.dead.add(tag)
        for replicas in self.replicas.values():
            replicas.pop(tag, None)
        if unsent:
            self.not_run(list(tickets.values()))
        effects = self.router.replica_gone(tag, list(tickets) if unsent else (), self.now)
        self.run(effects)
        refused = {e.query_id for e in effects if isinstance(e, Refuse)}
        for ticket in tickets.values():
            if ticket.is_mirrored:
                assert unsent or ticket.state is ENDED
            elif ticket.query.id in refused and self.queries_left(ticket):
                assert not unsent
                over_budget = RetryRefused(ticket.endpoint, ticket.backend) in effects
                tired = ticket.attempts >= MAX_ATTEMPTS or over_budget
                assert tired or not may_retry(ticket.query.http_method, (ticket.query.retryable,))

    def queries_left(self, ticket: Ticket) -> bool:
        kinds = self.outcomes[str(ticket.caller), ticket.query.id]
        return kinds == ["ReplicaUnavailableError"]

    # --- What must hold -------------------------------------------------------------------------

    @invariant()
    def router_and_replicas_agree(self) -> None:
        loads = {tag: self.load(tag) for tag in {*self.held, *self.withdrawn} if self.load(tag)}
        assert {tag: n for tag, n in ongoing(self.router).items() if n} == loads

    @invariant()
    def what_is_busy_is_what_is_open(self) -> None:
        ongoing = Counter(t.backend for held in self.held.values() for t in held.values())
        assert {tag: n for tag, (_, n) in busy(self.router.state).items() if n} == dict(ongoing)
        unanswered = sum(map(sum, by_endpoint(self.router.state)[0].values()))
        answered = sum(map(len, self.unconfirmed.values()))
        assert self.router.open_tickets == unanswered + answered

    @invariant()
    def no_query_ends_twice_or_runs_too_often(self) -> None:
        assert all(len(got) <= 1 for got in self.outcomes.values())
        assert all(times <= MAX_ATTEMPTS for times in self.assignments.values())

    @invariant()
    def retries_never_more_than_double_the_load(self) -> None:
        assert all(retries <= self.first_runs[pair] for pair, retries in self.retries.items())

    @invariant()
    def nothing_waits_beside_a_free_replica(self) -> None:
        queries, mirrored = by_endpoint(self.router.state)
        with_traffic = set(self.traffic.values())
        for load, is_mirrored in ((queries, False), (mirrored, True)):
            for (_, tag), (queued, _) in load.items():
                limit = self.limits[tag]
                slots = max(limit // 2, 1) if is_mirrored and tag in with_traffic else limit
                for each in self.replicas[tag] if queued else ():
                    assert self.load(each) >= slots or self.may_get_none(each)

    def load(self, replica: str) -> int:
        return len(self.held.get(replica, ())) + len(self.withdrawn.get(replica, ()))

    def may_get_none(self, replica: str) -> bool:
        if host_of(replica) in self.silent:
            return True
        return replica in self.draining or self.resting.get(replica, 0.0) > self.now

    def teardown(self) -> None:
        for host in list(self.silent):
            self.hear(host)
        while self.withdrawn:
            self.report_withdrawn(0, False)
        for tag in BACKENDS:
            self.add_replica(tag)
        for _ in range(200):
            self.now += SATURATED_S
            self.run(self.router.mirror(self.now))
            self.run(self.router.expire(self.now))
            tag, tickets = self.take(0, 9)
            for ticket in tickets:
                self.answer(ticket)
            outcomes = [(ticket.number, 200) for ticket in tickets]
            self.run(self.router.finished(tag, outcomes, self.now))
            self.deliver_some(0)
        for key, got in self.outcomes.items():
            assert len(got) == 1 or (not got and key in self.cancelled), key
        assert self.router.is_empty
        assert not where_named(self.router, self.dead)


TestRouterModel = RouterModel.TestCase
TestRouterModel.settings = settings(max_examples=40, stateful_step_count=30)
