"""Answers on their way to where they are compared: when they are sent, and when not."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.actors.messages.queries import CompareAnswers, ComparedAnswer, HttpAnswer
from greenroom.actors.replica import comparisons as answer_copies
from greenroom.actors.replica.comparisons import (
    AT_ONCE,
    MAX_GATHERED_BYTES,
    TOO_LARGE,
    TOO_MANY,
    UNPLACED_S,
    WAIT_S,
    ResponseSampler,
)
from tests.support.lone_loop import LoneLoop

HERE = pickle.dumps(("here", "address"))
PLACE = (7, HERE, b"")


class Replica:
    """The copies of one replica, on a clock of the test's own; what is sent arrives in ``sent``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = LoneLoop()
        self.pass_time = loop.pass_time
        self.busy = False
        self.sent: list[list[ComparedAnswer]] = []
        monkeypatch.setattr(answer_copies, "time", SimpleNamespace(monotonic=loop.asyncio.time))
        here: Any = SimpleNamespace(arrived=self._arrived)
        self.copies = ResponseSampler(loop, "here", "b", lambda: self.busy, here)

    def _arrived(self, message: CompareAnswers, _sender: object) -> None:
        self.sent.append([ComparedAnswer._make(each) for each in message.answers])

    def answered(self, ticket: int, body: bytes = b"{}", compare: Any = (PLACE,)) -> None:
        run: Any = SimpleNamespace(
            ticket=ticket,
            endpoint="e",
            query=SimpleNamespace(request_id=str(ticket)),
            compare=compare,
        )
        self.copies.add("proxy", run, HttpAnswer(ticket, 200, (), body))


@pytest.fixture
def replica(monkeypatch):
    return Replica(monkeypatch)


def test_answers_are_sent_together_while_no_query_runs(replica):
    replica.answered(1)
    replica.busy = True
    replica.answered(2)
    replica.pass_time(WAIT_S / 2)
    assert replica.sent == []
    replica.busy = False
    replica.pass_time(WAIT_S / 4)
    ((first, second),) = replica.sent
    assert (first.request_id, second.request_id) == ("1", "2")
    assert (first.number, first.backend, first.body) == (7, "b", b"{}")


def test_where_a_query_always_runs_answers_are_sent_all_the_same(replica):
    replica.busy = True
    replica.answered(1)
    replica.pass_time(WAIT_S + 1.0)
    assert len(replica.sent) == 1


def test_many_are_sent_a_few_at_a_time(replica):
    for number in range(2 * AT_ONCE + 1):
        replica.answered(number)
    replica.pass_time(1.0)
    assert [len(each) for each in replica.sent] == [AT_ONCE, AT_ONCE, 1]


def test_the_place_may_be_known_before_the_answer_is_there_or_after(replica):
    replica.copies.meet(("proxy", 1), (PLACE,), has_answer=False)
    replica.answered(1, compare=None)
    replica.answered(2, compare=None)
    replica.copies.meet(("proxy", 2), (PLACE,), has_answer=True)
    replica.answered(3, compare=None)
    replica.copies.meet(("proxy", 3), (), has_answer=True)  # its copy was dropped
    replica.copies.meet(("proxy", 4), (PLACE,), has_answer=False)
    replica.copies.forget(("proxy", 4))  # it was given back
    replica.pass_time(1.0)
    assert [each.request_id for sent in replica.sent for each in sent] == ["1", "2"]
    assert replica.copies.is_empty


def test_answers_whose_router_has_died_are_forgotten(replica):
    replica.answered(1, compare=None)
    replica.pass_time(UNPLACED_S / 2)
    replica.answered(2, compare=None)
    replica.pass_time(3 * UNPLACED_S)
    assert replica.sent == []
    assert replica.copies.is_empty


def test_what_is_kept_is_bounded_and_what_is_dropped_is_reported(replica):
    part = bytes(200 * 1024)
    kept = MAX_GATHERED_BYTES // len(part)
    for number in range(kept + 1):
        replica.answered(number, part)
    replica.answered(1000, bytes(300 * 1024))
    replica.pass_time(2.0)
    found = [each.missing for sent in replica.sent for each in sent]
    assert found == [""] * kept + [TOO_MANY, TOO_LARGE]
    assert replica.copies.is_empty
