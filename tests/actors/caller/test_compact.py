"""Messages of queries as plain tuples, and back."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from greenroom.actors.messages import queries as m
from greenroom.actors.messages.queries import AnswerPart, LargeBytes
from greenroom.actors.transport.mailbox import decode, encode
from tests.support.queries import query

PROCESS = m.Process(1, 2, "incarnation")
COMPARE = (5, b"a place", b"settings")


def assignment(number: int, **fields: Any) -> m.Assignment:
    return m.Assignment(number, query(number), b"address", "caller", "e", "/", 1.5, **fields)


MESSAGES = [
    m.SubmitQueries(incarnation="i", queries=(query(1), query(2)), cancelled=(3,), resent=(2,)),
    m.SubmitQueries(incarnation="i"),
    m.SubmitQueries(incarnation="i", queries=(query(-1),), failed=((-1, "b#1", 0.5),)),
    m.SubmitQueries(incarnation="i", queries=(query(1),), lost=((1, 1),), died=((1, "b#1"),)),
    m.RunQueries(
        incarnation="i",
        proxy=PROCESS,
        assignments=(assignment(1), assignment(2, compare=(COMPARE,))),
        cancelled=(7,),
        compared=((1, (COMPARE,)), (2, ())),
    ),
    m.AnswerQueries(
        incarnation="i",
        answers=(
            m.HttpAnswer(1, 200, ((b"name", b"value"),), b"body"),
            m.ValueAnswer(2, b"value"),
            m.FailedAnswer(3, "UserCodeError", "text"),
            m.StreamBegun(4, 200, (), PROCESS),
            m.StreamPart(4, b"data"),
            m.StreamEnded(4, 200),
        ),
    ),
    m.QueriesFinished(
        replica="r",
        incarnation="i",
        models=(("a", "b"),),
        begun=(1,),
        answered=((2, 200),),
        cancelled=(3,),
        delivered=(2,),
        rejected=(4,),
        draining=True,
    ),
    m.AttachCallerReply(proxy=PROCESS, ready=True),
    (1, "a tuple of somebody else's"),
    (),
    ((),),
    [1],
    None,
]


def same(one: Any, other: Any) -> bool:
    """Return whether they are equal, and of the same types all through."""
    if isinstance(one, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    names = getattr(one, "__slots__", ())
    return type(one) is type(other) and (
        all(same(getattr(one, name), getattr(other, name)) for name in names)
        if names
        else one == other
    )


def test_hosts_that_do_not_know_of_failures_read_all_messages_without_them():
    message = m.SubmitQueries(incarnation="i", queries=(query(1),), refused=(1,))
    as_before = (m.SUBMIT, "i", [tuple(query(1))], (), (), (), (1,))
    assert pickle.loads(encode(message)[0]) == as_before
    assert decode([pickle.dumps(as_before)]) == message


@pytest.mark.parametrize("message", MESSAGES, ids=str)
def test_a_message_arrives_as_it_was(message):
    assert same(message, decode(encode(message)))


@pytest.mark.parametrize("message", MESSAGES[:2], ids=str)
def test_what_is_pickled_of_queries_is_plain(message):
    assert b"greenroom" not in encode(message)[0]


def test_large_bytes_still_travel_outside_of_the_pickle():
    content = b"x" * 100_000
    asked = query(1)._replace(call=LargeBytes(content))
    buffers = encode(m.SubmitQueries(incarnation="i", queries=(asked,)))
    assert [len(each) for each in buffers[1:]] == [len(content)]
    assert bytes(decode(buffers).queries[0].call.view) == content
    large = AnswerPart(1, 1, LargeBytes(content))
    buffers = encode(m.AnswerQueries(incarnation="i", answers=(large,)))
    assert bytes(decode(buffers).answers[0].content.view) == content


def test_a_tuple_that_was_not_made_here_raises():
    with pytest.raises(KeyError):
        decode([pickle.dumps((99, "unknown"))])
