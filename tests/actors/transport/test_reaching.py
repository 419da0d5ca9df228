"""How a process asks one that may be away."""

from __future__ import annotations

from typing import Any

import pytest
from thespian.actors import ActorAddress
from thespian.system.messages.admin import QueryAck

from greenroom.actors.messages.queries import AskProxy, AskProxyReply
from greenroom.actors.runtime.port import BUSY_S, PROXY, REPEAT_S
from greenroom.actors.transport.addresses import ProcessAddress
from tests.support.lone_loop import LonePort

AWAY = ActorAddress(ProcessAddress("10.77.0.1", 1900))


@pytest.fixture
def port():
    return LonePort()


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_question_is_repeated_until_it_is_answered_or_late_and_then_forgotten(port, is_answered):
    request = AskProxy(request_id="an id", what="routes")
    asked = port.lone.asyncio.create_task(port.ask(lambda: AWAY, request, BUSY_S))
    for count in range(1, 4):
        assert port.lone.sent == [(AWAY, request)] * count
        port.lone.outbox[-1].arrived()
        port.lone.pass_time(REPEAT_S)
    if is_answered:
        port.lone.arrive(AskProxyReply(request_id="another", value=0))
        port.lone.arrive(AskProxyReply(request_id="an id", value=7))
    port.lone.pass_time(BUSY_S)
    count = len(port.lone.sent)
    port.ask_again()
    port.lone.pass_time(2 * REPEAT_S)
    assert len(port.lone.sent) == count, "it is asked no more"
    port.lone.arrive(AskProxyReply(request_id="an id", value=8))  # late
    reply = asked.result()
    assert (reply and reply.value) == (7 if is_answered else None)


def test_a_question_to_one_process_is_not_repeated_on_its_way_and_ends_where_it_cannot_arrive(port):
    asked = port.lone.asyncio.create_task(port.locate(*PROXY, AWAY))
    port.lone.pass_time(2 * REPEAT_S)
    (question,) = port.lone.outbox
    question.failed()
    port.lone.pass_time(0)
    assert asked.result() is None


def test_one_admin_of_several_that_shuts_down_does_not_answer_for_the_others(port):
    port.learn_gates(["10.77.0.1:1900", "10.77.0.2:1900"])
    one, other = port.gates

    def ask() -> Any:
        asked = port.lone.asyncio.create_task(port.answers(20.0))
        port.lone.pass_time(0)
        port.lone.arrive(QueryAck("system", "1", True), one)
        return asked

    asked = ask()
    port.lone.arrive(QueryAck("system", "1", True), one)  # to a question before
    port.lone.pass_time(1)
    assert not asked.done()
    port.lone.arrive(QueryAck("system", "1", False), other)
    port.lone.pass_time(0)
    assert asked.result() is True
    asked = ask()
    port.lone.outbox[-1].failed()
    port.lone.pass_time(0)
    assert asked.result() is False
    asked = port.lone.asyncio.create_task(port.answers(20.0))
    port.lone.pass_time(30)
    assert asked.result() is None, "none says anything"
