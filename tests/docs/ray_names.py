"""The public names of Ray Serve, and what is said of each here.

``python -m tests.docs.ray_names ray-X.whl`` reads a wheel (``pip download --no-deps ray``), without
running it, and writes ``ray_names.txt`` and the table in docs/migrating-from-ray-serve.md. Without
an argument it only writes the table.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from greenroom.core.config import BackendConfig
from greenroom.serve import absent
from greenroom.serve.deployments import HINTS, Deployment, GivenOptions
from greenroom.serve.handle import HandleOptions

LIST = Path(__file__).with_name("ray_names.txt")
PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-ray-serve.md"
BEGIN, END = "<!-- names of Ray Serve: python -m tests.docs.ray_names -->\n", "<!-- end -->\n"
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


# --- What is said of them here --------------------------------------------------------------------


def kept() -> list[str]:
    """Return the names that are kept in the repository."""
    return LIST.read_text().splitlines()[1:]


def told(name: str) -> str:
    """Return what is used instead of a name; "" for one that works. LookupError for neither."""
    head, _, parameter = name.rstrip(")").partition("(")
    module, _, rest = head.rpartition(".") if head.count(".") < 2 else head.partition(".")
    if parameter:
        return _of_parameter(head, parameter)
    if module[:1].isupper():
        return _of_member("", module, rest)
    if "." in rest:
        owner, member = rest.split(".")
        return _of_name(module, owner) or _of_member(module, owner, member)
    return _of_name(module, rest)


def _of_name(module: str, name: str) -> str:
    if module in absent.MODULES:
        return absent.MODULES[module]
    home = importlib.import_module(f"greenroom.serve.{module}".rstrip("."))
    try:
        getattr(home, name)
    except (AttributeError, ImportError) as error:
        return _instead(str(error), name)
    return ""


def _of_member(module: str, owner: str, member: str) -> str:
    home = importlib.import_module(f"greenroom.serve.{module}".rstrip("."))
    kind = getattr(home, owner)
    fields = {*getattr(kind, "model_fields", ()), *getattr(kind, "__dataclass_fields__", ())}
    if member in fields or hasattr(kind, member) or member in getattr(kind, "__slots__", ()):
        return ""
    if field := getattr(kind, "aliases", {}).get(member):
        return f"the same as {field}"
    if kind is Deployment and member in BackendConfig.model_fields:
        return ""
    hints = {**absent.NAMES.get(owner, {}), **getattr(kind, "hints", {})}
    return str(hints[member])


def _of_parameter(function: str, parameter: str) -> str:
    if function == "deployment":
        if field := BackendConfig.aliases.get(parameter):
            return f"the same as {field}"
        return "" if parameter in GivenOptions.__annotations__ else HINTS[parameter]
    if function.endswith(".options"):
        if function.startswith("Deployment."):
            return _of_parameter("deployment", parameter)
        fields = {each.name for each in dataclasses.fields(HandleOptions)}
        return "" if parameter in fields else absent.NAMES["DeploymentHandle.options()"][parameter]
    called = getattr(importlib.import_module("greenroom.serve"), function)
    if parameter in inspect.signature(called).parameters:
        return ""
    return absent.NAMES[f"{function}()"][parameter]


def _instead(text: str, name: str) -> str:
    _, found, instead = text.partition(f"there is no {name}; instead: ")
    if not found:
        raise LookupError(f"{name}: {text}")
    return instead


# --- The table ------------------------------------------------------------------------------------


def table() -> str:
    """Return the table of all names: those that work, and the others by what replaces them."""
    works: list[str] = []
    others: dict[str, list[str]] = {}
    for name in kept():
        instead, owner = told(name), name.rpartition(".")[0]
        if instead and "(" not in name and "." in owner and told(owner):
            continue  # its class is there already, with the same text
        if instead:
            others.setdefault(instead, []).append(f"`{name}`")
        elif name.count(".") < 2 and "(" not in name:
            works.append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {text} |" for text, names in others.items()]
    same = "the same, with all parameters and members that are not below"
    head = ["| Ray Serve | here |", "|---|---|", f"| {', '.join(works)} | {same} |"]
    once = ", ".join(f"`{name}`" for name in absent.OF_1)
    last = f"| of 1.x: {once} | an error that names what to use |"
    return "\n".join([*head, *rows, last, ""])


def main() -> None:
    """Write the names of a wheel, and the table."""
    if len(sys.argv) > 1:
        LIST.write_text("\n".join(names_in(Path(sys.argv[1]))) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
