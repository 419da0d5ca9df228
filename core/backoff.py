"""How long to wait before the next try after failed ones."""

from __future__ import annotations

_MOST_DOUBLINGS = 64  # more would make any pause longer than any cap


def pause_s(failures: int, first_s: float, most_s: float) -> float:
    """Return the pause after so many failures in a row: twice the one before, up to ``most_s``.

    The exponent is capped before it is raised: what has failed for days has failed so often that
    the power would overflow.
    """
    return min(first_s * 2.0 ** min(max(failures - 1, 0), _MOST_DOUBLINGS), most_s)
