"""Parts of web frameworks' apps that do not pickle by themselves, though nothing speaks against it.

An app travels to the replicas with the class whose requests it answers. FastAPI's routers keep
locks; a copy in another process begins with its own. Starlette's State cannot be unpickled.
"""

from __future__ import annotations

import threading
from typing import Any

_FRAMEWORKS = ("fastapi", "starlette")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def app_part(value: Any) -> Any:
    """Return how to pickle such a part; None for anything else."""
    cls = type(value)
    if not cls.__module__.startswith(_FRAMEWORKS):
        return None
    state = getattr(value, "__dict__", {})
    if cls.__qualname__ == "State":  # its __getattr__ recurses while it has none
        return cls, (state["_state"],)
    locks = {name: type(part) for name, part in state.items() if isinstance(part, _LOCKS)}
    if not locks:
        return None
    names = tuple((name, kind is _LOCKS[1]) for name, kind in locks.items())
    rest = {name: part for name, part in state.items() if name not in locks}
    return with_locks, (cls, names), rest


def with_locks(cls: type, names: tuple[tuple[str, bool], ...]) -> Any:
    """Make an object that has fresh locks, and gets the rest of its state later."""
    made: Any = object.__new__(cls)
    for name, is_reentrant in names:
        setattr(made, name, threading.RLock() if is_reentrant else threading.Lock())
    return made
