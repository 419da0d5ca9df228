"""Who finds the controller by others' word goes by the epoch that the controller itself tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.actors.cluster import membership as membership_module
from greenroom.actors.messages import admin as am
from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime import asking
from greenroom.actors.runtime.machine import MACHINE
from greenroom.actors.runtime.port import CONTROLLER, Finder
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.operations import ListBackends

OLD, NEW = Process(1, 1, "old"), Process(2, 2, "new")
Identified = Callable[[Any, Process, int], None]


class Port:
    """A proxy knows ``known``; who is at an address, and of which epoch, is in ``there``."""

    gates = ("a gate",)

    def __init__(self) -> None:
        self.loop: Any = self
        self.machine = MACHINE
        self.known: tuple[str, Process, int] | None = None
        self.there: dict[str, tuple[Process, int]] = {}
        self.later: list[Callable[[], None]] = []

    def locate(self, _: str, name: str, on_located: Callable[[Any], None], _gate: Any) -> None:
        on_located(None if name == CONTROLLER[1] else "proxy")  # no admin makes one

    def ask_proxy(
        self, _proxy: str, _what: str, _arguments: tuple[()], on_value: Callable[[Any], None]
    ) -> None:
        on_value(self.known)

    def identify(self, address: str, on_identified: Identified) -> None:
        on_identified(address, *self.there[address])

    def watch_process(self, _process: Any, on_exit: Callable[[], None], _at: Any) -> Any:
        self.exited = on_exit
        return lambda: None

    def call_later(self, _: float, call: Callable[[], None]) -> None:
        self.later.append(call)


def finder_of(port: Any) -> tuple[Finder, list[tuple[Any, Process]]]:
    found: list[tuple[Any, Process]] = []
    made = Finder(port, CONTROLLER, lambda *each: found.append(each))
    made.start()
    return made, found


def test_a_proxy_that_knows_only_of_an_earlier_epoch_misleads_nobody() -> None:
    port = Port()
    port.known, port.there = ("at", NEW, 1), {"at": (NEW, 3)}
    finder, found = finder_of(port)
    assert (found, finder.epoch) == ([("at", NEW)], 3)


def test_who_doubts_goes_on_to_a_later_controller_and_never_to_an_earlier_one() -> None:
    port = Port()
    port.known, port.there = ("at", OLD, 2), {"at": (OLD, 2), "there": (NEW, 3)}
    finder, found = finder_of(port)
    finder.doubt()
    assert found == [("at", OLD)]
    port.known = ("there", NEW, 3)
    finder.doubt()
    assert (found[1:], finder.epoch) == ([("there", NEW)], 3)
    port.known = ("at", OLD, 2)
    finder.doubt()
    assert finder.found == ("there", NEW)


def test_a_host_that_joined_by_one_leader_asks_those_too_that_it_was_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership_module, "resolved_gates", lambda settings: settings.gates)
    asked: list[str] = []
    port: Any = Port()
    port.asyncio = SimpleNamespace(time=lambda: 0.0)
    port.locate = lambda _kind, _name, _told, gate: asked.append(gate.addressDetails.text)
    membership: Any = SimpleNamespace(hosts=(), lost_controller=lambda: None)
    given = {"bind": "10.0.0.3", "join": "10.0.0.1:1900"}
    finder = membership_module.find_controller(
        port, read_settings({}, **given), membership, lambda: None
    )
    membership.hosts = ("10.0.0.1:1900", "10.0.0.2:1900")  # as its controller has answered
    finder.start()
    while len(asked) < 3:
        port.later.pop()()
    assert {"10.0.0.1:1900", "10.0.0.2:1900"} <= set(asked)


class StoppedAndSucceeded(Port):
    """Whoever asks at one address gets no answer, for that controller is stopped."""

    process = Process(3, 3, "client")

    def __init__(self) -> None:
        super().__init__()
        self.replied: Any = None
        self.asked: list[str] = []

    def on(self, kind: type, handler: Callable[[Any, Any], None]) -> None:
        if kind is am.RequestReply:
            self.replied = handler

    def send(self, address: str, request: am.Request, *_ended: Callable[[], None]) -> None:
        if address == "there":
            self.replied(am.RequestReply(request_id=request.request_id, value="done"), address)


def request(port: Any, timeout_s: float, successor: Any = None) -> am.RequestReply:
    """Ask the controller that is found; its successor is there once it was."""

    async def is_there() -> bool:
        return True

    async def ask() -> am.RequestReply:
        requests = asking.ControllerRequests(port, is_there, 15.0, "it is gone")
        requests.start()
        port.known = successor or port.known
        return await requests.ask(am.request_of(ListBackends(), asking.new_id()), timeout_s)

    return asyncio.run(ask())


@pytest.fixture(autouse=True)
def _repeats_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(asking, "REPEAT_S", 0.01)


def test_a_client_whose_controller_is_stopped_goes_on_to_its_successor() -> None:
    port: Any = StoppedAndSucceeded()
    port.known, port.there = ("at", OLD, 2), {"at": (OLD, 2), "there": (NEW, 3)}
    assert request(port, 10.0, successor=("there", NEW, 3)).value == "done"


class CannotSave(StoppedAndSucceeded):
    """The controller of before takes no change, and says so when its successor is asked, too."""

    def send(self, address: str, request: am.Request, *_ended: Callable[[], None]) -> None:
        refusal = am.RequestReply(
            request_id=request.request_id,
            error_kind="StateNotSavedError",
            error="the disk is full. Nothing was changed",
        )
        self.asked.append(address)
        self.replied(refusal, "at")  # where its successor was asked: late, and asked before


def test_a_refusal_by_a_controller_that_has_been_succeeded_is_not_believed() -> None:
    port: Any = CannotSave()
    port.known, port.there = ("there", NEW, 3), {"there": (NEW, 3)}
    with pytest.raises(TimeoutError, match="it may have been carried out"):
        request(port, 0.05)
    assert "there" in port.asked


def test_nor_is_one_by_an_earlier_controller_that_is_found_again() -> None:
    class FoundAgain(CannotSave):
        def send(self, address: str, *request: Any) -> None:
            super().send(address, *request)
            if address == "there":
                self.known = ("at", OLD, 2)
                self.exited()

    port: Any = FoundAgain()
    port.known, port.there = ("there", NEW, 3), {"at": (OLD, 2), "there": (NEW, 3)}
    with pytest.raises(TimeoutError, match="it may have been carried out"):
        request(port, 0.2)
    assert port.asked[-1] == "at"


def test_a_refusal_by_the_present_controller_says_that_nothing_was_changed() -> None:
    port: Any = CannotSave()
    port.known, port.there = ("at", OLD, 2), {"at": (OLD, 2)}
    refusal = request(port, 10.0)
    assert refusal.error_kind == "StateNotSavedError"
    assert "Nothing was changed" in refusal.error


@pytest.mark.parametrize(
    ("outcome", "is_repeated"), [(None, False), ("sent", True), ("failed", True)]
)
def test_a_request_is_not_sent_again_while_it_is_still_on_its_way(
    outcome: str | None, is_repeated: bool
) -> None:
    class Slow(StoppedAndSucceeded):
        def send(self, address: str, request: am.Request, *ended: Callable[[], None]) -> None:
            self.asked.append(address)
            if outcome is not None:
                ended[outcome == "failed"]()

    port: Any = Slow()
    port.known, port.there = ("at", OLD, 2), {"at": (OLD, 2)}
    with pytest.raises(TimeoutError):
        request(port, 0.2)
    assert (len(port.asked) > 1) is is_repeated
