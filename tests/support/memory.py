"""How much memory a piece of code leaves allocated."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def growth(action: Callable[[], object]) -> int:
    """Return by how many bytes the allocated memory has grown when ``action`` returns."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
