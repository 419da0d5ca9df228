"""The addresses that a host joins by: looked up again, and on no loop that must not wait."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from greenroom.actors.cluster import controller_seeker
from greenroom.actors.cluster.controller_seeker import Gates
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.core.errors import StartError
from tests.support.timing import until

BY_NAME, ADDRESS = "leader.example:1900", "10.0.0.1:1900"


def joining(gate: str) -> HostSettings:
    return read_settings({}, bind="10.0.0.3", join=gate)


def test_a_name_is_looked_up_on_a_thread_until_it_is_known_and_again_after_that(monkeypatch):
    may_answer, asked = threading.Event(), []
    answers: list[list[str] | None] = [None, [ADDRESS], ["10.0.0.2:1900"]]

    def look_up(settings: HostSettings) -> list[str]:
        asked.append(settings.gates)
        assert may_answer.wait(20)
        if (answer := answers.pop(0) if len(answers) > 1 else answers[0]) is None:
            raise StartError("it is not up yet")
        return answer

    monkeypatch.setattr(controller_seeker, "resolved_gates", look_up)
    monkeypatch.setattr(controller_seeker, "RESOLVE_EVERY_S", 0.001)

    async def found() -> None:
        loop: Any = SimpleNamespace(asyncio=asyncio.get_running_loop())
        gates = Gates(joining(BY_NAME), loop, must_not_wait=True)
        await until(lambda: gates.found() == [] and bool(asked))
        assert gates.found() == [], "the loop goes on meanwhile"
        may_answer.set()
        await until(lambda: gates.found() == [ADDRESS])
        await until(lambda: gates.found() == ["10.0.0.2:1900"])

    asyncio.run(asyncio.wait_for(found(), 20))


def test_addresses_need_no_thread(monkeypatch):
    async def found() -> list[str]:
        loop: Any = SimpleNamespace(asyncio=asyncio.get_running_loop())
        gates = Gates(joining(ADDRESS), loop, must_not_wait=True)
        monkeypatch.setattr(controller_seeker, "RESOLVE_EVERY_S", 0.0)
        monkeypatch.setattr(loop.asyncio, "run_in_executor", None)
        return gates.found()

    assert asyncio.run(found()) == [ADDRESS]
