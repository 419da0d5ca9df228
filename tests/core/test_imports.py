"""The folders of core/ import in one direction, and nothing that has effects or a clock."""

from __future__ import annotations

import ast
from pathlib import Path

from greenroom import core
from tests.support.imports import folders_in_order

# Ids of what it makes are drawn by ``secrets``, as greenroom.core says.
HAS_EFFECTS = {
    *("asyncio", "fcntl", "logging", "multiprocessing", "os", "random", "select", "shutil"),
    *("signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid"),
}


def test_no_folder_imports_one_that_imports_it() -> None:
    order = folders_in_order(core)
    assert order.index("lifecycle") < order.index("rollouts") < order.index("cluster")


def test_it_has_no_clock_no_effects_and_no_chance_but_for_ids() -> None:
    modules = list(Path(core.__path__[0]).rglob("*.py"))
    assert len(modules) > 50
    imported = {(path.name, name) for path in modules for name in _imported(path)}
    assert not {(path, name) for path, name in imported if name in HAS_EFFECTS}


def _imported(path: Path) -> set[str]:
    """Return the first names of what a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found
