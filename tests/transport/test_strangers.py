"""What strangers cost: lines in a log, and connections that are accepted."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from greenroom.actors.transport.admission import (
    MAX_LINES,
    MAX_SOURCE_LINES,
    WINDOW_S,
    Admission,
    TokenBucket,
)
from tests.support.virtual_time import VirtualTimeLoop


@pytest.fixture
def loop():
    with closing(VirtualTimeLoop()) as loop:
        yield loop


@pytest.fixture
def admission(loop):
    return Admission(loop)


def end_window(loop) -> None:
    loop.run_until_complete(asyncio.sleep(WINDOW_S))


def test_a_kind_of_refusal_is_said_once_per_source_and_window(loop, admission, caplog):
    for source, reason in (("a:1", "garbage"), ("a:2", "garbage"), ("a:1", "key"), ("b:1", "key")):
        admission.refused(source, reason)
    assert [each.partition(" with ")[2] for each in caplog.messages] == [
        "a:1: garbage",
        "a:1: key",
        "b:1: key",
    ]
    end_window(loop)
    assert caplog.messages[3].startswith("1 more connections were refused or failed")
    admission.refused("a:1", "garbage")
    assert len(caplog.messages) == 5
    end_window(loop)
    assert len(caplog.messages) == 5, "there is nothing to sum up"


def test_a_flood_of_kinds_has_few_lines(loop, admission, caplog):
    for number in range(1000):
        admission.refused("a:1", f"kind {number}")
    assert len(caplog.messages) == MAX_SOURCE_LINES
    admission.refused("b:1", "garbage")
    assert len(caplog.messages) == MAX_SOURCE_LINES + 1, "another source is still heard"
    for number in range(1000):
        admission.refused(f"{number}:1", "garbage")
    assert len(caplog.messages) == MAX_LINES
    end_window(loop)
    assert caplog.messages[-1].startswith(f"{2001 - MAX_LINES} more connections")


def test_a_burst_is_taken_without_a_rest_and_the_long_run_is_bounded():
    allowance, now, taken = TokenBucket(most=512, per_s=4000.0), 1000.0, 0
    rests = []
    while now < 1010.0:
        rest_s = allowance.take(32, now)
        taken += 32
        rests.append(rest_s)
        now += rest_s + 0.001
    assert not any(rests[:16]), "512 at once"
    assert all(rests[30:])
    assert taken <= 512 + 10 * 4000 + 32


def test_after_a_lull_no_more_is_taken_at_once_than_at_first():
    allowance = TokenBucket(most=100, per_s=1000.0)
    assert allowance.take(100, 5.0) == 0.0
    assert allowance.take(10, 5.0) == 0.01
    assert allowance.take(100, 500.0) == 0.0
    assert allowance.take(1, 500.0) == 0.001
