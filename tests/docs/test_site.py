"""The site: each page is in its menu, and the reference has every public name."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import yaml

from greenroom import serve

ROOT = Path(__file__).parents[2]
MODULES = ("config", "context", "exceptions", "request_router", "schema")
# Other names of what is there, and what the documentation tells of elsewhere.
ELSEWHERE = {"CONTENT_TYPE", "ContextFilter", "InvalidDocumentError", "RayServeException", "text"}
ELSEWHERE |= {"EncodingType", "gRPCOptions", "gRPCStatusError", "read_document"}
TARGET = re.compile(r"^::: (\S+)\n(?:    options:\n      members: \[(.*)\]\n)?", re.MULTILINE)


def pages(menu: Any) -> list[str]:
    """Return all pages of a menu."""
    if isinstance(menu, str):
        return [menu]
    parts = menu.values() if isinstance(menu, dict) else menu
    return [page for part in parts for page in pages(part)]


def documented() -> set[str]:
    """Return the names that the reference has."""
    names: set[str] = set()
    for target, members in TARGET.findall((ROOT / "docs" / "reference.md").read_text()):
        module, _, name = target.rpartition(".")
        if members:
            home = importlib.import_module(target)
            found = members.split(", ")
            assert all(hasattr(home, each) for each in found), (target, found)
        elif name[0].isupper() or hasattr(importlib.import_module(module), name):
            found = [name]
            try:
                found += dir(importlib.import_module(target))
            except ImportError:
                assert hasattr(importlib.import_module(module), name), target
        else:
            found = dir(importlib.import_module(target))
        names.update(found)
    return names


def names_in(module: str) -> set[str]:
    """Return what a module passes on, and what it defines."""
    tree = ast.parse((ROOT / "serve" / f"{module}.py").read_text())
    passed_on = [each for node in tree.body for each in getattr(node, "names", ())]
    names = {each.name for each in passed_on if each.name == each.asname}
    names |= {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return {name for name in names if not name.startswith("_")}


def test_every_page_is_in_the_menu_once():
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages(menu)) == sorted(page.name for page in ROOT.glob("docs/*.md"))


def test_the_reference_has_every_public_name():
    names = documented()
    public = {*serve.__all__}.union(*map(names_in, MODULES))
    assert public - names - ELSEWHERE == set()


def test_the_home_page_has_every_extra():
    setup = (ROOT / "setup.py").read_text()
    extras = set(
        re.findall(r'"(\w+)": \[', setup.partition("extras_require=")[2].partition("entry")[0])
    )
    found = set(
        re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    )
    assert {"all", "grpc"} <= extras == found
