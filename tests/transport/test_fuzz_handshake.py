from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from tests.transport.fuzz_handshake import (
    BODIES,
    GROWN_BLOCKS,
    HELLOS,
    TARGETS,
    Growth,
    beginnings,
    fuzz_exchange,
    fuzz_one,
    fuzz_stranger,
    inputs,
)


def test_random_strangers_are_refused_and_leave_nothing() -> None:
    stream = inputs(seed=3)
    for data in islice(stream, 3000):
        fuzz_one(data)
    before = sys.getallocatedblocks()
    for data in islice(stream, 3000):
        fuzz_one(data)
    assert sys.getallocatedblocks() - before < GROWN_BLOCKS


@pytest.mark.parametrize("choice", range(2 * len(TARGETS)))
def test_every_beginning_passes_every_target(choice: int) -> None:
    for start in beginnings():
        fuzz_one(bytes([choice]) + start)


def test_a_right_hello_keeps_no_more_than_a_handshake() -> None:
    assert fuzz_stranger(0, HELLOS[1] + b"\1\xb0" + bytes(5000)) <= 1024


def test_an_exchange_without_changes_carries_everything() -> None:
    assert fuzz_exchange(2, b"") > sum(map(len, BODIES))


@pytest.mark.parametrize(
    ("place", "careless"),
    [
        ("frames.compare_digest", lambda *_: True),
        ("gate.hmac.compare_digest", lambda *_: True),
        ("handshake.Handshake._mac", lambda *_: bytes(32)),
    ],
)
def test_a_check_that_is_missing_would_be_found(
    place: str, careless: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fuzzer is worth its time: it sees what each of these checks is for."""
    monkeypatch.setattr(f"greenroom.actors.transport.{place}", careless)
    with pytest.raises(AssertionError):
        deque(map(fuzz_one, islice(inputs(seed=5), 20_000)), maxlen=0)


def test_growth_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr("tests.transport.fuzz_handshake.WARM_UP", 10)
    monkeypatch.setattr("tests.transport.fuzz_handshake.CHECK_EVERY", 10)
    monkeypatch.setattr(
        "tests.transport.fuzz_handshake.fuzz_one", lambda data: kept.extend(map(str, range(10_000)))
    )
    growth = Growth()
    with pytest.raises(AssertionError, match="blocks of memory"):
        deque(map(growth, [b""] * 100), maxlen=0)
