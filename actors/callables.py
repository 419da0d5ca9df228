"""How methods of user code are to be called: found out once for each, for asking takes 10 us."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any, NamedTuple


class Manner(NamedTuple):
    """How to call one function or method.

    What ``makes_generator`` runs no user code when it is called.
    """

    takes_argument: bool
    is_async: bool
    makes_generator: bool

    @classmethod
    def of(cls, function: Any) -> Manner:
        """Look at ``function``."""
        generates = inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)
        return cls(_takes_argument(function), is_async(function), generates)


class Manners:
    """Those of one copy of user code, by the names of its methods."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, Manner]] = {}

    def of(self, name: str, function: Any) -> Manner:
        """Return that of ``function``, which has this name for now: user code may change it."""
        source = function.__func__ if type(function) is MethodType else function
        known = self._known.get(name)
        if known is None or known[0] is not source:
            known = self._known[name] = source, Manner.of(function)
        return known[1]


def is_async(function: Any) -> bool:
    """Return whether calling it gives an awaitable that runs it."""
    if inspect.iscoroutinefunction(function):
        return True
    if inspect.isfunction(function) or inspect.ismethod(function):
        return False
    call = getattr(type(function), "__call__", None)  # noqa: B004  # an instance's may be async
    return inspect.iscoroutinefunction(call)


def _takes_argument(function: Any) -> bool:
    try:
        return len(inspect.signature(function).parameters) > 0
    except (TypeError, ValueError):  # some callables in C have no signature
        return True
