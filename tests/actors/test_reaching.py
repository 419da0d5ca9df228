"""How a process keeps reaching for a host that is away: one attempt at a time, for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from thespian.actors import ActorAddress

from understudy.actors import bases, port
from understudy.actors.processes import this_process
from understudy.actors.transport.addresses import ProcessAddress
from understudy.actors.transport.watches import Watches

AWAY = ProcessAddress("10.77.0.1", 1900)


class FakeTransport(Watches):
    """Watches as the real one does; ``end`` is what happens when the host cannot be reached."""

    deliveries_at_once = 1
    is_quiet = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.peers: Any = self
        self._own = ProcessAddress("10.77.0.2", 70_000)
        self._watching = {}
        self.myAddress = ActorAddress(self._own)

    def reach(self, _address: ProcessAddress) -> None:
        """What the real peers dial for."""

    def scheduleTransmit(self, *_args: Any) -> None:
        """Nothing is sent here."""

    def end(self) -> None:
        self._tell_watchers(AWAY, is_certain=True)
        self.loop.run_until_complete(asyncio.sleep(0))


def test_who_reaches_again_at_each_failure_is_called_once_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.new_event_loop()
    transport = FakeTransport(loop)
    monkeypatch.setattr(bases, "get", lambda _: type("B", (), {"attach": lambda *_: transport}))
    reaching = port.Port(1900, this_process(), loop)
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
