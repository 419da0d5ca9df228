"""What user code returns as JSON, beside what FastAPI's and Ray Serve's own encoders make of it."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import io
import ipaddress
import json
import math
import pathlib
import re
import subprocess
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pydantic
import pytest
from fastapi.encoders import jsonable_encoder
from hypothesis import given, strategies as st
from starlette.datastructures import Headers, QueryParams

from greenroom.actors.replica.jsonable import to_json

DAY = dt.date(2020, 2, 29)
NOON = dt.datetime(2020, 2, 29, 12, 0, 0, 5, tzinfo=dt.UTC)


class Colour(enum.Enum):
    RED = "red"
    FIRST = 1


class Word(enum.StrEnum):
    HI = "hi"


class Count(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    a: int
    b: Any


class Model(pydantic.BaseModel):
    name: str = pydantic.Field(alias="Name")
    at: dt.datetime = NOON
    took: dt.timedelta = dt.timedelta(seconds=90)
    price: decimal.Decimal = decimal.Decimal("1.10")
    secret: pydantic.SecretStr = pydantic.SecretStr("s")


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


@pydantic.dataclasses.dataclass
class Checked:
    at: dt.date


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Pairs:
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter([("a", DAY), ("b", {Colour.RED})])


class Mapped:
    def keys(self) -> list[str]:
        return ["k"]

    def __getitem__(self, name: str) -> Any:
        return decimal.Decimal(2)


class DataFrame:
    """What of a pandas DataFrame is used."""

    def to_dict(self, orient: str) -> Any:
        assert orient == "records"
        return [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


class FailedError(ValueError):
    def __init__(self) -> None:
        super().__init__("it failed")
        self.code = 7


def numbers() -> Iterator[Any]:
    yield from (1, decimal.Decimal("0.5"), "x")


@pytest.fixture
def pandas(monkeypatch):
    module = types.ModuleType("pandas")
    module.DataFrame = DataFrame  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", module)


RAYS: dict[Any, Callable[[Any], Any]] = {
    Exception: str,
    np.ndarray: lambda value: value.tolist(),
    np.generic: lambda value: value.item(),
    DataFrame: lambda value: value.to_dict(orient="records"),
}

# Made anew for each encoder: one that is an iterator is used up.
TABLE: dict[str, Callable[[], Any]] = {
    "true": lambda: True,
    "int": lambda: 2**70,
    "float": lambda: 1e-7,
    "string in a list": lambda: ["grüß", "\u2028", "\\"],
    "dict": lambda: {"a": [1, None, {"b": 1.5}]},
    "tuple": lambda: (1, (2,)),
    "named tuple": lambda: Pair(1, DAY),
    "set": lambda: {1, 2, 3},
    "frozenset": lambda: frozenset({"x"}),
    "deque": lambda: collections.deque([1, DAY]),
    "ordered dict": lambda: collections.OrderedDict(z=1, a=DAY),
    "mapping proxy": lambda: types.MappingProxyType({"a": DAY}),
    "decimal with an exponent": lambda: decimal.Decimal("1.10"),
    "decimal without": lambda: decimal.Decimal("12"),
    "large decimal": lambda: [decimal.Decimal("1E+3"), decimal.Decimal("-0")],
    "timedelta": lambda: dt.timedelta(days=1, milliseconds=1),
    "date": lambda: DAY,
    "datetime": lambda: NOON,
    "datetime without a zone": lambda: NOON.replace(tzinfo=None),
    "time": lambda: dt.time(1, 2, 3),
    "uuid": lambda: uuid.UUID(int=1),
    "path": lambda: pathlib.Path("/a/ä"),
    "pure windows path": lambda: pathlib.PureWindowsPath("c:/a"),
    "bytes": lambda: {"raw": "grüß".encode()},
    "pattern": lambda: re.compile("a+"),
    "addresses": lambda: [
        ipaddress.ip_address("127.0.0.1"),
        ipaddress.ip_network("10.0.0.0/8"),
        ipaddress.ip_interface("::1/64"),
        ipaddress.ip_address("::1"),
    ],
    "enum": lambda: [Colour.RED, Colour.FIRST, Word.HI, Count.ONE],
    "exception": FailedError,
    "exceptions": lambda: {"errors": [KeyError("k"), RuntimeError()]},
    "dataclass": lambda: Point(1, Point(DAY, [Point(None)])),
    "dataclass with a model": lambda: Point(Model(Name="m"), {"a": Plain(b=1)}),
    "pydantic dataclass": lambda: Checked(DAY),
    "model": lambda: Model(Name="m"),
    "model in a dict": lambda: {"all": [Model(Name="m")], "url": pydantic.AnyUrl("http://x/a?b")},
    "root model": lambda: pydantic.RootModel[list[dt.date]]([DAY]),
    "secrets": lambda: [pydantic.SecretStr("s"), pydantic.SecretBytes(b"s")],
    "plain object": lambda: Plain(a=1, at=DAY, inner=Plain(b={2}), _private=1),
    "object of sqlalchemy": lambda: Plain(a=1, _sa_instance_state=object()),
    "pairs": Pairs,
    "what has keys": lambda: {"m": Mapped()},
    "generator in a dict": lambda: {"made": numbers()},
    "generator beside odd keys": lambda: {"made": numbers(), DAY: numbers()},
    "numpy scalars": lambda: [
        *(np.int64(2**60), np.float32(0.1), np.float64(0.1), np.bool_(True), np.str_("x")),
        *(np.uint8(255), np.float16(0.5)),
    ],
    "numpy arrays": lambda: {
        "a": np.arange(6).reshape(2, 3),
        "b": np.zeros((0, 3)),
        "c": np.array([0.1, 1], np.float32),
        "d": np.array(["x"]),
        "e": np.array(5),
    },
    "data frame": lambda: {"rows": DataFrame()},
    "keys of numpy": lambda: {np.int64(1): "a", np.float32(0.5): "b", np.str_("c"): np.int8(1)},
    "keys of enums": lambda: {Colour.RED: 1, Word.HI: 2, Count.ONE: {Colour.FIRST: DAY}},
    "other keys": lambda: {1: 1, 1.5: 2, None: 3, False: 4, b"b": 5, uuid.UUID(int=2): 6, DAY: 7},
    "keys that cannot be and models": lambda: [{decimal.Decimal("1.5"): Model(Name="m")}],
    "query": lambda: QueryParams("a=1&b=2"),
    "headers": lambda: Headers({"X-A": "b"}),
}


@pytest.mark.usefixtures("pandas")
@pytest.mark.parametrize("made", TABLE.values(), ids=TABLE.keys())
def test_json_is_what_fastapi_and_ray_serve_make_of_it(made):
    theirs = json.dumps(jsonable_encoder(made(), custom_encoder=RAYS))
    assert json.loads(to_json(made())) == json.loads(theirs)
    assert json.loads(to_json({"in": [made()]}))["in"] == [json.loads(theirs)]
    beside_null = [None, made()]
    assert json.loads(to_json(beside_null)) == [None, json.loads(theirs)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.longdouble(0.5), 0.5),
        ([np.datetime64("2020-02-29"), np.bytes_(b"x")], ["2020-02-29", "x"]),
        (np.array([DAY, decimal.Decimal(1), None]), ["2020-02-29", 1, None]),
        (np.array([2**64 - 1], np.uint64), [2**64 - 1]),
        (enum.Enum("Odd", {"DAY": DAY}).DAY, "2020-02-29"),  # type: ignore[attr-defined]
        ([bytearray(b"x"), memoryview(b"y")], ["x", "y"]),
        ({"_sa": 1, "_sale": {Colour.RED: 2}}, {"_sa": 1, "_sale": {"red": 2}}),
    ],
)
def test_where_their_rules_fail_or_lose_something_ours_go_on(value, expected):
    assert json.loads(to_json(value)) == expected


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.text() | st.integers() | st.booleans() | st.none()


@given(st.recursive(SCALARS, lambda each: st.lists(each) | st.dictionaries(KEYS, each)))
def test_of_plain_values_python_reads_what_it_would_write_itself(value):
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        with pytest.raises(ValueError, match="not JSON compliant"):
            to_json(value)
    else:
        assert json.loads(to_json(value)) == json.loads(text)


def looped() -> Any:
    value = Plain()
    value.itself = {DAY: value}
    return value


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


def deep() -> Any:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    "made",
    [
        lambda: math.nan,
        lambda: {"a": [math.inf]},
        lambda: {DAY: math.nan},
        lambda: decimal.Decimal("NaN"),
        lambda: np.array([1, math.nan]),
        lambda: {"a": b"\xff"},
        lambda: {(1, 2): 3},
        lambda: {frozenset(): 3},
        lambda: 1j,
        lambda: [object()],
        lambda: lambda: 1,
        lambda: Plain(connection=Plain),
        lambda: print,
        lambda: math,
        lambda: io.StringIO("x"),
        lambda: 10**5000,
        looped,
        lambda: Slotted(object()),
        deep,
        lambda: (each for each in [object()]),
        lambda: Plain(connection=memoryview),
    ],
)
def test_what_is_no_json_is_refused(made):
    with pytest.raises((TypeError, ValueError, RecursionError)):
        to_json(made())
    with pytest.raises((TypeError, ValueError, RecursionError)):
        to_json({"in": made(), DAY: 1})


def test_it_imports_neither_fastapi_nor_numpy():
    code = "import sys; import greenroom.actors.replica.jsonable\n"
    code += "print({'fastapi', 'numpy'} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
