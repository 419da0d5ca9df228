"""Queries in a replica, told by hand what routers would tell it: limits, ends and outcomes."""

import asyncio
import itertools
import pickle
import sys
import threading

import pytest

from greenroom import serve
from greenroom.actors.caller.streams import StreamFailedError
from greenroom.actors.messages import queries as m
from greenroom.core.errors import NotBegunError
from greenroom.core.routing.tickets import BODY
from greenroom.serve.handle import decode
from tests.actors.one_process import Place
from tests.support.queries import python_call, query
from tests.support.timing import until


class Gate:
    """Keeps calls inside until it is open, and counts how many are inside at once."""

    def __init__(self):
        self.lock, self.gate = threading.Lock(), threading.Event()
        self.inside = self.most = self.cancelled = 0

    def _enter(self, change):
        with self.lock:
            self.inside += change
            self.most = max(self.most, self.inside)

    def sync(self):
        self._enter(1)
        self.gate.wait(20)
        self._enter(-1)

    async def coroutine(self):
        self._enter(1)
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._enter(-1)

    async def parts(self):
        yield 1
        await self.coroutine()


class Router:
    """A router of the test's, and what it hears of its tickets; callers are where it is."""

    def __init__(self, one):
        self._place, self._replica = Place(one.loop), one.queries.port.address
        self._tickets = itertools.count(1)
        self.answers, self._outcomes = [], {}
        self._place.on(m.AnswerQueries, lambda heard, _: self.answers.extend(heard.answers))
        self._place.on(m.QueriesFinished, self._finished)

    def _finished(self, heard, _sender):
        self._outcomes |= dict(heard.answered)
        self._outcomes |= dict.fromkeys(heard.cancelled, 499)
        self._outcomes |= dict.fromkeys(heard.rejected, "rejected")

    def calls(self, count, method="", *, stream=False, timeout_s=None):
        return [self._call(method, stream, timeout_s) for _ in range(count)]

    def _call(self, method, stream, timeout_s):
        ticket, settings = next(self._tickets), python_call(method=method)
        call = pickle.loads(settings["call"])._replace(stream=stream)
        return m.Assignment(
            ticket,
            query(ticket, call_method=method, call=pickle.dumps(call)),
            pickle.dumps(self._place),
            self._place.process.incarnation,
            "e",
            "/",
            timeout_s,
        )

    def run(self, *assignments, cancelled=(), incarnation=""):
        """Have the replica run and cancel these."""
        to = incarnation or self._replica.process.incarnation
        order = m.RunQueries(to, self._place.process, assignments, cancelled)
        self._replica.arrived(order, self._place)

    async def outcomes(self, assignments):
        """Wait for the outcome of each: its status, or "rejected"."""
        tickets = [each.ticket for each in assignments]
        await until(lambda: self._outcomes.keys() >= {*tickets})
        return [self._outcomes.pop(ticket) for ticket in tickets]


@pytest.fixture
def gated(one_process):
    """A replica of a Gate, and that; opened at the test's end, so that no call stays inside."""
    gates = []

    def make(limit):
        one = one_process(Gate, limit=limit)
        gates.append(one.user_code.servable.instance)
        return one, gates[-1]

    yield make
    for each in gates:
        each.gate.set()


BOTH_KINDS = pytest.mark.parametrize("method", ["sync", "coroutine"])


@BOTH_KINDS
def test_the_limit_holds_over_routers_that_know_nothing_of_each_other(gated, method):
    one, gate = gated(4)
    routers = [Router(one), Router(one)]

    async def ask():
        calls = [(router, call) for router in routers for call in router.calls(12, method)]
        for router, call in calls:
            router.run(call)
        await until(lambda: gate.inside == 4)
        for router, call in calls[4:]:
            assert await router.outcomes([call]) == ["rejected"]
        assert one.queries.running == 4
        gate.gate.set()
        assert await routers[0].outcomes([call for _, call in calls[:4]]) == [200] * 4
        assert gate.most == 4

    one.run(ask())


async def answers_first(scope, _receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})
        await asyncio.sleep(0)


def test_the_answer_of_the_only_query_is_there_before_its_code_has_returned(one_process):
    one = one_process(serve.ingress(answers_first)(type("App", (), {})))
    call = m.HttpCall("GET", "/", b"/", b"", (), b"", "http", "1.1", None, None, "")
    heard = []

    def submit():
        asked = {"path": "/", "http_method": "GET", "call": m.packed(tuple(call))}
        one.caller.submit(
            query(one.caller.next_id(), **asked),
            lambda answer: heard.append((answer.body, one.queries.running)),
        )

    async def ask():
        submit()
        await until(lambda: heard)
        assert heard == [(b"here", 1)]
        for _ in range(4):
            submit()
        await until(lambda: len(heard) == 5)
        assert {body for body, _ in heard} == {b"here"}
        await until(lambda: one.queries.running == 0)

    one.run(ask())


class Unable:
    """Gives its queries back."""

    async def __call__(self):
        raise NotBegunError("not here")

    async def too_late(self):
        yield 1
        raise NotBegunError("not here")


def test_what_user_code_gives_back_is_rejected_unless_an_answer_has_begun(one_process):
    one = one_process(Unable, limit=1)
    router = Router(one)

    async def ask():
        calls = router.calls(1)
        for _ in range(2):  # it has its slot again
            router.run(*calls)
            assert await router.outcomes(calls) == ["rejected"]
        late = router.calls(1, "too_late", stream=True)
        router.run(*late)
        assert await router.outcomes(late) == [503]
        assert router.answers[-1].kind == "NotBegunError"

    one.run(ask())


