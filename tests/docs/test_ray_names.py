"""Ray Serve's public names work, or say on use what to do instead; the docs list all of them.

``ray_names.txt`` has those of the release that it names: what is marked as public, the members of
classes, and the parameters of functions. docs/migrating-from-ray-serve.md has them in a table.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from greenroom.core.config import BackendConfig
from greenroom.serve.deployments import Deployment, GivenOptions
from greenroom.serve.handle import DeploymentHandle, HandleOptions

LIST = Path(__file__).with_name("ray_names.txt")
PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-ray-serve.md"
BEGIN, END = "<!-- names of Ray Serve -->\n", "<!-- end -->\n"


def kept() -> list[str]:
    """Return the names that are kept in the repository."""
    return LIST.read_text().splitlines()[1:]


def works(name: str) -> bool:
    """Return whether a name is there, perhaps as another name of one that is."""
    head, _, parameter = name.rstrip(")").partition("(")
    if parameter:
        return parameter in _parameters_of(head)
    owner, _, last = head.rpartition(".")
    if (home := _home(owner)) is not None:
        return hasattr(home, last)
    return works(owner) and _has_member(_named(owner), last)


def _home(module: str) -> Any:
    try:
        return importlib.import_module(f"greenroom.serve.{module}".rstrip("."))
    except ModuleNotFoundError:
        return None


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(_home(module), name)


def _has_member(kind: Any, member: str) -> bool:
    named = ("model_fields", "__dataclass_fields__", "aliases", "__slots__")
    fields = {field for each in named for field in getattr(kind, each, ())}
    if kind is Deployment:
        fields |= BackendConfig.model_fields.keys()
    return member in fields or hasattr(kind, member)


def _parameters_of(function: str) -> Iterable[str]:
    if function in {"deployment", "Deployment.options"}:
        return GivenOptions.__annotations__
    if function.endswith(".options"):
        return [*HandleOptions.model_fields]
    return inspect.signature(_named(function)).parameters


def compared() -> tuple[set[str], set[str]]:
    """Return the names that the page says are the same, and those for which it has another."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, first, *rows, last = rest.partition(END)[0].splitlines()
    others = [row for row in rows if " | the same as " not in row]  # another name of an option
    return _names_in([first]), _names_in([*others, last.removeprefix("| of 1.x: ")])


def _names_in(rows: Iterable[str]) -> set[str]:
    return {name.strip("`") for row in rows for name in row.split(" | ")[0].strip("| ").split(", ")}


def test_each_name_works_or_the_docs_say_what_to_use():
    names = kept()
    assert len(names) > 200
    same, others = compared()
    for name in names:
        owner = name.partition("(")[0].rpartition(".")[0]
        if works(name):
            assert name not in others, name
            assert name in same or name.count(".") > 1 or "(" in name, name
        else:
            assert name in others or owner in others, name


def test_what_the_docs_say_is_the_same_is():
    same, _ = compared()
    assert [name for name in same if not works(name)] == []


def test_an_unknown_name_is_an_error_as_ever():
    with pytest.raises(AttributeError, match="has no attribute 'nonesuch'"):
        _ = serve.nonesuch
    with pytest.raises(ImportError, match="cannot import name 'Nonesuch'"):
        from greenroom.serve.config import Nonesuch  # noqa: F401, PLC0415
    with pytest.raises(TypeError, match=r"start\(\) got an unexpected .*'nonesuch'"):
        serve.start(nonesuch=1)


@pytest.mark.parametrize(
    ("use", "kind", "text"),
    [
        ("serve.start(logging_config={})", TypeError, "argument 'logging_config'"),
        ("serve.connect", AttributeError, "is in docs/migrating-from-ray-serve.md"),
        ("handle.broadcast('reset')", TypeError, r"App.broadcast with .remote\(...\), not"),
        ("handle.options(_prefer_local_routing=True)", ValueError, "no such setting; there are: m"),
        ("App.init_args", AttributeError, "Deployment has no 'init_args'"),
        ("App.options(rolling_update_percentage=1)", ValueError, "it is called max_surge_percent"),
        ("App.options(max_surge_percent=0)", ValueError, "max_surge_percent=0: must be greater"),
        ("serve.HTTPOptions(location='HeadOnly')", ValueError, "location='HeadOnly': no such"),
    ],
)
def test_a_use_is_refused_with_what_to_do(use, kind, text):
    app = serve.deployment(lambda: None)
    with pytest.raises(kind, match=text):
        eval(use, {"serve": serve, "App": app, "handle": DeploymentHandle("App")})
