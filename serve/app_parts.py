"""Parts of user code that do not pickle by themselves, though nothing speaks against it.

An app travels to the replicas with the class whose requests it answers. FastAPI's routers keep
locks; a copy in another process begins with its own, and so does a cached_property before Python
3.12. Starlette's State cannot be unpickled. What functools.lru_cache, NewType and ParamSpec make
is pickled as a reference to its module, which replicas do not have where code travels by value.
"""

from __future__ import annotations

import functools
import threading
import typing
from collections.abc import Callable
from typing import Any

import cloudpickle

_WITH_STATE = ("fastapi", "starlette", "functools")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CACHED = type(functools.lru_cache(lambda: None))


def app_part(value: Any) -> Any:
    """Return how to pickle such a part; None for anything else."""
    cls = type(value)
    if cls is _CACHED:
        return _cached_part(value)
    if cls is typing.NewType:
        is_by_value = _is_by_value(value.__module__, value.__name__)
        return (typing.NewType, (value.__name__, value.__supertype__)) if is_by_value else None
    if cls is typing.ParamSpec:
        is_by_value = _is_by_value(value.__module__, value.__name__)
        return (typing.ParamSpec, (value.__name__,)) if is_by_value else None
    if not cls.__module__.startswith(_WITH_STATE):
        return None
    state = getattr(value, "__dict__", {})
    if cls.__qualname__ == "State":  # its __getattr__ recurses while it has none
        return cls, (state["_state"],)
    return _part_with_locks(cls, state)


def _part_with_locks(cls: type, state: dict[str, Any]) -> Any:
    locks = {name: type(part) for name, part in state.items() if isinstance(part, _LOCKS)}
    if not locks:
        return None
    names = tuple((name, kind is _LOCKS[1]) for name, kind in locks.items())
    rest = {name: part for name, part in state.items() if name not in locks}
    return with_locks, (cls, names), rest


def _cached_part(value: Any) -> Any:
    function = value.__wrapped__
    if not _is_by_value(value.__module__, value.__qualname__):
        return None
    made_with = value.cache_parameters()
    return cached, (made_with["maxsize"], made_with["typed"]), function, None, None, set_function


def _is_by_value(module: str | None, name: str) -> bool:
    if module is None or module == "__main__" or "<locals>" in name:
        return True
    parts = module.split(".")
    packages = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return not packages.isdisjoint(cloudpickle.list_registry_pickle_by_value())


class _Late:
    """A function that is known later: its globals may have the cached function itself."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def cached(maxsize: int | None, typed: bool) -> Any:
    """Make a cached function that gets what it caches by :func:`set_function`."""
    return functools.lru_cache(maxsize, typed)(_Late())


def set_function(made: Any, function: Callable[..., Any]) -> None:
    """Give a cached function what it is to call."""
    made.__wrapped__.function = function
    functools.update_wrapper(made, function)


def with_locks(cls: type, names: tuple[tuple[str, bool], ...]) -> Any:
    """Make an object that has fresh locks, and gets the rest of its state later."""
    made: Any = object.__new__(cls)
    for name, is_reentrant in names:
        setattr(made, name, threading.RLock() if is_reentrant else threading.Lock())
    return made
