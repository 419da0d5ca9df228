"""Who finds the controller by others' word goes by the epoch that the controller itself tells."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from thespian.system.messages.admin import PendingActor, PendingActorResponse

from greenroom.actors.cluster import controller_seeker
from greenroom.actors.cluster.controller_seeker import ControllerSeeker
from greenroom.actors.messages import admin as am
from greenroom.actors.messages.control import Identify, IdentifyReply
from greenroom.actors.messages.queries import AskProxy, AskProxyReply, Process
from greenroom.actors.runtime.loop import nothing
from greenroom.actors.runtime.port import (
    BUSY_S,
    CONTROLLER,
    DOUBTED_S,
    FIND_RETRY_S,
    PROXY,
    Controller,
    Finder,
    new_id,
)
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.operations import ListBackends
from tests.support.lone_loop import LonePort, Sent

OLD, NEW = Process(1, 1, "old"), Process(2, 2, "new")


class System:
    """A proxy knows ``known``; who is at an address, and of which epoch, is in ``there``."""

    def __init__(
        self, known: tuple[str, Process, int] | None = None, **there: tuple[Process, int]
    ) -> None:
        self.port = LonePort()
        self.loop = self.port.lone
        self.outside = self.loop.outside
        self.outside.takes, self.outside.is_remote = self.takes, True
        self.known, self.there = known, there
        self.own: str | None = None  # the controller that the admin gives; no admin makes one
        self.located: list[str] = []
        self.asked: list[str] = []

    def takes(self, sent: Sent) -> None:
        message: Any = sent.message
        if isinstance(message, PendingActor):
            self.located.append(str(sent.target))
            found = "proxy" if message.globalName == PROXY[1] else self.own
            answer = PendingActorResponse(None, message.instanceNum, message.globalName, not found)
            answer.actualAddress = found
            self.answer(sent, answer)
        elif isinstance(message, AskProxy):
            self.answer(sent, AskProxyReply(request_id=message.request_id, value=self.known))
        elif isinstance(message, Identify):
            process, epoch = self.there[sent.target]
            reply = IdentifyReply(
                request_id=message.request_id, process=process, title="", epoch=epoch
            )
            self.answer(sent, reply)
        else:
            self.request(sent)

    def request(self, sent: Sent) -> None:
        """Take a request; whoever asks at one address gets no answer, for that is stopped."""
        if sent.target == "there":
            self.answer(sent, am.RequestReply(request_id=sent.message.request_id, value="done"))
        sent.arrived()

    def answer(self, sent: Sent, message: Any, sender: Any = None) -> None:
        sent.arrived()
        self.loop.arrive(message, sender or sent.target)

    def finder(self, after: int = 0) -> tuple[Finder, list[tuple[Any, Process]]]:
        """Return one that has begun, and what it has found."""
        found: list[tuple[Any, Process]] = []
        made = Finder(self.port, CONTROLLER, lambda *each: found.append(each), after=after)
        self.loop.asyncio.call_soon(made.start)
        self.loop.pass_time(0.01)
        return made, found

    def doubt(self, finder: Finder) -> None:
        self.loop.asyncio.call_soon(finder.doubt)
        self.loop.pass_time(0.01)


def test_a_proxy_that_knows_only_of_an_earlier_epoch_misleads_nobody():
    finder, found = System(("at", NEW, 1), at=(NEW, 3)).finder()
    assert (found, finder.epoch) == ([("at", NEW)], 3)


def test_who_doubts_goes_on_to_a_later_controller_and_never_to_an_earlier_one():
    system = System(("at", OLD, 2), at=(OLD, 2), there=(NEW, 3))
    finder, found = system.finder()
    system.doubt(finder)
    assert found == [("at", OLD)]
    system.known = ("there", NEW, 3)
    system.doubt(finder)
    assert (found[1:], finder.epoch) == ([("there", NEW)], 3)
    system.known = ("at", OLD, 2)
    system.doubt(finder)
    assert finder.found == ("there", NEW)


def test_a_leader_that_goes_on_is_found_anew_and_none_of_an_epoch_before_elsewhere():
    system = System(("there", NEW, 2), at=(OLD, 3), there=(NEW, 2))
    finder, found = system.finder(after=3)
    system.doubt(finder)
    assert found == []
    system.own = "at"
    system.loop.pass_time(FIND_RETRY_S + 0.1)
    assert found == [("at", OLD)]
    finder.stop()


def test_a_host_that_joined_by_one_leader_asks_those_too_that_it_has_heard_of(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(controller_seeker, "resolved_gates", lambda settings: settings.gates)
    system = System()
    given = {"bind": "10.0.0.3", "join": "10.0.0.1:1900", "state_dir": str(tmp_path)}
    settings = read_settings({}, **given)
    seeker = ControllerSeeker(system.port, settings, nothing)
    seeker.hosts = ("10.0.0.1:1900", "10.0.0.2:1900")  # as its controller has answered
    system.loop.asyncio.call_soon(seeker.start)
    system.loop.pass_time(4 * FIND_RETRY_S)
    seeker.stop()
    for gate in seeker.hosts:
        assert any(gate in each for each in system.located)


@pytest.mark.parametrize("silent", ["admin", "proxy", "controller"])
def test_where_no_answer_comes_one_search_is_under_way_however_long_that_takes(silent):
    class Silent(System):
        def takes(self, sent: Sent) -> None:
            message: Any = sent.message
            kinds = {PendingActor: "admin", AskProxy: "proxy", Identify: "controller"}
            if kinds[type(message)] != silent:
                super().takes(sent)
            else:
                self.asked.append(getattr(message, "request_id", None) or message.instanceNum)
                sent.arrived()

    system = Silent(("at", OLD, 2))
    finder, found = system.finder()
    for _ in range(int(BUSY_S) - 1):
        system.doubt(finder)
        system.loop.pass_time(1.0 - 0.02)
    finder.stop()
    assert len(system.asked) > 8, "it is repeated"
    searches = 2 if silent == "admin" else 1  # for the controller, and for the proxy that knows it
    assert (len(set(system.asked)), found) == (searches, [])


def request(
    system: System, timeout_s: float | None = 9.0, successor: Any = None
) -> am.RequestReply:
    """Ask the controller that is found; its successor is there once it was."""

    async def is_there() -> bool:
        return True

    requests = Controller(system.port, is_there, 15.0, "it is gone")
    system.loop.asyncio.call_soon(requests.start)
    system.loop.pass_time(0.01)
    assert requests.found is not None
    system.known = successor or system.known
    asked = requests.ask(am.request_of(ListBackends(), new_id()), timeout_s)
    return system.loop.asyncio.run_until_complete(asyncio.wait_for(asked, 10 * DOUBTED_S))


def test_a_client_whose_controller_is_stopped_goes_on_to_its_successor():
    system = System(("at", OLD, 2), at=(OLD, 2), there=(NEW, 3))
    assert request(system, successor=("there", NEW, 3)).value == "done"


class CannotSave(System):
    """The controller of before takes no change, and says so when its successor is asked, too."""

    def request(self, sent: Sent) -> None:
        refusal = am.RequestReply(
            request_id=sent.message.request_id,
            error_kind="StateNotSavedError",
            error="the disk is full. Nothing was changed",
        )
        self.asked.append(sent.target)
        self.answer(sent, refusal, "at")  # late, where its successor was asked, and asked before


class FoundAgain(CannotSave):
    """The later controller is lost once it is asked, and the earlier one is found again."""

    def request(self, sent: Sent) -> None:
        super().request(sent)
        if sent.target == "there":
            self.known = ("at", OLD, 2)
            self.loop.asyncio.call_soon(self.outside.watching[-1], True)


@pytest.mark.parametrize(
    ("kind", "last"), [(CannotSave, "there"), (FoundAgain, "at")], ids=["late", "found again"]
)
def test_a_refusal_by_a_controller_that_has_been_succeeded_is_not_believed(kind, last):
    system = kind(("there", NEW, 3), at=(OLD, 2), there=(NEW, 3))
    with pytest.raises(TimeoutError, match="it may have been carried out"):
        request(system)
    assert "there" in system.asked
    assert system.asked[-1] == last


def test_a_refusal_by_one_that_may_not_know_is_told_of_where_no_other_can_use_the_store():
    system = FoundAgain(("there", NEW, 3), at=(OLD, 0), there=(NEW, 3))
    begun_at = system.loop.asyncio.time()
    with pytest.raises(TimeoutError, match=r"may have been carried out, .* says: the disk is full"):
        request(system, timeout_s=None)
    assert system.loop.asyncio.time() - begun_at < DOUBTED_S + 2.0


class BackInTime(FoundAgain):
    """One that can use the store comes in time, and takes long for its answer."""

    back = "there", Process(3, 3, "back"), 4

    def request(self, sent: Sent) -> None:
        if self.known != self.back:
            super().request(sent)
        elif sent.target == "there":
            self.loop.asyncio.call_later(3 * DOUBTED_S, System.request, self, sent)


def test_a_controller_that_can_use_the_store_is_waited_for_however_long_it_takes():
    system = BackInTime(("there", NEW, 3), at=(OLD, 0), there=(NEW, 3))

    def come_back() -> None:
        system.known, system.there["there"] = system.back, system.back[1:]

    system.loop.asyncio.call_later(DOUBTED_S - 2.0, come_back)
    assert request(system, timeout_s=None).value == "done"


def test_a_refusal_by_the_present_controller_says_that_nothing_was_changed():
    refusal = request(CannotSave(("at", OLD, 2), at=(OLD, 2)))
    assert refusal.error_kind == "StateNotSavedError"
    assert "Nothing was changed" in refusal.error


@pytest.mark.parametrize(
    ("outcome", "is_repeated"), [(None, False), ("arrived", True), ("failed", True)]
)
def test_a_request_is_not_sent_again_while_it_is_still_on_its_way(outcome, is_repeated):
    class Slow(System):
        def request(self, sent: Sent) -> None:
            self.asked.append(sent.target)
            if outcome is not None:
                getattr(sent, outcome)()

    system = Slow(("at", OLD, 2), at=(OLD, 2))
    with pytest.raises(TimeoutError):
        request(system)
    assert (len(system.asked) > 1) is is_repeated
