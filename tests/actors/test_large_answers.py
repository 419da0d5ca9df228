"""Answers that travel in parts, with others in between, and arrive as one."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from greenroom import serve
from greenroom.actors.messages import queries as m
from greenroom.actors.messages.queries import (
    PART,
    PARTED,
    LargeBytes,
    PartedAnswer,
    Pieces,
    in_parts,
    put_together,
)
from tests.actors.noting import DEADLINE_S
from tests.actors.one_process import OneProcess
from tests.support.queries import python_call, query
from tests.support.systems import RunningSystem

BODY = bytes(range(251)) * (5 * PART // 251)


def content(answer: Any) -> bytes:
    return bytes(answer.body if isinstance(answer, m.HttpAnswer) else answer.value)


def sent_parts(items: list[Any]) -> tuple[list[LargeBytes], PartedAnswer]:
    *parts, last = items
    assert all(type(part) is m.AnswerPart and len(part.content) <= PART for part in parts)
    return [part.content for part in parts], last


@given(st.integers(0, len(BODY)), st.booleans())
def test_what_was_cut_is_put_together(size: int, is_http: bool) -> None:
    body = BODY[:size]
    answer = m.HttpAnswer(7, 201, ((b"a", b"b"),), body) if is_http else m.ValueAnswer(7, body)
    parts, last = sent_parts(in_parts(answer, 1))
    again = put_together(last, parts)
    assert content(again) == body
    expected = answer._replace(body=b"") if is_http else answer._replace(value=b"")
    assert (again._replace(body=b"") if is_http else again._replace(value=b"")) == expected


def test_an_answer_that_lacks_a_part_is_a_failure_that_says_so() -> None:
    parts, last = sent_parts(in_parts(m.ValueAnswer(7, BODY), 1))
    failure = put_together(last, parts[1:])
    assert isinstance(failure, m.FailedAnswer)
    assert (failure.query_id, failure.kind) == (7, "ReplicaUnavailableError")
    assert "in full" in failure.text


def test_pieces_are_let_go_of_one_after_the_other() -> None:
    pieces = Pieces([memoryview(b"abc"), memoryview(b"de")])
    assert len(pieces) == 5
    assert [bytes(piece) for piece in pieces] == [b"abc", b"de"]
    assert not list(pieces)


# --- Between a replica and its caller -------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[OneProcess]:
    async def sized(size: int) -> bytes:
        return b"x" * size

    made = OneProcess(sized, limit=10)
    yield made
    made.close()


def ask(world: OneProcess, *sizes: int) -> list[tuple[int, Any]]:
    """Ask for values of these sizes at once; return number and answer, in order of arrival."""
    answers: list[tuple[int, Any]] = []

    async def run() -> None:
        done = asyncio.Event()
        for number, size in enumerate(sizes):

            def answered(answer: Any, number: int = number) -> None:
                answers.append((number, answer))
                if len(answers) == len(sizes):
                    done.set()

            asked = query(world.caller.next_id(), **python_call(size))
            world.caller.submit(asked, answered)
        await asyncio.wait_for(done.wait(), DEADLINE_S)

    world.loop.run_until_complete(run())
    return answers


def test_small_answers_overtake_large_ones(world: OneProcess) -> None:
    answers = ask(world, 40 * PART, 30 * PART, 1, 100)
    assert {number for number, _ in answers[:2]} == {2, 3}
    sizes = {number: len(answer.value) for number, answer in answers}
    assert min(sizes[0] - 40 * PART, sizes[1] - 30 * PART) >= 0


def test_nothing_is_left_of_them(world: OneProcess) -> None:
    ask(world, 10 * PART, PARTED, PARTED - 1)
    assert not world.caller._entries
    assert world.queries.undelivered == 0
    assert all(outbox.is_idle for outbox in world.queries._parted.values())


# --- Over HTTP ------------------------------------------------------------------------------------


@serve.deployment
def large(request: Request) -> bytes:
    size = int(request.query_params["size"])
    return (BODY * (size // len(BODY) + 1))[:size]


@pytest.fixture(scope="module")
def path(deployed_once: Callable[..., str]) -> str:
    return deployed_once(large.bind())


@pytest.fixture
def connection(running: RunningSystem) -> Iterator[http.client.HTTPConnection]:
    port = running.settings.http.port
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as opened:
        yield opened


def test_answers_of_every_size_arrive_whole_on_one_connection(
    path: str, connection: http.client.HTTPConnection
) -> None:
    for size in (0, PART, PARTED - 1, PARTED, PARTED + 1, 40 * PART):
        connection.request("GET", f"{path}?size={size}")
        response = connection.getresponse()
        body = response.read()
        assert (response.status, response.headers["content-length"]) == (200, str(size))
        expected = (BODY * (size // len(BODY) + 1))[:size]
        assert hashlib.sha256(body).digest() == hashlib.sha256(expected).digest()


def test_to_head_it_has_its_length_and_no_body(
    path: str, connection: http.client.HTTPConnection
) -> None:
    for _ in range(2):
        connection.request("HEAD", f"{path}?size={4 * PARTED}")
        response = connection.getresponse()
        assert (response.read(), response.headers["content-length"]) == (b"", str(4 * PARTED))


def test_who_takes_none_of_it_or_leaves_amid_it_delays_nobody(
    path: str, running: RunningSystem, connection: http.client.HTTPConnection
) -> None:
    port = running.settings.http.port
    slow = [http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S) for _ in range(4)]
    for each in slow:
        each.request("GET", f"{path}?size={100 * PART}")
    for each in slow[:2]:
        each.close()
    connection.request("GET", f"{path}?size=10")
    assert connection.getresponse().read() == BODY[:10]
    for each in slow[2:]:
        assert len(each.getresponse().read()) == 100 * PART
        each.close()
