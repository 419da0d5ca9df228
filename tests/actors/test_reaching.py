"""How a process keeps reaching for a host that is away: one attempt at a time, for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from thespian.actors import ActorAddress

from greenroom.actors.runtime import port
from greenroom.actors.runtime.machine import Machine
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.transport.addresses import ProcessAddress


class MachineWith(Machine):
    """A machine on which a port gets this transport."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def attach(self, *_: Any) -> Any:
        return self._transport


AWAY = ProcessAddress("10.77.0.1", 1900)


class FakeTransport:
    """Lets others watch; ``end`` is what happens when the host cannot be reached."""

    deliveries_at_once = 1
    is_quiet = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.watching: list[Callable[[bool], None]] = []
        self.myAddress = ActorAddress(ProcessAddress("10.77.0.2", 70_000))

    def watch_remote(self, _target: Any, on_lost: Callable[[bool], None]) -> Callable[[], None]:
        self.watching.append(on_lost)
        return lambda: self.watching.remove(on_lost)

    def scheduleTransmit(self, *_args: Any) -> None:
        """Nothing is sent here."""

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
    """Whatever is sent is taken, and never answered."""

    admin_address = ActorAddress(AWAY)

    def send(self, *_args: Any) -> bool:
        return True


def test_what_nobody_ever_answers_is_forgotten_in_the_end() -> None:
    loop = asyncio.new_event_loop()
    transport = Deaf(loop)
    asking = port.Port(1900, this_process(), loop, machine=MachineWith(transport))
    address, probed = ActorAddress(AWAY), []
    for number in range(12_000):
        asking.identify(address, lambda *_: None)
        asking.ask_proxy(address, "routes", lambda _: None)
        asking.locate(*port.PROXY, lambda _: None)
        asking.probe(lambda answers, number=number: probed.append((number, answers)))  # type: ignore[misc]
    asked: list[Any] = [asking._identifying, asking._asking, asking._locating, asking._probing]
    assert [len(each) for each in asked] == [10_000] * 4
    asking._tell_probed(answers=True)
    assert probed == [(number, True) for number in range(2_000, 12_000)], "the last are told"
    asking.loop.close()
    loop.close()