def test_arguments_of_a_module_that_the_deployment_lacks_are_refused_by_its_name(gated):
    one, _ = gated(1)
    asked = python_call(method="sync")
    asked["call"] = pickle.dumps(
        pickle.loads(asked["call"])._replace(arguments=b"cno_such_module\nname\n.")
    )
    refused = one.run(one.answer(**asked))
    assert refused.kind == "InvalidRequestError"
    assert "the deployment lacks (No module named 'no_such_module')" in refused.text


def test_who_takes_parts_hears_that_a_router_has_ended_the_answer(gated):
    one, gate = gated(1)
    router = Router(one)

    async def ask():
        (call,) = router.calls(1, "parts", stream=True)
        router.run(call)
        await until(lambda: gate.inside)
        router.run(cancelled=(call.ticket,))
        assert await router.outcomes([call]) == [499]
        answer = router.answers[-1]
        assert (answer.query_id, answer.kind) == (call.query.id, "RequestCancelledError")

    one.run(ask())


def test_cancelled_sync_code_keeps_its_slot_until_it_returns(gated):
    one, gate = gated(1)
    router = Router(one)

    async def ask():
        (call, late) = router.calls(2, "sync")
        router.run(call)
        await until(lambda: gate.inside)
        router.run(cancelled=(call.ticket,))
        router.run(cancelled=(call.ticket, 10**9))  # a repeat, and a ticket that nobody has
        router.run(late)
        assert await router.outcomes([late]) == ["rejected"]
        assert one.queries.running == 1
        gate.gate.set()
        assert await router.outcomes([call]) == [499]
        assert one.queries.running == 0

    one.run(ask())


def test_the_limit_of_a_replica_that_runs_can_be_changed(gated):
    one, gate = gated(1)
    router = Router(one)

    async def ask():
        one.configure({"max_ongoing_requests": 6})
        (*calls, late) = router.calls(4, "sync")
        router.run(*calls)
        await until(lambda: gate.inside == 3)
        one.configure({"max_ongoing_requests": 2})
        router.run(late)
        assert await router.outcomes([late]) == ["rejected"]
        gate.gate.set()
        assert await router.outcomes(calls) == [200] * 3
        router.run(late)
        assert await router.outcomes([late]) == [200]

    one.run(ask())


@BOTH_KINDS
def test_a_query_ends_past_its_deadline_though_its_router_is_silent(gated, method):
    one, gate = gated(1)
    router = Router(one)

    async def ask():
        (call,) = router.calls(1, method, timeout_s=1.0)  # it begins before that
        router.run(call)
        await until(lambda: router.answers)
        (answer,) = router.answers
        assert (answer.kind, answer.text) == ("QueryTimeoutError", "no answer within 1 s")
        if method == "sync":
            assert one.queries.running == 1
            gate.gate.set()
        assert await router.outcomes([call]) == [408]
        assert gate.cancelled == (method == "coroutine")
        assert one.queries.running == 0

    one.run(ask())


@BOTH_KINDS
def test_a_query_cancelled_in_the_message_that_brings_it_frees_its_slot(gated, method):
    one, gate = gated(1)
    router = Router(one)
    gate.gate.set()

    async def ask():
        for call in router.calls(20, method):
            router.run(call, cancelled=(call.ticket,))
            assert await router.outcomes([call]) in ([499], [200])
        assert one.queries.running == 0

    one.run(ask())


def test_queries_for_an_earlier_process_at_the_same_place_are_ignored(gated):
    one, gate = gated(10)
    router = Router(one)

    async def ask():
        calls = router.calls(2, "sync")
        router.run(*calls, incarnation="of somebody dead")
        (own,) = router.calls(1, "sync")
        router.run(own)
        await until(lambda: gate.inside)
        assert one.queries.running == 1

    one.run(ask())


class Misbehaves:
    """Code that ends more than its own call."""

    def exits(self):
        sys.exit(3)

    async def exits_async(self):
        sys.exit(3)

    def interrupts(self):
        raise KeyboardInterrupt

    async def cancels_itself(self):
        raise asyncio.CancelledError

    def raises_cancelled(self):
        raise asyncio.CancelledError

    async def awaits_a_cancelled_task(self):
        task = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        task.cancel()
        await task

    def generator_exit(self):
        raise GeneratorExit

    def stop_iteration(self):
        raise StopIteration

    def works(self):
        return "works"

    async def works_async(self):
        return "works"


@pytest.mark.parametrize(
    "method", [name for name in vars(Misbehaves) if not name.startswith(("_", "works"))]
)
def test_whatever_user_code_raises_is_answered_and_the_replica_goes_on(one_process, method):
    one = one_process(Misbehaves, limit=1)
    answer = one.run(one.answer(**python_call(method=method)))
    assert isinstance(answer, m.FailedAnswer), answer
    assert answer.kind == "UserCodeError"
    error = decode(answer, "it").error
    assert isinstance(error, Exception), "what is none would end who only asked"
    for works in ("works", "works_async"):
        assert decode(one.run(one.answer(**python_call(method=works))), "it").value == "works"
    assert one.queries.running == 0


class Late:
    """Answers, and reads what its caller streams only then."""

    def __init__(self):
        self.heard = []

    async def __call__(self, values):
        self.reading = asyncio.create_task(self.read(values))
        return "early"

    async def read(self, values):
        try:
            self.heard.append([value async for value in values])
        except StreamFailedError as error:
            self.heard.append(str(error))


def test_values_that_a_task_reads_after_the_answer_do_not_seem_to_be_all(one_process):
    one = one_process(Late)

    async def ask():
        router, late = Router(one), one.user_code.servable.instance
        (call,) = router.calls(1)
        router.run(call._replace(query=call.query._replace(follows=BODY)))
        assert await router.outcomes([call]) == [200]
        await until(lambda: late.heard)
        assert late.heard == ["the call has ended before all of its values were here"]

    one.run(ask())
