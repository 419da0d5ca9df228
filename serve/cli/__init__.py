"""The command ``greenroom``: ``main`` reads the flags, and the other modules do what they ask for.

``main`` names those as attributes of this package, and each is imported when it is first used. So
``greenroom --help`` imports none of them, and ``greenroom stop`` no more than it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenroom.serve.cli import commands, deploying, measuring, starting, stores, tuning

__all__ = ["commands", "deploying", "measuring", "starting", "stores", "tuning"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
