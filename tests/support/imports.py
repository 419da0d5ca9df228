"""Which folders of a package import which."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType


def folders_in_order(package: ModuleType) -> list[str]:
    """Return the folders of a package, each after those that it imports; CycleError for a ring.

    Imports within functions and those for types alone count too.
    """
    imported: dict[str, set[str]] = defaultdict(set)
    for path in Path(str(package.__file__)).parent.glob("*/*.py"):
        own = path.parent.name
        source = path.read_text(encoding="utf-8")
        imported[own] |= _folders_imported(source, f"{package.__name__}.") - {own}
    return list(TopologicalSorter(imported).static_order())


def _folders_imported(source: str, prefix: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    modules = [f"{node.module}.{each.name}" for node in nodes for each in node.names]
    return {name.removeprefix(prefix).split(".")[0] for name in modules if name.startswith(prefix)}
