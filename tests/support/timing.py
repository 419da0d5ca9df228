"""How long something takes, on a machine that does other things meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

ATTEMPTS = 5
DEADLINE_S = 20.0


async def until(condition: Callable[[], Any]) -> None:
    """Wait on a loop for what something else there, or a thread, is about to bring about."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.001)


def check_within(limit_s: float, attempt: Callable[[], float], attempts: int = ATTEMPTS) -> None:
    """Fail unless one of a few attempts, which return what they took, is within the limit.

    Whatever else runs can only delay them, so one that is in time shows that nothing of ours waits.
    """
    took: list[float] = []
    while len(took) < attempts:
        took.append(attempt())
        if took[-1] < limit_s:
            return
    shown = ", ".join(f"{each:.3f}" for each in took)
    raise AssertionError(f"never within {limit_s:g} s in {attempts} attempts: {shown}")
