"""Processes that the host process keeps up: started again, later where one after the other dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.actors.host import front
from greenroom.actors.host.front import Front, Service
from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.records import records_of
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.errors import StartError
from tests.support import virtual_time


def service(kind: type[Service]) -> Service:
    settings = read_settings({})
    return kind(settings, records_of(settings))


def kept_up(monkeypatch: pytest.MonkeyPatch, outcomes: list[str]) -> None:
    """Keep a process up until ``outcomes`` are used up: how each start goes; in virtual time."""
    monkeypatch.setattr(front, "MAX_PAUSE_S", 4 * front.FIRST_PAUSE_S)
    now = lambda: asyncio.get_running_loop().time()  # noqa: E731
    monkeypatch.setattr(front, "time", SimpleNamespace(monotonic=now))
    over = asyncio.Event()

    class Part(Service):
        name, log = "part", "log"

        async def ensure(self) -> None:
            if not outcomes:
                over.set()
                await asyncio.Event().wait()
            if outcomes[0] == "no port":
                raise StartError(outcomes.pop(0))
            self.process = None if outcomes[0] == "gone" else Process(1, 1, "")
            if self.process is None:
                outcomes.pop(0)

    async def ended(_process: Process) -> None:
        if outcomes.pop(0) == "lives":
            await asyncio.sleep(1.1 * front.STABLE_S)

    async def keep() -> None:
        keeping = asyncio.ensure_future(service(Part).keep_up(ended))
        await asyncio.wait_for(over.wait(), 100)
        keeping.cancel()
        await asyncio.wait({keeping})

    virtual_time.run(keep())


def test_the_first_death_costs_no_time_and_later_ones_ever_more_up_to_a_limit(monkeypatch, caplog):
    kept_up(monkeypatch, ["dies", "dies", "gone", "no port", "dies", "lives", "dies"])
    pauses = [float(re.findall(r"in ([\d.]+) s$", each)[0]) for each in caplog.messages]
    assert pauses == [0.0, 0.2, 0.4, 0.8, 0.8, 0.0, 0.2]
    assert "the part cannot start: no port (failure 4 in a row, see log.log)" in caplog.text


def test_what_is_no_failure_to_start_is_not_hidden(monkeypatch):
    class Part(Service):
        async def ensure(self) -> None:
            raise ValueError("a bug")

    async def ended(_process: Process) -> None:
        """Nothing is started."""

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(service(Part).keep_up(ended))


def test_a_front_is_forked_at_the_start_alone_not_by_a_loop_that_runs(tmp_path, monkeypatch):
    """A child of the loop lost its listening socket when an object of the loop's was freed."""
    launched: list[bool] = []

    def launch(_entry: str, *, by_fork: bool, **_: Any) -> int:
        launched.append(by_fork)
        return os.getpid()

    monkeypatch.setattr(front.forking, "launch", launch)
    settings = read_settings({}, state_dir=str(tmp_path))

    async def ended(_process: Process) -> None:
        raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = Front(settings, records_of(settings))
        kept.listener = listener
        kept.start(by_fork=True)
        kept.process = None
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(kept.keep_up(ended))
    assert launched == [True, False]


def test_the_socket_of_a_front_that_was_found_is_held_for_when_all_of_it_ends(monkeypatch):
    found = service(Front)
    monkeypatch.setattr(Front, "workers", [1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(front, "borrow", lambda *_: listener)
        asyncio.run(found.take_over())
    assert found.listener is listener
