"""What becomes of a turn that fails: one place decides; in process, and with real actors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from thespian.actors import ActorExitRequest

from greenroom import serve
from greenroom.actors.messages import control as cm, queries as m
from greenroom.actors.runtime import actor as base_module
from greenroom.actors.runtime.actor import (
    ANSWER_S,
    FIRST_S,
    MOST_S,
    STABLE_S,
    UNASKED_S,
    UNKNOWN_S,
    CrashLoop,
    LoopActor,
)
from greenroom.actors.runtime.machine import Machine
from greenroom.actors.runtime.port import CONTROLLER, PROXY
from greenroom.actors.runtime.settings import read_settings
from tests.actors.by_hand import Hand
from tests.actors.conftest import deploy
from tests.support.lone_loop import LoneTransport
from tests.support.systems import alive, wait_until


class Ends(SystemExit):
    """What os._exit does here."""


class Asked:
    pass


class Actor(LoopActor):
    """Fails on each message, in the way that the test says."""

    role = "failing"

    def started(self) -> None:
        self.taken: list[Any] = []
        self.is_whole = False

    def receiveMsg_Asked(self, message: Any, sender: Any) -> None:
        self.taken.append(message)
        raise LookupError("half is done")

    def survives(self, message: Any, sender: Any, error: Exception) -> bool:
        return self.is_whole

    def owed(self, message: Any, sender: Any, error: Exception) -> Iterable[Any]:
        return [(sender, f"sorry: {error}")] if sender is not None else []


@pytest.fixture
def exits(monkeypatch):
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Ends

    monkeypatch.setattr(os, "_exit", leave)
    return codes


@pytest.fixture
def make(monkeypatch, tmp_path, exits):
    monkeypatch.setenv("GREENROOM_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(base_module, "be_as_usual", lambda: None)
    machine = Machine()
    machine.configure_logging = lambda *_: None  # type: ignore[method-assign]
    read_settings().run_dir.mkdir(parents=True)
    made: list[LoneTransport] = []

    def make(kind: Any = Actor) -> tuple[Any, LoneTransport]:
        actor, transport = kind(), LoneTransport()
        made.append(transport)
        actor.machine = machine
        actor._myRef = SimpleNamespace(
            transport=SimpleNamespace(mailbox=transport), address="itself"
        )
        return actor, transport

    yield make
    for transport in made:
        transport.loop.close()


def ends_after(transport: LoneTransport) -> float:
    """Return after how long an actor's process ends."""
    loop, begun_at = transport.loop, transport.loop.time()
    with pytest.raises(Ends):
        loop.run_forever()
    return loop.time() - begun_at


def test_it_answers_who_waits_and_ends_and_does_nothing_more(make, exits):
    actor, transport = make()
    actor.receiveMessage(Asked(), "somebody")
    assert [each[:2] for each in transport.sent] == [("somebody", "sorry: half is done")]
    actor.receiveMessage(Asked(), "another")
    actor.loop.guarded(lambda: actor.taken.append("a timer"))
    assert len(actor.taken) == len(transport.sent) == 1
    assert ends_after(transport) == pytest.approx(ANSWER_S)
    assert exits == [1]


def test_what_a_timer_raises_ends_it_as_well(make):
    actor, transport = make()
    actor.receiveMessage(ActorStarts(), "somebody")
    actor.loop.guarded(lambda: 1 / 0)
    assert ends_after(transport) == 0.0


class ActorStarts:
    """A message that nobody knows."""


def test_a_message_that_has_changed_nothing_ends_nothing(make, exits):
    actor, transport = make()
    actor.receiveMessage(ActorStarts(), "somebody")
    actor.is_whole = True
    for _ in range(3):
        actor.receiveMessage(Asked(), "somebody")
    assert len(actor.taken) == 3
    transport.loop.run_until_complete(asyncio.sleep(2 * MOST_S))
    assert exits == []


def test_one_process_after_the_other_that_fails_keeps_the_name_for_longer(make):
    pauses = []
    for _ in range(12):
        actor, transport = make()
        actor.receiveMessage(Asked(), None)
        pauses.append(ends_after(transport))
    expected = [0.0, FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert pauses[:5] == pytest.approx(expected)
    assert pauses[-1] == pytest.approx(MOST_S)


def test_one_that_cannot_even_begin_waits_too(make):
    class Unable(Actor):
        def started(self) -> None:
            raise RuntimeError("a record that cannot be read")

    pauses = []
    for _ in range(3):
        actor, transport = make(Unable)
        actor.receiveMessage(Asked(), "somebody")
        pauses.append(ends_after(transport))
        assert transport.sent == []
    assert pauses == pytest.approx([0.0, FIRST_S, 2 * FIRST_S])


def test_while_it_waits_it_goes_when_the_system_ends(make):
    actor, _ = make()
    actor.receiveMessage(Asked(), "somebody")
    with pytest.raises(Ends):
        actor.receiveMessage(ActorExitRequest(), "the admin")


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_replica_that_never_gets_its_tag_ends(make, exits, is_asked):
    class Replica(Actor):
        ends_unasked = True

    actor, _ = make(Replica)
    due: list[tuple[float, Callable[[], None]]] = []
    actor.created(SimpleNamespace(call_later=lambda *each: due.append(each)))
    ((after_s, end),) = due
    if is_asked:
        actor.receiveMessage(ActorStarts(), "somebody")
        end()
    else:
        with pytest.raises(Ends):
            end()
    assert (after_s, exits) == (UNASKED_S, [] if is_asked else [1])


def test_failures_in_a_row_are_counted_as_far_as_they_can_be(tmp_path):
    failures = CrashLoop(tmp_path, "failing")
    assert [failures.failed(1.0) for _ in range(3)] == [0.0, FIRST_S, 2 * FIRST_S]
    assert failures.failed(STABLE_S + 1) == 0.0, "it lived for long"
    assert failures.failed(1.0) == FIRST_S
    (tmp_path / "failing.failures").write_text("\x00")
    assert failures.failed(1.0) == 0.0, "the count is torn"
    assert CrashLoop(tmp_path / "not there", "failing").failed(1.0) == UNKNOWN_S


@pytest.mark.slow
def test_actors_that_fail_are_replaced_and_no_request_is_lost(own_system):
    deploy(own_system, serve.deployment(Hello).bind(), "hello")
    hand = Hand(own_system.settings.admin_port)
    try:
        for kind, broken in (
            (CONTROLLER, cm.TalliesReported(proxy=None, tallies=None)),  # type: ignore[arg-type]
            (PROXY, m.AttachCaller(process=None)),  # type: ignore[arg-type]
        ):
            for _ in range(2):
                address = hand.locate(*kind)
                before, _ = hand.identify(address)
                hand.send(address, broken)
                wait_until(lambda process=before: not alive(process.pid), 10, "it ends")
                assert own_system.get("/hello") == (200, b"hello")
        wait_until(lambda: not own_system.greenroom("status").returncode, 20, "all is healthy")
        log = (own_system.settings.logs_dir / "controller.log").read_text()
        assert "Controller failed on TalliesReported" in log
        assert "the next controller begins in 0.1 s" in log
    finally:
        hand.close()


class Hello:
    def __call__(self) -> str:
        return "hello"
