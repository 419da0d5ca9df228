"""How a process keeps reaching for a host that is away: one attempt at a time, for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from thespian.actors import ActorAddress
from thespian.system.messages.admin import QueryAck

from greenroom.actors.messages.queries import AskProxy, AskProxyReply
from greenroom.actors.runtime import port
from greenroom.actors.runtime.machine import Machine
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.transport.addresses import ProcessAddress


class MachineWith(Machine):
    """A machine on which a port gets this transport."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.arrived: Any = None

    def attach(self, _port: int, _loop: Any, arrived: Any, _way: Any) -> Any:
        self.arrived = arrived
        return self.transport


AWAY = ProcessAddress("10.77.0.1", 1900)


class FakeTransport:
    """Lets others watch; ``end`` is what happens when the host cannot be reached."""

    deliveries_at_once = 1

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.watching: list[Callable[[bool], None]] = []
        self.address = ActorAddress(ProcessAddress("10.77.0.2", 70_000))

    def watch_remote(self, _target: Any, on_lost: Callable[[bool], None]) -> Callable[[], None]:
        self.watching.append(on_lost)
        return lambda: self.watching.remove(on_lost)

    def end(self) -> None:
        for on_lost in list(self.watching):
            self.loop.call_soon(on_lost, True)
        self.loop.run_until_complete(asyncio.sleep(0))


def test_who_reaches_again_at_each_failure_is_called_once_for_each() -> None:
    loop = asyncio.new_event_loop()
    transport = FakeTransport(loop)
    reaching = port.Port(1900, this_process(), loop, machine=MachineWith(transport))
    failures: list[int] = []

    def lost() -> None:
        failures.append(len(failures))
        reaching.reach(ActorAddress(AWAY), lost)

    reaching.reach(ActorAddress(AWAY), lost)
    for _ in range(12):  # doubled each time, they would be thousands by now
        transport.end()
    assert len(failures) == 12
    reaching.loop.close()
    loop.close()


class Deaf(FakeTransport):
    """Keeps what is sent, which nothing answers."""

    admin_address = ActorAddress(AWAY)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.sent: list[tuple[Any, Any, Any]] = []

    def send(self, _target: Any, message: Any, on_sent: Any, on_failed: Any) -> None:
        self.sent.append((message, on_sent, on_failed))

    def deliver(self) -> None:
        for _, on_sent, _ in self.sent:
            on_sent()


def arrive(machine: MachineWith, message: Any, sender: Any) -> None:
    machine.arrived(SimpleNamespace(message=message, sender=sender))


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_question_is_repeated_until_it_is_answered_or_late_and_then_forgotten(
    monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    monkeypatch.setattr(port, "REPEAT_S", 0.01)
    loop = asyncio.new_event_loop()
    transport = Deaf(loop)
    machine = MachineWith(transport)
    asking = port.Port(1900, this_process(), loop, machine=machine)

    async def ask() -> Any:
        request = AskProxy(request_id="an id", what="routes")
        timeout_s = 20.0 if is_answered else 0.1
        asked = asyncio.ensure_future(asking.ask(lambda: ActorAddress(AWAY), request, timeout_s))
        while len(transport.sent) < 3:
            await asyncio.sleep(0.001)
            transport.deliver()
        assert {message for message, *_ in transport.sent} == {request}
        if is_answered:
            arrive(machine, AskProxyReply(request_id="another", value=0), None)
            arrive(machine, AskProxyReply(request_id="an id", value=7), None)
        reply = await asked
        count = len(transport.sent)
        asking.ask_again()
        await asyncio.sleep(0.05)
        assert len(transport.sent) == count, "it is asked no more"
        arrive(machine, AskProxyReply(request_id="an id", value=8), None)  # late
        return reply and reply.value

    assert loop.run_until_complete(ask()) == (7 if is_answered else None)
    asking.loop.close()
    loop.close()


def test_a_question_to_one_process_is_not_repeated_on_its_way_and_ends_where_it_cannot_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.new_event_loop()
    transport = Deaf(loop)
    asking = port.Port(1900, this_process(), loop, machine=MachineWith(transport))

    async def ask() -> Any:
        asked = asyncio.ensure_future(asking.locate(*port.PROXY, ActorAddress(AWAY)))
        await asyncio.sleep(0)
        _, _, on_failed = transport.sent[-1]
        await asyncio.sleep(0.05)
        assert len(transport.sent) == 1
        on_failed()
        return await asked

    monkeypatch.setattr(port, "REPEAT_S", 0.01)
    assert loop.run_until_complete(ask()) is None
    asking.loop.close()
    loop.close()


def test_one_admin_of_several_that_shuts_down_does_not_answer_for_the_others() -> None:
    loop = asyncio.new_event_loop()
    transport = Deaf(loop)
    machine = MachineWith(transport)
    asking = port.Port(1900, this_process(), loop, machine=machine)
    asking.learn_gates(["10.77.0.1:1900", "10.77.0.2:1900"])
    one, other = asking.gates

    def answer(sender: Any, *, is_ending: bool) -> None:
        arrive(machine, QueryAck("system", "1", is_ending), sender)

    async def first() -> bool | None:
        asked = asyncio.ensure_future(asking.answers(20.0))
        while len(transport.sent) < 2:
            await asyncio.sleep(0)
        answer(one, is_ending=True)
        answer(one, is_ending=True)  # to a question before
        await asyncio.sleep(0.02)
        assert not asked.done()
        answer(other, is_ending=False)
        return await asked

    async def second() -> bool | None:
        asked = asyncio.ensure_future(asking.answers(20.0))
        while len(transport.sent) < 4:
            await asyncio.sleep(0)
        answer(one, is_ending=True)
        _, _, on_failed = transport.sent[-1]
        on_failed()
        return await asked

    assert loop.run_until_complete(first()) is True
    assert loop.run_until_complete(second()) is False
    assert loop.run_until_complete(asking.answers(0.01)) is None, "none says anything"
    asking.loop.close()
    loop.close()
