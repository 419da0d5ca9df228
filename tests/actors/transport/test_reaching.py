"""How a process keeps reaching for a host that is away: one attempt at a time, for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from thespian.actors import ActorAddress
from thespian.system.messages.admin import QueryAck

from greenroom.actors.messages.queries import AskProxyReply
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
        self.sent: list[tuple[Any, Any]] = []

    def send(self, _target: Any, message: Any, _on_sent: Any, on_failed: Any) -> bool:
        self.sent.append((message, on_failed))
        return True


def test_what_nobody_ever_answers_is_forgotten_in_the_end() -> None:
    loop = asyncio.new_event_loop()
    transport = Deaf(loop)
    machine = MachineWith(transport)
    asking = port.Port(1900, this_process(), loop, machine=machine)
    told: list[int] = []
    for _ in range(12_000):
        asking.ask_proxy(ActorAddress(AWAY), "routes", (), told.append)
    for number, (message, _) in enumerate(transport.sent):  # late
        reply = AskProxyReply(request_id=message.request_id, value=number)
        machine.arrived(SimpleNamespace(message=reply, sender=ActorAddress(AWAY)))
    assert told == list(range(2_000, 12_000)), "the last are told"

    probed: list[tuple[int, bool]] = []
    for number in range(12_000):
        asking.probe(lambda answers, number=number: probed.append((number, answers)))  # type: ignore[misc]
    _, on_failed = transport.sent[-1]
    on_failed()
    assert probed == [(number, False) for number in range(2_000, 12_000)]
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
        ack = QueryAck("system", "1", is_ending)
        machine.arrived(SimpleNamespace(message=ack, sender=sender))

    told: list[tuple[str, bool]] = []
    asking.probe(lambda answers: told.append(("first", answers)))
    answer(one, is_ending=True)
    answer(one, is_ending=True)  # to a probe before
    assert told == []
    answer(other, is_ending=False)
    assert told == [("first", True)]
    asking.probe(lambda answers: told.append(("second", answers)))
    answer(one, is_ending=True)
    _, on_failed = transport.sent[-1]
    on_failed()
    assert told == [("first", True), ("second", False)]
    asking.loop.close()
    loop.close()
