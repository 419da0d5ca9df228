"""What a caller does with answers in parts that come late, twice, or from somebody else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from understudy.actors import messages as m
from understudy.actors.dispatch import Caller
from understudy.actors.streams import Stream

HERE = m.Process(1, 1, "here")
FIRST, SECOND = m.Process(2, 2, "first"), m.Process(3, 3, "second")


class _Loop:
    """Keeps what is sent; turns end at once."""

    deliveries_at_once = 256

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Any]] = []

    def send(self, target: Any, message: Any, *_outcome: Any) -> None:
        self.sent.append((target, message))

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        callback()

    def call_later(self, _delay_s: float, _callback: Callable[[], None]) -> Any:
        return SimpleNamespace(cancel=lambda: None)

    def stopped(self) -> list[tuple[Any, int]]:
        """Return who was told to end which answer."""
        return [
            (to, query)
            for to, message in self.sent
            if isinstance(message, m.ControlStreams)
            for query in message.stopped
        ]


def asked() -> tuple[Caller, _Loop, list[Any]]:
    """Return a caller with a query under way, its loop, and what answers it gets."""
    loop, answers = _Loop(), []
    caller = Caller(loop, HERE)  # type: ignore[arg-type]
    caller.met_proxy("proxy", m.Process(9, 9, "proxy"))
    query = m.Query(
        id=1,
        endpoint="e",
        path="/",
        http_method="GET",
        call_method="",
        call=b"",
        request_id="r",
        timeout_s=None,
        retryable=True,
        shard_key=None,
    )
    caller.submit(query, answers.append)
    return caller, loop, answers


def tell(caller: Caller, sender: str, *items: Any) -> None:
    caller.answered(m.AnswerQueries(incarnation="here", answers=items), sender)


def begun(by: m.Process) -> m.StreamBegun:
    return m.StreamBegun(1, 200, (), by)


def test_a_replica_that_begins_an_answer_which_nobody_waits_for_is_told_to_end_it() -> None:
    caller, loop, answers = asked()
    tell(caller, "second", m.ValueAnswer(1, b""))  # a new proxy had it run there
    tell(caller, "first", begun(FIRST), m.StreamPart(1, b"part"))
    assert [type(each) for each in answers] == [m.ValueAnswer]
    assert loop.stopped() == [("first", 1)]


def test_of_two_replicas_that_begin_the_same_answer_both_are_told_to_end_it() -> None:
    caller, loop, answers = asked()
    tell(caller, "first", begun(FIRST))
    tell(caller, "second", begun(SECOND))
    assert [type(each) for each in answers] == [Stream]
    assert sorted(loop.stopped()) == [("first", 1), ("second", 1)]


def test_an_answer_of_another_replica_ends_the_one_that_had_begun() -> None:
    caller, loop, _ = asked()
    tell(caller, "first", begun(FIRST))
    tell(caller, "second", m.ValueAnswer(1, b""))
    assert loop.stopped() == [("first", 1)]


def test_an_answer_that_comes_to_its_end_costs_no_further_message() -> None:
    caller, loop, _ = asked()
    tell(caller, "first", begun(FIRST), m.StreamPart(1, b"part"), m.StreamEnded(1, 200))
    assert loop.stopped() == []
