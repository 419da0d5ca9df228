"""Large answers, which travel in parts with others in between, and large bytes in messages."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from hypothesis import given, strategies as st

from greenroom.actors.messages import queries as m
from greenroom.actors.messages.queries import (
    LARGE,
    PART,
    Pieces,
    content_of,
    in_parts,
    out_of_band,
    put_together,
)
from greenroom.actors.transport.mailbox import decode, encode
from tests.actors.one_process import OneProcess
from tests.support.queries import python_call

BODY = bytes(range(251)) * (5 * PART // 251)


@given(st.integers(0, len(BODY)), st.booleans())
def test_an_answer_that_was_cut_is_put_together(size, is_http):
    body = BODY[:size]
    answer = m.HttpAnswer(7, 201, ((b"a", b"b"),), body) if is_http else m.ValueAnswer(7, body)
    *parts, last = decode(encode(in_parts(answer, 1)))
    assert all(type(part) is m.AnswerPart and len(part.content) <= PART for part in parts)
    again: Any = put_together(last, [part.content for part in parts])
    if is_http:
        again = again._replace(body=bytes(again.body))
    assert again == answer


def test_an_answer_that_lacks_a_part_is_a_failure_that_says_so():
    *parts, last = in_parts(m.ValueAnswer(7, BODY), 1)
    failure = put_together(last, [part.content for part in parts[1:]])
    assert isinstance(failure, m.FailedAnswer)
    assert (failure.query_id, failure.kind) == (7, "ReplicaUnavailableError")
    assert "in full" in failure.text


def test_pieces_are_let_go_of_one_after_the_other():
    pieces = Pieces([memoryview(b"abc"), memoryview(b"de")])
    assert len(pieces) == 5
    assert [bytes(piece) for piece in pieces] == [b"abc", b"de"]
    assert not list(pieces)


# --- Bytes beside their message -----------------------------------------------------------------


def owner(view: Any) -> Any:
    """Return the object whose memory a view shows."""
    while isinstance(view, memoryview):
        view = view.obj
    return view


def test_large_bytes_are_copied_into_no_pickle_not_even_when_they_are_passed_on():
    body = BODY[:LARGE]
    buffers = encode(out_of_band(body))
    assert len(buffers[0]) < 200
    assert owner(buffers[1]) is body
    received = bytearray(body)
    passed_on = encode(decode([buffers[0], received]))
    assert owner(passed_on[1]) is received
    assert content_of(decode(passed_on)) == body


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_large_bytes_travel_on_any_transport(protocol):
    again = pickle.loads(pickle.dumps(out_of_band(BODY), protocol))
    assert content_of(again) == BODY
    assert out_of_band(b"small") == content_of(b"small") == b"small"


# --- Between a replica and its caller -------------------------------------------------------------


@pytest.fixture
def world(one_process):
    async def sized(size: int) -> bytes:
        return b"x" * size

    return one_process(sized, limit=10)


def ask(world: OneProcess, *sizes: int) -> list[tuple[int, Any]]:
    """Ask for values of these sizes at once; return number and answer, in order of arrival."""
    answers: list[tuple[int, Any]] = []

    async def one(number: int, size: int) -> None:
        answers.append((number, await world.answer(**python_call(size))))

    async def run() -> None:
        await asyncio.gather(*(one(number, size) for number, size in enumerate(sizes)))

    world.run(run())
    return answers


def test_small_answers_overtake_large_ones(world):
    answers = ask(world, 40 * PART, 30 * PART, 1, 100)
    assert {number for number, _ in answers[:2]} == {2, 3}
    sizes = {number: len(answer.value) for number, answer in answers}
    assert min(sizes[0] - 40 * PART, sizes[1] - 30 * PART) >= 0


@pytest.mark.parametrize("is_leased", [False, True])
def test_nothing_is_left_of_them(world, is_leased):
    """A replica that counted one as under way would take all its time to stop."""
    while is_leased and not world.caller.leases.held:
        ask(world, 1)
    ask(world, 10 * PART, LARGE, LARGE - 1)
    assert world.caller.is_idle
    assert world.queries.undelivered == 0
