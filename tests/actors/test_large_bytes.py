"""Bodies that travel beside their message."""

from __future__ import annotations

import pickle

import pytest

from greenroom.actors.messages.queries import (
    LARGE,
    AnswerQueries,
    FailedAnswer,
    HttpAnswer,
    LargeAnswer,
    LargeBytes,
    ValueAnswer,
    arrived,
    beside,
    content_of,
    travelling,
)
from greenroom.actors.transport.envelopes import decode, encode

BODY = bytes(range(256)) * (LARGE // 256)


def owner(view):
    """Return the object whose memory a view shows."""
    while isinstance(view, memoryview):
        view = view.obj
    return view


def test_small_bytes_stay_in_the_message():
    assert beside(BODY[1:]) == BODY[1:]
    assert content_of(BODY) == BODY


def test_large_bytes_are_copied_into_no_pickle():
    buffers = encode(beside(BODY))
    assert len(buffers[0]) < 200
    assert owner(buffers[1]) is BODY
    assert content_of(decode(buffers)) == BODY


def test_who_passes_large_bytes_on_copies_them_neither():
    received = [encode(beside(BODY))[0], bytearray(BODY)]
    passed_on = encode(decode(received))
    assert owner(passed_on[1]) is received[1]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_large_bytes_travel_on_any_transport(protocol):
    again = pickle.loads(pickle.dumps(beside(BODY), protocol))
    assert isinstance(again, LargeBytes)
    assert len(again) == len(BODY)
    assert content_of(again) == BODY


@pytest.mark.parametrize(
    ("answer", "is_large"),
    [
        (HttpAnswer(1, 200, ((b"a", b"b"),), BODY), True),
        (HttpAnswer(1, 200, (), BODY[1:]), False),
        (ValueAnswer(2, BODY), True),
        (ValueAnswer(2, b"value"), False),
        (FailedAnswer(3, "UserCodeError", "why"), False),
    ],
)
def test_an_answer_arrives_as_it_was(answer, is_large):
    message = AnswerQueries(incarnation="caller", answers=(travelling(answer),))
    (sent,) = decode(encode(message)).answers
    assert isinstance(sent, LargeAnswer) == is_large
    assert arrived(sent) == answer
    assert type(arrived(sent)) is type(answer)
