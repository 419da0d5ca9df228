"""Whether anything of ours still keeps the name of what is gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any


def where_named(root: Any, names: Collection[str]) -> list[str]:
    """Return where any of these names is kept below an object of ours, as paths.

    Looks into containers and attributes of our own classes, and not into functions.
    """
    found: list[str] = []
    seen: set[int] = set()
    to_see: deque[tuple[str, Any]] = deque([(type(root).__name__, root)])
    while to_see:
        path, thing = to_see.popleft()
        if isinstance(thing, str):
            if thing in names:
                found.append(f"{path} has {thing!r}")
        elif id(thing) not in seen:
            seen.add(id(thing))
            to_see.extend((f"{path}{part}", inner) for part, inner in _parts(thing))
    return found


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        for key, value in thing.items():
            yield from (("'s keys", key), (f"[{key!r}]", value))
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        yield from (("[]", each) for each in thing)
    elif any(kind.__module__.startswith("greenroom.") for kind in type(thing).__mro__):
        for name, value in getattr(thing, "__dict__", {}).items():
            yield f".{name}", value
        for kind in type(thing).__mro__:
            for name in getattr(kind, "__slots__", ()):
                if hasattr(thing, name):
                    yield f".{name}", getattr(thing, name)
