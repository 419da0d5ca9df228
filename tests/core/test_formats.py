"""The shapes of all that travels are those of the last release, or follow the rule for changes.

``python -m tests.core.test_formats`` writes ``shapes.json``: when a release is made.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic_core import PydanticUndefined

from greenroom.core import formats
from greenroom.core.formats import FORMAT, SHAPES, fit, travels
from greenroom.core.operations import OPERATIONS, ApplicationSpec, Canary, DeploymentSpec, Operation

RELEASED = Path(__file__).with_name("shapes.json")
MODULES = (
    "actors.messages.admin",
    "actors.messages.control",
    "actors.messages.queries",
    "core.cluster.key_rotation",
    "core.records",
    "core.rollouts.judging",
    "core.routing.tables",
)
RULE = "add fields at the end, with defaults, and nothing else; see docs/formats.md"

Shapes = Mapping[str, list[str]]


def shape(kind: type) -> list[str]:
    """Return the fields of a class: name, type, and "=" behind those with a default."""
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        return [
            f"{each.name}: {each.type}"
            + (" =" if (each.default, each.default_factory) != (missing, missing) else "")
            for each in dataclasses.fields(kind)
        ]
    types = {name: getattr(at, "__forward_arg__", at) for name, at in kind.__annotations__.items()}
    defaults: Any = kind._field_defaults  # type: ignore[attr-defined]
    return [f"{name}: {at}" + (" =" if name in defaults else "") for name, at in types.items()]


def present() -> dict[str, list[str]]:
    for name in MODULES:
        importlib.import_module(f"greenroom.{name}")
    found = {
        name: shape(kind) for name, kind in sorted(SHAPES.items()) if name.startswith("greenroom.")
    }
    for key, kind in sorted(OPERATIONS.items()):
        found[f"operation {key}"] = asked(kind)
    for spec in (DeploymentSpec, ApplicationSpec, Canary):  # all of whose fields are always sent
        found[f"part of operations {spec.__name__}"] = list(spec.model_fields)
    return found


def asked(kind: type[Operation]) -> list[str]:
    """Return an operation's fields, and "=" behind those that are sent only if they say more."""
    fields = kind.model_fields.items()
    return [name + (" =" if each.default is not PydanticUndefined else "") for name, each in fields]


def wrong(released: Shapes, now: Shapes) -> list[str]:
    """Return what breaks the rule, by class."""
    found = []
    for name, fields in released.items():
        if name not in now:
            found.append(f"{name} is gone or was moved")
        elif now[name][: len(fields)] != fields:
            changed = next(a for a, b in zip(fields, [*now[name], *fields], strict=False) if a != b)
            found.append(f"{name} had {changed!r}")
        else:
            added = [each for each in now[name][len(fields) :] if not each.endswith(" =")]
            found += [f"{name} has {each!r}, without a default" for each in added]
    return found


def test_shapes_are_the_last_releases_or_follow_the_rule() -> None:
    released, now = json.loads(RELEASED.read_text()), present()
    problems = wrong(released["shapes"], now)
    assert not problems, f"{'; '.join(problems)}: {RULE}"
    changed = sorted(name for name in now if now[name] != released["shapes"].get(name))
    expected = released["format"] + bool(changed)
    assert expected == FORMAT, (
        f"{changed or 'no shapes'} changed since the last release: core.formats.FORMAT must be "
        f"{expected}, or before the first release the file is to be written anew; see "
        "docs/formats.md"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["a: int"], "had 'b: str ='"),
        (["b: str =", "a: int"], "had 'a: int'"),
        (["a: str", "b: str ="], "had 'a: int'"),
        (["a: int", "b: str =", "c: int"], "has 'c: int', without a default"),
        (None, "is gone or was moved"),
    ],
)
def test_what_other_releases_could_not_read_is_named(
    fields: list[str] | None, message: str
) -> None:
    now = {} if fields is None else {"Kind": fields}
    assert wrong({"Kind": ["a: int", "b: str ="]}, now) == [f"Kind {message}"]
    assert not wrong({"Kind": ["a: int"]}, {"Kind": ["a: int", "b: str ="], "New": ["a: int"]})


# --- Reading what another format wrote ------------------------------------------------------------


@travels
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    a: int
    b: list[int] = dataclasses.field(default_factory=list)


@travels
@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    a: int
    b: Mapping[str, int] = dataclasses.field(default_factory=dict)


@travels
class Row(NamedTuple):
    a: int
    b: str = "none"


def test_instances_of_this_format_are_read_as_they_were() -> None:
    for value in (Slotted(a=1, b=[2]), Record(a=1, b={"x": 2}), Row(1, "x")):
        assert pickle.loads(pickle.dumps(value)) == value
        assert formats.read(pickle.dumps(value)) == value


def test_fields_that_are_missing_get_their_defaults_and_unknown_ones_are_dropped() -> None:
    for state in ([1], {"a": 1}):
        kind = Slotted if isinstance(state, list) else Record
        older, newer = object.__new__(kind), object.__new__(kind)
        older.__setstate__(state)  # type: ignore[attr-defined]
        assert older == kind(a=1)
        more = [1, [2], "new"] if isinstance(state, list) else {"a": 1, "b": [2], "c": "new"}
        newer.__setstate__(more)  # type: ignore[attr-defined]
        assert newer == kind(a=1, b=[2])
        assert dataclasses.replace(newer, a=3) == kind(a=3, b=[2])
    assert fit(Row, (1,)) == Row(1)
    assert fit(Row, (1, "x", "new")) == Row(1, "x")


def test_named_tuples_of_other_formats_are_read_wherever_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Longer(NamedTuple):
        a: int
        b: str
        c: str = "new"

    class Shorter(NamedTuple):
        a: int

    for other, expected in ((Longer(1, "x"), Row(1, "x")), (Shorter(1), Row(1))):
        kind = type(other)
        kind.__qualname__ = "Row"
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "Row", kind)
            pickled = pickle.dumps({"deep": [other]})
        assert formats.read(pickled) == {"deep": [expected]}


def test_a_field_that_has_no_default_is_named_where_it_is_missing() -> None:
    with pytest.raises(TypeError, match="a Record without 'a', which has no default"):
        object.__new__(Record).__setstate__({"b": {}})  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="'a'"):
        fit(Row, ())


def test_neighbours_talk_and_records_are_read_up_to_the_next() -> None:
    assert [each for each in range(FORMAT + 3) if formats.reads_messages_of(each)] == [
        *range(max(FORMAT - 1, 0), FORMAT + 2)
    ]
    assert [each for each in range(FORMAT + 3) if formats.reads_records_of(each)] == [
        *range(formats.OLDEST, FORMAT + 2)
    ]
    assert formats.named_in("greenroom 0.2.0, Python 3.11, format 12") == 12
    assert formats.named_in("greenroom 0.0.7, Python 3.9") == 0


if __name__ == "__main__":
    written = {"format": FORMAT, "shapes": present()}
    RELEASED.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
