"""JSON of what user code returns, by the rules of FastAPI's ``jsonable_encoder`` and of Ray Serve.

``json``'s encoder, in C, walks through what it knows, and asks :func:`_simpler` about all else. So
what is plain costs nothing more, and a model in a dict only itself. It asks about values alone,
though, and comes by again where a key is nothing it knows. Then, and where there is an iterator,
which can be walked through only once, :func:`_plain` makes the whole value plain first.

Where the rules end in an error we go further, as with an Enum whose value is a date. NaN and
infinity are refused, as browsers' JSON has neither. A dict keeps its keys that begin with ``_sa``;
an object's attributes of such names, SQLAlchemy's own, are left out.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import ipaddress
import json
import re
import sys
import uuid
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from functools import singledispatch
from pathlib import PurePath
from types import GeneratorType
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, Url

_SCALARS = frozenset({str, int, float, bool, type(None)})


class _NotAtOnceError(Exception):
    """The value has to be made plain as a whole."""


def to_json(value: Any) -> str:
    """Return ``value`` as JSON; TypeError, ValueError or RecursionError for what cannot be."""
    try:
        return _encoder.encode(value)
    except (_NotAtOnceError, TypeError):
        return _plain_encoder.encode(_plain(value))


def _plain(value: Any) -> Any:
    """Return ``value`` made of dicts, lists and scalars only, whose keys json can write."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {_key(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque | GeneratorType):
        return [_plain(item) for item in value]
    return _plain(_simpler(value))


def _key(name: Any) -> Any:
    plain = _plain(name)
    if isinstance(plain, dict | list):
        raise TypeError(f"a {type(name).__name__} cannot be a key of JSON")
    return plain


@singledispatch
def _simpler(value: Any) -> Any:
    """Return what stands for ``value`` in JSON, which may need the same again."""
    for module, name, simpler in _OF_OTHERS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            return simpler(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    try:
        return dict(value)
    except Exception:  # user code's iteration may raise anything
        return _attributes(value)


def _attributes(value: Any) -> dict[str, Any]:
    try:
        attributes = vars(value)
    except TypeError:
        raise TypeError(f"a {type(value).__name__} is nothing that JSON knows") from None
    return {name: each for name, each in attributes.items() if not name.startswith("_sa")}


def _simpler_at_once(value: Any) -> Any:
    if hasattr(value, "__next__"):
        raise _NotAtOnceError
    return _simpler(value)


def _number(value: Decimal) -> int | float:
    exponent = value.as_tuple().exponent
    return int(value) if isinstance(exponent, int) and exponent >= 0 else float(value)


def _array(value: Any) -> Any:
    return value.astype(float).tolist() if value.dtype.kind == "f" else value.tolist()


def _scalar(value: Any) -> Any:
    return float(value) if value.dtype.kind == "f" else value.item()


_simpler.register(Exception, str)
_simpler.register(BaseModel, lambda value: value.model_dump(mode="json", by_alias=True))
_simpler.register(Enum, lambda value: value.value)
_simpler.register(PurePath, str)
_simpler.register(type(PydanticUndefined), lambda _: None)
_simpler.register(Decimal, _number)
_simpler.register(dt.timedelta, dt.timedelta.total_seconds)
_simpler.register(re.Pattern, lambda value: value.pattern)
_kind: type[Any]
for _kind in (bytes, bytearray, memoryview):
    _simpler.register(_kind, lambda value: bytes(value).decode())
for _kind in (dt.date, dt.time):  # a datetime is a date
    _simpler.register(_kind, lambda value: value.isoformat())
for _kind in (set, frozenset, deque, GeneratorType):
    _simpler.register(_kind, list)
for _kind in (
    uuid.UUID,
    Url,
    *(ipaddress.IPv4Address, ipaddress.IPv4Interface, ipaddress.IPv4Network),
    *(ipaddress.IPv6Address, ipaddress.IPv6Interface, ipaddress.IPv6Network),
):
    _simpler.register(_kind, str)

# Classes of packages that are imported only by who uses them.
_OF_OTHERS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("numpy", "ndarray", _array),
    ("numpy", "generic", _scalar),
    ("pandas", "DataFrame", lambda value: value.to_dict(orient="records")),
    ("pydantic.types", "SecretStr", str),
    ("pydantic.types", "SecretBytes", str),
    ("pydantic.networks", "AnyUrl", str),
    ("pydantic.networks", "NameEmail", str),
    ("pydantic.color", "Color", str),
    ("pydantic_extra_types.color", "Color", str),
)


_plain_encoder = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_encoder = json.JSONEncoder(
    default=_simpler_at_once, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)
