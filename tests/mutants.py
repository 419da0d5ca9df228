"""Small defects put into the code, one at a time, and whether the tests of its folder find them.

    python -m tests.mutants core/rollouts --count 40          # tox -e mutants -- core/rollouts
    python -m tests.mutants core/routing/leases.py --seed 7
    python -m tests.mutants core/jobs.py --tests tests/core/test_jobs.py tests/serve/tasks

A defect is a comparison that is off by one or turned round, a condition negated, "and" for "or", a
number one higher, plus for minus, or a statement left out. They are drawn at random from the syntax
trees of the modules, in proportion to their size. What no test fails for is printed as a
difference, for a reader to judge: a test is missing, or the code is not needed, or the two do the
same. The exit code is 0 unless the tests fail without any defect. Only copies are changed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("actors", "core", "http_front", "persistence", "serve")
_ORDER: dict[type[Any], type[Any]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_LEFT_OUT = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)
_NO_CODE = {"annotation", "returns", "decorator_list", "bases"}


class Defect(NamedTuple):
    """One place, ``number`` in the order of the tree, of a module below the root."""

    module: Path
    number: int


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _places(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that can be changed, always in the same order; none is an annotation."""
    for name, value in ast.iter_fields(tree):
        if name in _NO_CODE:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                if _can_change(child):
                    yield child
                yield from _places(child)


def _can_change(node: ast.AST) -> bool:
    match node:
        case ast.Compare(ops=[only]):
            return type(only) in _ORDER
        case ast.BoolOp(op=op) | ast.BinOp(op=op):
            return type(op) in _ORDER
        case ast.Constant(value=value):
            return isinstance(value, int | float)
        case ast.If() | ast.While() | ast.IfExp():
            return True
        case ast.Assign(targets=[ast.Name()]):
            return False  # a name that is missing is found by anything
    return isinstance(node, _LEFT_OUT) and not _is_docstring(node)


def _change(node: Any) -> None:
    """Put a defect at a node, in place."""
    match node:
        case ast.Compare():
            node.ops = [_ORDER[type(node.ops[0])]()]
        case ast.BoolOp() | ast.BinOp():
            node.op = _ORDER[type(node.op)]()
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant():
            node.value += 1
        case ast.If() | ast.While() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case _:
            node.__class__ = ast.Pass


def changed(text: str, number: int) -> str:
    """Return a module's text with the defect of that number, without its comments."""
    tree = ast.parse(text)
    _change(list(_places(tree))[number])
    return ast.unparse(ast.fix_missing_locations(tree))


def defects(modules: list[Path]) -> list[Defect]:
    """Return all that can be put into these modules."""
    return [
        Defect(module, number)
        for module in modules
        for number, _ in enumerate(_places(ast.parse((ROOT / module).read_text())))
    ]


def modules_of(paths: list[str]) -> list[Path]:
    """Return the modules that are named, or are in the folders that are."""
    found: list[Path] = []
    for path in (ROOT / path for path in paths):
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [module.relative_to(ROOT) for module in found if "__init__" not in module.name]


def tests_of(module: Path) -> str:
    """Return the smallest folder of tests for a module."""
    return next(
        str(Path("tests") / folder)
        for folder in module.parents
        if folder.parts and (ROOT / "tests" / folder).is_dir()
    )


class Copy:
    """The product's modules in a folder that is imported in place of what is installed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "greenroom"
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self._folder / name)
        self._environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def passes(self, tests: list[str], timeout_s: float | None) -> bool:
        """Return whether these tests pass, in time."""
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *tests]
        try:
            ended = subprocess.run(
                command,
                cwd=ROOT,
                env=self._environ,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return ended.returncode == 0

    def has(self, defect: Defect, tests: list[str], timeout_s: float) -> str:
        """Try a defect; return its difference when no test finds it, "" when one does."""
        path = self._folder / defect.module
        text = path.read_text()
        worse = changed(text, defect.number)
        path.write_text(worse)
        try:
            is_found = not self.passes(tests, timeout_s)
        finally:
            path.write_text(text)
        plain = ast.unparse(ast.parse(text))
        lines = difflib.unified_diff(plain.splitlines(), worse.splitlines(), lineterm="", n=2)
        return "" if is_found else "\n".join(line for line in lines if not line.startswith("@@"))


def main() -> None:
    """Try defects, and print those that no test finds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=["core"], help="modules, or folders of them")
    parser.add_argument("--tests", nargs="+", help="what runs; by default the folder's tests")
    parser.add_argument("--count", type=int, default=40, help="of defects")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if missing := [path for path in asked.paths if not (ROOT / path).exists()]:
        parser.error(f"no such module or folder: {', '.join(missing)}")
    known = defects(modules_of(asked.paths))
    drawn = random.Random(asked.seed).sample(known, min(asked.count, len(known)))
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        took_s: dict[str, float] = {}
        for defect in sorted(drawn):
            tests = asked.tests or [tests_of(defect.module)]
            if (key := " ".join(tests)) not in took_s:
                begun = time.monotonic()
                if not copy.passes(tests, None):
                    sys.exit(f"{key}: these tests fail without any defect")
                took_s[key] = time.monotonic() - begun
            if difference := copy.has(defect, tests, 30 + 5 * took_s[key]):
                survivors += 1
                print(f"{defect.module}\n{difference}\n", flush=True)
    print(f"{len(drawn) - survivors} of {len(drawn)} defects found, of {len(known)} that there are")


if __name__ == "__main__":
    main()
