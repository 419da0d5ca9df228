"""How long something takes, on a machine that does other things meanwhile."""

from __future__ import annotations

from collections.abc import Callable

ATTEMPTS = 5


def check_within(limit_s: float, attempt: Callable[[], float]) -> None:
    """Fail unless one of a few attempts, which return what they took, is within the limit.

    Whatever else runs can only delay them, so one that is in time shows that nothing of ours waits.
    """
    took: list[float] = []
    while len(took) < ATTEMPTS:
        took.append(attempt())
        if took[-1] < limit_s:
            return
    shown = ", ".join(f"{each:.3f}" for each in took)
    raise AssertionError(f"never within {limit_s:g} s in {ATTEMPTS} attempts: {shown}")
