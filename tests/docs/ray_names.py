"""The public names of Ray Serve, and which of them are there.

``python -m tests.docs.ray_names ray-X.whl`` reads a wheel (``pip download --no-deps ray``), without
running it, and writes ``ray_names.txt``. docs/migrating-from-ray-serve.md has them all in a table.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from greenroom.core.config import BackendConfig
from greenroom.serve.deployments import Deployment, GivenOptions
from greenroom.serve.handle import HandleOptions

LIST = Path(__file__).with_name("ray_names.txt")
PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-ray-serve.md"
BEGIN, END = "<!-- names of Ray Serve -->\n", "<!-- end -->\n"
MARKS = ("PublicAPI", "DeveloperAPI", "Deprecated")
# Whose parameters are names that users write, too; of all classes the members are.
FUNCTIONS = {"start", "run", "run_many", "delete", "deployment", "batch", "multiplexed"}
USED = {"_blocking", "_by_reference", "_local_testing_mode", "_prefer_local_routing"}
IN_SERVE = {"api", "deployment", "batching", "multiplex", "utils"}  # modules nobody imports from


# --- From a wheel ---------------------------------------------------------------------------------


def names_in(wheel: Path) -> list[str]:
    """Return the version, then ``name``, ``module.Name``, ``.member`` and ``(parameter)``."""
    names: dict[str, None] = {}
    with zipfile.ZipFile(wheel) as files:
        paths = [p for p in files.namelist() if p.startswith("ray/serve/") and p.count("/") == 2]
        trees = {Path(p).stem: ast.parse(files.read(p)) for p in sorted(paths) if p.endswith(".py")}
    for each in _exported(trees["__init__"]):
        names[each] = None
    for module, tree in trees.items():
        for node in tree.body:
            if _is_public(node):
                names.update(dict.fromkeys(_of(module, node, tree)))
    return [f"# ray {wheel.name.split('-')[1]}", *sorted(names)]


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported: list[str] = ast.literal_eval(node.value)
            return exported
    return []


def _is_public(node: ast.stmt) -> bool:
    marks = map(ast.unparse, getattr(node, "decorator_list", ()))
    return any(mark.startswith(MARKS) for mark in marks)


def _of(module: str, node: Any, tree: ast.Module) -> Iterator[str]:
    name = node.name if module in IN_SERVE else f"{module}.{node.name}"
    yield name
    if isinstance(node, ast.ClassDef):
        bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
        parents = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in bases]
        for each in (node, *parents):
            for member in _members(each):
                yield f"{name}.{member}"
    elif node.name in FUNCTIONS:
        yield from (f"{name}({parameter})" for parameter in _parameters(node))


def _members(node: ast.ClassDef) -> Iterator[str]:
    bases = {ast.unparse(base) for base in node.bases}
    for member in node.body:
        if isinstance(member, ast.AnnAssign):
            name = ast.unparse(member.target)
        elif isinstance(member, ast.Assign) and any(base.endswith("Enum") for base in bases):
            name = ast.unparse(member.targets[0])
        elif isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            if any("validator" in ast.unparse(each) for each in member.decorator_list):
                continue
            name = member.name
            if "BaseModel" in bases:  # its methods are Ray's own
                continue
            if name == "options" and node.name != "Deployment":  # as those of deployment
                yield from (f"options({parameter})" for parameter in _parameters(member))
            if name == "__init__" and node.name == "AutoscalingContext":
                yield from _set_in(member)
        else:
            continue
        if not name.startswith("_") or name.startswith("_to_object_ref"):
            yield name


def _set_in(node: Any) -> Iterator[str]:
    for each in ast.walk(node):
        is_own = isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
        if is_own and isinstance(each.ctx, ast.Store) and not each.attr.startswith("_"):
            yield each.attr


def _parameters(node: Any) -> list[str]:
    arguments = [*node.args.args, *node.args.kwonlyargs]
    own = {"self", "func", "func_or_class"}
    names = [each.arg for each in arguments]
    return [n for n in names if n not in own and (n in USED or not n.startswith("_"))]


# --- What is there of them, and what the page says of the others ----------------------------------


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


if __name__ == "__main__":
    LIST.write_text("\n".join(names_in(Path(sys.argv[1]))) + "\n")
