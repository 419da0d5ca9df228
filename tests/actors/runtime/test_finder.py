"""Who finds the controller by others' word goes by the epoch that the controller itself tells."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thespian.system.messages.admin import PendingActor, PendingActorResponse

from greenroom.actors.cluster import membership as membership_module
from greenroom.actors.cluster.membership import Membership
from greenroom.actors.messages import admin as am
from greenroom.actors.messages.control import Identify, IdentifyReply
from greenroom.actors.messages.queries import AskProxy, AskProxyReply, Process
from greenroom.actors.runtime import asking, port as port_module
from greenroom.actors.runtime.loop import nothing
from greenroom.actors.runtime.machine import Machine
from greenroom.actors.runtime.port import CONTROLLER, PROXY, Finder, Port
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import read_settings
from greenroom.actors.transport.descriptors import close_loop
from greenroom.core.operations import ListBackends

OLD, NEW = Process(1, 1, "old"), Process(2, 2, "new")


class System:
    """A proxy knows ``known``; who is at an address, and of which epoch, is in ``there``."""

    deliveries_at_once = 1
    address = "here"
    admin_address = "a gate"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.known: tuple[str, Process, int] | None = None
        self.there: dict[str, tuple[Process, int]] = {}
        self.located: list[str] = []
        self.asked: list[str] = []
        self.ended: list[Callable[[bool], None]] = []
        self.arrived: Callable[[Any], None]

    def send(self, target: Any, message: Any, on_sent: Any, on_failed: Any) -> None:
        if isinstance(message, PendingActor):
            self.located.append(str(target))
            found = "proxy" if message.globalName == PROXY[1] else None  # no admin makes one
            answer = PendingActorResponse(None, message.instanceNum, message.globalName, not found)
            answer.actualAddress = found
            self.answer(answer, target, on_sent)
        elif isinstance(message, AskProxy):
            reply = AskProxyReply(request_id=message.request_id, value=self.known)
            self.answer(reply, target, on_sent)
        elif isinstance(message, Identify):
            process, epoch = self.there[target]
            reply = IdentifyReply(
                request_id=message.request_id, process=process, title="", epoch=epoch
            )
            self.answer(reply, target, on_sent)
        else:
            self.request(target, message, on_sent, on_failed)

    def request(self, target: str, request: am.Request, on_sent: Any, on_failed: Any) -> None:
        """Take a request; whoever asks at one address gets no answer, for that is stopped."""
        del on_failed
        if target == "there":
            self.answer(am.RequestReply(request_id=request.request_id, value="done"), target)
        on_sent()

    def answer(self, message: Any, sender: Any, on_sent: Callable[[], None] | None = None) -> None:
        (on_sent or nothing)()
        self.arrived(SimpleNamespace(message=message, sender=sender))

    def watch_remote(self, _target: Any, on_lost: Callable[[bool], None]) -> Callable[[], None]:
        self.ended.append(on_lost)
        return nothing

    def close(self) -> None:
        """There is nothing to close."""


class FakeMachine(Machine):
    def __init__(self, system: Any) -> None:
        self._system = system

    def attach(self, _port: int, _loop: Any, arrived: Callable[[Any], None], _way: Any) -> Any:
        self._system.arrived = arrived
        return self._system


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    close_loop(made)


def port_to(system: System) -> Port:
    return Port(1900, this_process(), system.loop, machine=FakeMachine(system))


def go_on(loop: asyncio.AbstractEventLoop, times: int = 20) -> None:
    """Let what can be done now be done."""

    async def pass_turns() -> None:
        for _ in range(times):
            await asyncio.sleep(0)

    loop.run_until_complete(pass_turns())


def finder_of(system: System) -> tuple[Finder, list[tuple[Any, Process]]]:
    found: list[tuple[Any, Process]] = []
    made = Finder(port_to(system), CONTROLLER, lambda *each: found.append(each))
    made.start()
    go_on(system.loop)
    return made, found


def test_a_proxy_that_knows_only_of_an_earlier_epoch_misleads_nobody(
    loop: asyncio.AbstractEventLoop,
) -> None:
    system = System(loop)
    system.known, system.there = ("at", NEW, 1), {"at": (NEW, 3)}
    finder, found = finder_of(system)
    assert (found, finder.epoch) == ([("at", NEW)], 3)


def test_who_doubts_goes_on_to_a_later_controller_and_never_to_an_earlier_one(
    loop: asyncio.AbstractEventLoop,
) -> None:
    system = System(loop)
    system.known, system.there = ("at", OLD, 2), {"at": (OLD, 2), "there": (NEW, 3)}
    finder, found = finder_of(system)
    finder.doubt()
    go_on(loop)
    assert found == [("at", OLD)]
    system.known = ("there", NEW, 3)
    finder.doubt()
    go_on(loop)
    assert (found[1:], finder.epoch) == ([("there", NEW)], 3)
    system.known = ("at", OLD, 2)
    finder.doubt()
    go_on(loop)
    assert finder.found == ("there", NEW)


def test_a_host_that_joined_by_one_leader_asks_those_too_that_it_was_told_of(
    monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    monkeypatch.setattr(membership_module, "resolved_gates", lambda settings: settings.gates)
    monkeypatch.setattr(port_module, "FIND_RETRY_S", 0.001)
    system = System(loop)
    given = {"bind": "10.0.0.3", "join": "10.0.0.1:1900", "state_dir": str(tmp_path)}
    process, records = Process(1, 1, secrets.token_hex(8)), RunRecords(tmp_path)
    membership = Membership(
        read_settings({}, **given), process, records, port_to(system), dict, nothing
    )
    membership.hosts = ("10.0.0.1:1900", "10.0.0.2:1900")  # as its controller has answered
    membership.controller.start()

    async def all_are_asked() -> None:
        while not any("10.0.0.2" in each for each in system.located):
            await asyncio.sleep(0.001)

    loop.run_until_complete(asyncio.wait_for(all_are_asked(), 20))
    membership.controller.stop()
    assert any("10.0.0.1" in each for each in system.located)


@pytest.mark.parametrize("silent", ["admin", "proxy", "controller"])
def test_where_no_answer_comes_one_search_is_under_way_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop, silent: str
) -> None:
    class Silent(System):
        def send(self, target: Any, message: Any, on_sent: Any, on_failed: Any) -> None:
            kinds = {PendingActor: "admin", AskProxy: "proxy", Identify: "controller"}
            if kinds[type(message)] != silent:
                return super().send(target, message, on_sent, on_failed)
            self.asked.append(getattr(message, "request_id", None) or message.instanceNum)
            return (on_sent or nothing)()

    monkeypatch.setattr(port_module, "FIND_RETRY_S", 0.001)
    system = Silent(loop)
    system.known = ("at", OLD, 2)
    finder, found = finder_of(system)

    async def is_repeated() -> None:
        while len(system.asked) < 20:
            finder.doubt()
            await asyncio.sleep(0.001)

    loop.run_until_complete(asyncio.wait_for(is_repeated(), 20))
    finder.stop()
    searches = 2 if silent == "admin" else 1  # for the controller, and for the proxy that knows it
    assert (len(set(system.asked)), found) == (searches, [])


def request(system: System, timeout_s: float, successor: Any = None) -> am.RequestReply:
    """Ask the controller that is found; its successor is there once it was."""

    async def is_there() -> bool:
        return True

    async def ask() -> am.RequestReply:
        requests = asking.Controller(port_to(system), is_there, 15.0, "it is gone")
        requests.start()
        while requests.found is None:
            await asyncio.sleep(0)
        system.known = successor or system.known
        return await requests.ask(am.request_of(ListBackends(), asking.new_id()), timeout_s)

    return system.loop.run_until_complete(ask())


@pytest.fixture(autouse=True)
def _repeats_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(port_module, "REPEAT_S", 0.01)


def test_a_client_whose_controller_is_stopped_goes_on_to_its_successor(
    loop: asyncio.AbstractEventLoop,
) -> None:
    system = System(loop)
    system.known, system.there = ("at", OLD, 2), {"at": (OLD, 2), "there": (NEW, 3)}
    assert request(system, 10.0, successor=("there", NEW, 3)).value == "done"


class CannotSave(System):
    """The controller of before takes no change, and says so when its successor is asked, too."""

    def request(self, target: str, request: am.Request, on_sent: Any, on_failed: Any) -> None:
        del on_failed
        refusal = am.RequestReply(
            request_id=request.request_id,
            error_kind="StateNotSavedError",
            error="the disk is full. Nothing was changed",
        )
        self.asked.append(target)
        self.answer(refusal, "at", on_sent)  # late, where its successor was asked, and asked before


def test_a_refusal_by_a_controller_that_has_been_succeeded_is_not_believed(
    loop: asyncio.AbstractEventLoop,
) -> None:
    system = CannotSave(loop)
    system.known, system.there = ("there", NEW, 3), {"there": (NEW, 3)}
    with pytest.raises(TimeoutError, match="it may have been carried out"):
        request(system, 0.05)
    assert "there" in system.asked


def test_nor_is_one_by_an_earlier_controller_that_is_found_again(
    loop: asyncio.AbstractEventLoop,
) -> None:
    class FoundAgain(CannotSave):
        def request(self, target: str, *request: Any) -> None:
            super().request(target, *request)
            if target == "there":
                self.known = ("at", OLD, 2)
                self.loop.call_soon(self.ended[-1], True)

    system = FoundAgain(loop)
    system.known, system.there = ("there", NEW, 3), {"at": (OLD, 2), "there": (NEW, 3)}
    with pytest.raises(TimeoutError, match="it may have been carried out"):
        request(system, 0.2)
    assert system.asked[-1] == "at"


def test_a_refusal_by_the_present_controller_says_that_nothing_was_changed(
    loop: asyncio.AbstractEventLoop,
) -> None:
    system = CannotSave(loop)
    system.known, system.there = ("at", OLD, 2), {"at": (OLD, 2)}
    refusal = request(system, 10.0)
    assert refusal.error_kind == "StateNotSavedError"
    assert "Nothing was changed" in refusal.error


@pytest.mark.parametrize(
    ("outcome", "is_repeated"), [(None, False), ("sent", True), ("failed", True)]
)
def test_a_request_is_not_sent_again_while_it_is_still_on_its_way(
    loop: asyncio.AbstractEventLoop, outcome: str | None, is_repeated: bool
) -> None:
    class Slow(System):
        def request(self, target: str, request: am.Request, *ended: Any) -> None:
            self.asked.append(target)
            if outcome is not None:
                ended[outcome == "failed"]()

    system = Slow(loop)
    system.known, system.there = ("at", OLD, 2), {"at": (OLD, 2)}
    with pytest.raises(TimeoutError):
        request(system, 0.2)
    assert (len(system.asked) > 1) is is_repeated
