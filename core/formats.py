"""The format of what travels between processes and is kept in the store: its number, its shapes.

Theory of operation. Releases whose formats differ by one work in one cluster, so that it can be
upgraded host by host. What travels is a message or a record: a dataclass or a named tuple that is
decorated with :func:`travels`. It changes in one way only: a field is added at the end, with a
default. A process that reads what another format wrote fills in the fields that it misses and drops
those that it does not know. docs/formats.md is the page for contributors, and
tests/core/test_formats.py compares all shapes with those of the last release.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

FORMAT = 2
"""The format of this release. Raise it once, when a shape differs from the last release's."""

OLDEST = 2
"""The oldest format of records that is read, the first release's: a state dir may be years old."""

T = TypeVar("T")
Buffers = Iterable[bytes | bytearray | memoryview]

SHAPES: dict[str, type] = {}
"""All that travels, by its full name."""

OURS: set[type] = set()
"""The same classes."""


def travels(kind: type[T]) -> type[T]:
    """Mark a dataclass or a named tuple as one whose instances other releases read and write."""
    SHAPES[f"{kind.__module__}.{kind.__qualname__}"] = kind
    OURS.add(kind)
    if dataclasses.is_dataclass(kind):
        kind.__setstate__ = _setter(kind)  # type: ignore[attr-defined]
    return kind


def fit(kind: Callable[..., T], values: Sequence[Any]) -> T:
    """Make a named tuple of the values of another format's; TypeError where a value is missing."""
    return kind(*values[: len(kind._fields)])  # type: ignore[attr-defined]


def read(pickled: Any, buffers: Buffers | None = None) -> Any:
    """Unpickle what another format wrote; slower than ``pickle.loads``, whose errors it raises."""
    return Reader(io.BytesIO(pickled), buffers=buffers).load()


class Reader(pickle.Unpickler):
    """Unpickles named tuples that have more or fewer fields than here; dataclasses do it alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, or for a named tuple what makes one of the values that there are."""
        found = super().find_class(module, name)
        return _fitting(found) if hasattr(found, "_fields") else found


def reads_messages_of(other: int) -> bool:
    """Return whether messages of a format can be exchanged: ours and its neighbours."""
    return abs(other - FORMAT) <= 1


def reads_records_of(other: int) -> bool:
    """Return whether records of a format can be read: all up to the next."""
    return OLDEST <= other <= FORMAT + 1


def named_in(text: str) -> int:
    """Return the format that a release names; 0 for one that names none."""
    found = re.search(r"\bformat (\d{1,9})$", text)
    return int(found[1]) if found else 0


@functools.cache
def _fitting(kind: type) -> type:
    # A pickle makes an instance by its class's __new__, and takes whatever that returns.
    made = {"__new__": lambda _, *values: fit(kind, values), "__module__": kind.__module__}
    return type(kind.__name__, (), made)


def _setter(kind: type) -> Callable[[Any, Any], None]:
    own = dataclasses.fields(kind)
    names = [each.name for each in own]

    def set_state(self: Any, state: Mapping[str, Any] | Sequence[Any]) -> None:
        """Take the values of another format's fields: by name, or with slots in their order."""
        given = state if isinstance(state, Mapping) else dict(zip(names, state, strict=False))
        for each in own:
            value = given[each.name] if each.name in given else _default(kind, each)
            object.__setattr__(self, each.name, value)

    return set_state


def _default(kind: type, field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise TypeError(f"a {kind.__name__} without {field.name!r}, which has no default")
