"""What a caller does when its proxy dies, and with parts of answers that come late or twice."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from greenroom.actors.caller.caller import Caller
from greenroom.actors.caller.client import CallerClient
from greenroom.actors.caller.proxy_link import FIRST_REPEATS, NO_PROXY_S, RESEND_S
from greenroom.actors.caller.streams import Stream, StreamFailedError
from greenroom.actors.messages import queries as m
from greenroom.core.errors import NotRunningError
from greenroom.core.routing.tickets import BODY
from greenroom.serve.handle import DeploymentResponseGenerator
from tests.support.lone_loop import LoneLoop
from tests.support.queries import query

HERE = m.Process(1, 1, "here")
FIRST, SECOND = m.Process(2, 2, "first"), m.Process(3, 3, "second")


def stopped(loop: LoneLoop) -> list[tuple[Any, int]]:
    """Return who was told to end which answer."""
    return [
        (to, number)
        for to, message in loop.sent
        if isinstance(message, m.ControlStreams)
        for number in message.stopped
    ]


def asked(retryable: bool | None = True, follows: str = "") -> tuple[Caller, LoneLoop, list[Any]]:
    """Return a caller with a query under way, its loop, and what answers it gets."""
    loop, answers = LoneLoop(), []
    caller = Caller(loop, HERE)
    meet(caller, "proxy")
    sent = query(1, http_method="GET", retryable=retryable, follows=follows)
    caller.submit(sent, answers.append, lambda _upload: None)
    loop.pass_time(0)
    return caller, loop, answers


def meet(caller: Caller, name: str, *, is_ready: bool = True) -> None:
    """Let a caller meet a proxy, which has tables."""
    process = m.Process(9, 9, name)
    caller.met_proxy(name, process)
    if is_ready:
        caller.attached(m.AttachCallerReply(proxy=process, ready=True))


def deliver(caller: Caller, sender: str, *items: Any) -> None:
    caller.answered(m.AnswerQueries(incarnation="here", answers=items), sender)


def begun(by: m.Process) -> m.StreamBegun:
    return m.StreamBegun(1, 200, (), by)


def test_a_replica_that_begins_an_answer_which_nobody_waits_for_is_asked_to_end_it():
    caller, loop, answers = asked()
    deliver(caller, "second", m.ValueAnswer(1, b""))  # a new proxy had it run there
    deliver(caller, "first", begun(FIRST), m.StreamPart(1, b"part"))
    assert [type(each) for each in answers] == [m.ValueAnswer]
    assert stopped(loop) == [("first", 1)]


def test_of_two_replicas_that_begin_the_same_answer_both_are_asked_to_end_it():
    caller, loop, answers = asked()
    deliver(caller, "first", begun(FIRST))
    deliver(caller, "second", begun(SECOND))
    assert [type(each) for each in answers] == [Stream]
    assert sorted(stopped(loop)) == [("first", 1), ("second", 1)]


def test_an_answer_of_another_replica_ends_the_one_that_had_begun():
    caller, loop, _ = asked()
    deliver(caller, "first", begun(FIRST))
    deliver(caller, "second", m.ValueAnswer(1, b""))
    assert stopped(loop) == [("first", 1)]


def test_an_answer_that_comes_to_its_end_costs_no_further_message():
    caller, loop, _ = asked()
    deliver(caller, "first", begun(FIRST), m.StreamPart(1, b"part"), m.StreamEnded(1, 200))
    assert stopped(loop) == []


def test_a_good_answer_after_a_failure_that_never_came_is_the_answer():
    caller, loop, answers = asked()
    deliver(caller, "first", m.MayTryAgain(1, "first"))  # and dies; the router has another run it
    deliver(caller, "second", m.ValueAnswer(1, b""))
    loop.pass_time(1)
    assert [type(each) for each in answers] == [m.ValueAnswer]
    assert submitted(loop, "proxy") == [(1,)]


def test_a_refusal_after_a_failure_that_never_came_is_not_that_failure():
    caller, loop, answers = asked()
    deliver(caller, "first", m.MayTryAgain(1, "first"))  # and dies
    deliver(caller, "proxy", m.FailedAnswer(1, "BackPressureError", "too many wait"))
    loop.pass_time(1)
    assert [each.text for each in answers] == ["too many wait"]
    assert submitted(loop, "proxy") == [(1,)]


def test_whoever_fails_on_an_answer_keeps_no_other_from_theirs():
    caller, _, answers = asked()

    def fail(_answer: Any) -> None:
        raise RuntimeError("its own mistake")

    caller.submit(query(2, http_method="GET"), fail)
    caller.submit(query(3, http_method="GET"), answers.append)
    deliver(caller, "first", m.ValueAnswer(2, b""), m.ValueAnswer(1, b"one"), m.ValueAnswer(3, b""))
    assert [answer.query_id for answer in answers] == [1, 3]


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_stream_that_is_collected_ends_its_query_when_the_caller_is_not_at_work(has_begun):
    caller, loop, _ = asked()
    caller.next_id()  # the first was of the query under way

    async def collect() -> None:
        pending = CallerClient(caller).pending("a call")
        caller.submit(query(pending.id), pending.answered)
        cycle: list[Any] = [DeploymentResponseGenerator("it", pending)]
        cycle.append(cycle)
        if has_begun:
            deliver(caller, "first", m.StreamBegun(pending.id, 200, (), FIRST))
        del cycle
        for _ in caller.queries:  # as the caller does, and the collector may run anywhere
            gc.collect()

    loop.asyncio.run_until_complete(collect())
    loop.pass_time(0)
    assert caller.queries.keys() == {1}
    assert bool(stopped(loop)) == has_begun


def test_a_call_that_is_answered_and_fails_at_once_has_the_first_of_both():
    """As one that waits for an argument, which comes while the connection is closed."""
    client, error = CallerClient(asked()[0]), NotRunningError("the connection was closed")
    answer = m.FailedAnswer(1, "ReplicaUnavailableError", "the connection was closed")
    first, second, cancelled = (client.pending("a call") for _ in range(3))
    first.answered(answer)
    second.failed(error)
    cancelled.cancel()
    for call in (first, second, cancelled):
        call.failed(error)
        call.answered(answer)
    assert first.future.result() is answer
    assert second.future.exception() is error
    assert cancelled.future.cancelled()


def submitted(loop: LoneLoop, to: str) -> list[tuple[int, ...]]:
    """Return the ids that went to a proxy, and which of them may have run before."""
    return [
        (*(each.id for each in message.queries), *(-each for each in message.resent))
        for target, message in loop.sent
        if target == to and isinstance(message, m.SubmitQueries)
    ]


def test_what_the_next_proxy_gets_says_that_it_may_have_run():
    caller, loop, answers = asked(None)
    assert submitted(loop, "proxy") == [(1,)]
    caller.proxy_gone()
    assert not answers, "its answer may still come, from its replica"
    meet(caller, "next")
    assert submitted(loop, "next") == [(1, -1)]
    deliver(caller, "first", m.ValueAnswer(1, b""))
    assert [type(each) for each in answers] == [m.ValueAnswer]


@pytest.mark.parametrize("retryable", [None, False])
def test_what_did_not_reach_the_proxy_may_have_run(retryable):
    _, loop, answers = asked(retryable)
    loop.outbox[-1].failed()
    loop.pass_time(RESEND_S + 0.1)
    assert submitted(loop, "proxy") == [(1,), (1, -1) if retryable is None else ()]
    assert len(answers) == (retryable is False)


def test_what_runs_without_its_router_ends_when_its_answer_is_not_wanted():
    caller, loop, answers = asked()
    caller.proxy_gone()
    deliver(caller, "first", m.StillRuns(1))
    meet(caller, "next")
    assert stopped(loop) == []
    deliver(caller, "second", m.ValueAnswer(1, b""))
    assert [type(each) for each in answers] == [m.ValueAnswer]
    assert stopped(loop) == [("first", 1)]


def test_what_runs_without_its_router_ends_when_the_query_is_tried_again():
    """Its answer would be ignored: it is one to another number."""
    caller, loop, answers = asked()
    caller.proxy_gone()
    deliver(caller, "first", m.StillRuns(1))
    meet(caller, "next")
    loop.pass_time(0)
    deliver(caller, "second", m.MayTryAgain(1, "r#2"), m.FailedAnswer(1, "UserCodeError", ""))
    loop.pass_time(0)
    assert submitted(loop, "next") == [(1, -1), (-1, 1)]
    assert stopped(loop) == [("first", 1)]
    caller.proxy_gone()
    deliver(caller, "third", m.StillRuns(-1))
    caller.cancel(1)
    assert stopped(loop) == [("first", 1), ("third", -1)]
    assert not answers


def test_what_fails_where_another_replica_had_begun_to_answer_is_not_tried_again():
    caller, loop, _ = asked()
    deliver(caller, "first", begun(FIRST))
    deliver(caller, "second", m.MayTryAgain(1, "r#2"), m.FailedAnswer(1, "UserCodeError", ""))
    loop.pass_time(1)
    assert submitted(loop, "proxy") == [(1,)]
    assert stopped(loop) == [("first", 1)]


def test_what_its_caller_forbids_to_repeat_fails_at_once():
    caller, loop, answers = asked(False)
    caller.proxy_gone()
    assert answers[0].kind == "ReplicaUnavailableError"
    assert answers[0].text == "the proxy died with the query under way; it may have run"
    meet(caller, "next")
    assert submitted(loop, "next") == []


@pytest.mark.parametrize("retryable", [None, True])
@pytest.mark.parametrize("meets_another", [False, True])
def test_without_a_proxy_that_has_tables_a_query_fails_in_the_end(retryable, meets_another):
    caller, loop, answers = asked(retryable)
    loop.pass_time(10 * NO_PROXY_S)
    caller.proxy_gone()
    if meets_another:
        meet(caller, "next", is_ready=False)
    loop.pass_time(NO_PROXY_S - 0.1)
    assert not answers
    loop.pass_time(0.2)
    assert [each.kind for each in answers] == ["DeploymentUnavailableError"]
    assert "no proxy has had route tables for 30 s" in answers[0].text
    assert not loop.due()


def test_what_waits_for_a_proxys_tables_stays_here_and_has_not_run():
    loop, answers = LoneLoop(), []
    caller = Caller(loop, HERE)
    meet(caller, "proxy", is_ready=False)
    caller.submit(query(1, http_method="POST", retryable=False), answers.append)
    loop.pass_time(0)
    assert submitted(loop, "proxy") == []
    caller.proxy_gone()
    meet(caller, "next")
    meet(caller, "next")  # who says again that it is ready
    loop.pass_time(0)
    assert submitted(loop, "next") == [(1,)]
    assert not answers


def test_a_query_before_the_first_proxy_does_not_wait_for_ever():
    loop = LoneLoop()
    caller = Caller(loop, HERE)
    answers: list[Any] = []
    caller.submit(query(1, http_method="GET"), answers.append)
    loop.pass_time(NO_PROXY_S + 0.1)
    assert [each.kind for each in answers] == ["DeploymentUnavailableError"]


def test_each_query_waits_as_long_for_a_proxy():
    loop = LoneLoop()
    caller, failed = Caller(loop, HERE), []
    for number in (1, 2):
        caller.submit(
            query(number, http_method="GET"), lambda answer: failed.append(answer.query_id)
        )
        loop.pass_time(NO_PROXY_S - 1.0)
    assert failed == [1]
    loop.pass_time(2.0)
    assert failed == [1, 2]


def test_a_query_waits_for_its_answer_once_a_proxy_with_tables_is_there():
    caller, loop, answers = asked(True)
    caller.proxy_gone()
    meet(caller, "next")
    loop.pass_time(10 * NO_PROXY_S)
    assert not answers


def test_one_that_fails_without_a_proxy_waits_no_longer_once_the_next_has_tables():
    caller, loop, answers = asked(True)
    caller.proxy_gone()
    failure = m.FailedAnswer(1, "UserCodeError", "it failed")
    deliver(caller, "first", m.MayTryAgain(1, "r#1"), failure)
    meet(caller, "next")
    assert submitted(loop, "next") == [(-1, 1)]
    loop.pass_time(10 * NO_PROXY_S)
    assert not answers


def test_a_query_that_kills_every_proxy_is_abandoned():
    caller, loop, answers = asked(None)
    for number in range(2 * FIRST_REPEATS):
        caller.proxy_gone()
        meet(caller, f"next {number}")
        loop.pass_time(0)
    sent = [submitted(loop, f"next {number}") for number in range(2 * FIRST_REPEATS)]
    assert sum(map(len, sent)) == FIRST_REPEATS + 1
    assert "retries, limited to as many as queries, are used up" in answers[0].text


def test_the_death_of_a_replica_that_answers_is_noticed_when_the_proxy_is_dead():
    def begins() -> None:
        deliver(caller, "first", begun(FIRST))

    def loses_its_proxy() -> None:
        caller.proxy_gone()

    def meets_another() -> None:
        meet(caller, "next")

    for steps in (
        (begins, loses_its_proxy, meets_another),
        (loses_its_proxy, begins, meets_another),
        (loses_its_proxy, meets_another, begins),
        (loses_its_proxy, begins),
    ):
        caller, loop, answers = asked()
        for step in steps:
            step()
        loop.pass_time(0)
        assert not any(submitted(loop, "next")), "its replica has it"
        loop.end(FIRST)
        (stream,) = answers
        with pytest.raises(StreamFailedError, match="its replica died with the query under way"):
            asyncio.run(stream.next())
        assert not loop.watched()


def test_the_death_of_a_replica_that_takes_a_body_is_noticed_when_the_proxy_is_dead():
    caller, loop, answers = asked(follows=BODY)
    caller.proxy_gone()
    deliver(caller, "first", m.FeedWanted(1, 5, FIRST))
    meet(caller, "next")
    loop.end(FIRST)
    assert answers[0].text == "its replica died with the query under way"
    assert not loop.watched()
