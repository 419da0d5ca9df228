"""What counts as a number in what users give."""

from __future__ import annotations

from typing import TypeGuard


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether it is one, perhaps NaN or infinite; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
