"""A turn costs what it touches, not what waits: as calls of functions, which no machine changes."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from benchmarks.scale import crowded

FEW, MANY = 10, 60
PROXIES = 3


@pytest.fixture(scope="module")
def calls() -> tuple[dict[str, float], dict[str, float]]:
    """Return what things cost amid few and amid many others, in thousands of calls."""
    counted = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal counted
        counted += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        few, many = (crowded(number, PROXIES, lambda: float(counted)) for number in (FEW, MANY))
    finally:
        sys.setprofile(before)
    return few, many


@pytest.mark.parametrize(
    "what",
    [
        "a pass amid as many goals that clients wait for",
        "a tally of a rollout, with as many proxies",
        "a setting after a deploy of as many",
        "a setting amid as many canaries",
    ],
)
def test_it_costs_the_same_amid_many(
    calls: tuple[dict[str, float], dict[str, float]], what: str
) -> None:
    few, many = calls
    assert few[what] > 0
    assert many[what] <= 1.05 * few[what]
