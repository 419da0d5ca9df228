"""JSON of what user code returns, by the rules of FastAPI's ``jsonable_encoder`` and of Ray Serve.

orjson writes what is plain, in a fifth of the time that ``json`` takes. If it meets anything else,
a key that is no str or an integer of over 64 bits, the whole value is made plain first, and then
``json`` writes it; also if there is a ``null``, as which orjson writes NaN.

We go on where their rules end in an error, as with an Enum whose value is a date. NaN and infinity
are refused, because browsers' JSON has neither, and so are functions, classes and files. A dict
keeps its keys that begin with ``_sa``; an object's attributes of such names, SQLAlchemy's own, are
left out.

Pydantic's ``to_jsonable_python`` would give other values: ``Z`` for a datetime's ``+00:00``, and a
string for a Decimal.
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
from io import IOBase
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic_core import PydanticUndefined, Url

# Theirs makes {} of most of these, so that the mistake is never seen.
_NO_VALUES = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, IOBase)
_encoder = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


# What it has rules of its own for.
_OURS = (
    orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)


def to_json(value: Any) -> bytes:
    """Return ``value`` as JSON; TypeError, ValueError or RecursionError for what cannot be."""
    try:
        written = orjson.dumps(value, option=_OURS)
        return _encoder.encode(value).encode() if b"null" in written else written
    except TypeError:  # json knows neither UUIDs nor Enums, which orjson does
        return _encoder.encode(_plain(value)).encode()


def _plain(value: Any) -> Any:
    """Return ``value`` made of dicts, lists and scalars only, whose keys json can write."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, str | int | float):
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
    if isinstance(value, _NO_VALUES):
        raise TypeError(f"JSON has nothing for a {type(value).__name__}")
    try:
        return dict(value)
    except Exception:  # user code's iteration may raise anything
        return _attributes(value)


def _attributes(value: Any) -> dict[str, Any]:
    try:
        attributes = vars(value)
    except TypeError:
        raise TypeError(f"JSON has nothing for a {type(value).__name__}") from None
    return {name: each for name, each in attributes.items() if not name.startswith("_sa")}


def _number(value: Decimal) -> int | float:
    exponent = value.as_tuple().exponent
    return int(value) if isinstance(exponent, int) and exponent >= 0 else float(value)


def _array(value: Any) -> Any:
    return value.astype(float).tolist() if value.dtype.kind == "f" else value.tolist()


def _scalar(value: Any) -> Any:
    return float(value) if value.dtype.kind == "f" else value.item()


_RULES: tuple[tuple[Callable[[Any], Any], tuple[type[Any], ...]], ...] = (
    (
        str,
        (
            *(Exception, PurePath, uuid.UUID, Url),
            *(ipaddress.IPv4Address, ipaddress.IPv4Interface, ipaddress.IPv4Network),
            *(ipaddress.IPv6Address, ipaddress.IPv6Interface, ipaddress.IPv6Network),
        ),
    ),
    (lambda value: value.model_dump(mode="json", by_alias=True), (BaseModel,)),
    (lambda value: value.isoformat(), (dt.date, dt.time)),  # a datetime is a date
    (lambda value: bytes(value).decode(), (bytes, bytearray, memoryview)),
    (lambda value: value.pattern, (re.Pattern,)),
    (lambda _: None, (type(PydanticUndefined),)),
    (dt.timedelta.total_seconds, (dt.timedelta,)),
    (_number, (Decimal,)),
)
for _rule, _kinds in _RULES:
    for _kind in _kinds:
        _simpler.register(_kind, _rule)

# Classes of packages that we do not import.
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
