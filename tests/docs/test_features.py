"""docs/features.md is a promise: each row names a test, and each test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FEATURES = Path(__file__).parents[2] / "docs" / "features.md"
# A link to a file, then the names of tests in it, up to the next link.
LINK = re.compile(r"\[[^\]]+\]\(([^)]+)\)([^\[]*)")
NAME = re.compile(r"::([A-Za-z_]\w*)")


def rows() -> list[str]:
    lines = FEATURES.read_text().splitlines()
    return [line for line in lines if line.startswith("| **")]


def defined(path: Path) -> set[str]:
    """Return the names at the top of a module: functions, classes, and what is assigned."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[2:60])
def test_a_row_names_tests_that_are_there(row: str) -> None:
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert len(cells) == 3, "feature, what it does, what proves it"
    links = LINK.findall(cells[2])
    assert links, "nothing proves it"
    for target, rest in links:
        path = (FEATURES.parent / target).resolve()
        assert path.is_file(), target
        missing = set(NAME.findall(rest)) - defined(path)
        assert not missing, f"{target} has no {', '.join(sorted(missing))}"


def test_every_part_of_the_control_plane_has_rows() -> None:
    parts = ("Endpoints", "Backends", "Traffic", "Shadows", "Router", "Long poll")
    text = "\n".join(rows())
    assert [part for part in parts if f"**{part}**" not in text] == []
