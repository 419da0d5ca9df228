"""The folders of core/ import in one direction."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

from greenroom import core

PREFIX = "greenroom.core."


def folders_imported(source: str) -> set[str]:
    """Return the folders of core/ that a module imports from, also where only for its types."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    modules = [f"{node.module}.{each.name}" for node in nodes for each in node.names]
    return {name.split(".")[2] for name in modules if name.startswith(PREFIX)}


def test_no_folder_imports_one_that_imports_it() -> None:
    imported: dict[str, set[str]] = defaultdict(set)
    root = Path(str(core.__file__)).parent
    for path in root.glob("*/*.py"):
        own = path.parent.name
        imported[own] |= folders_imported(path.read_text(encoding="utf-8")) - {own}
    order = list(TopologicalSorter(imported).static_order())  # raises CycleError with the ring
    assert order.index("lifecycle") < order.index("rollouts") < order.index("cluster")
