"""Which modules of the user's code needs, as they travel with it.

Theory of operation. Pickles have references to modules; a replica lacks those of the user, so they
go along (actors/replica/modules.py). They are those that the code refers to and what these import,
at any depth, also within functions: read off compiled code, so that nothing is imported for it. Who
imports by names that only running code knows, by ``importlib``, takes along whatever is loaded.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import cloudpickle

from greenroom.actors.replica.modules import Module, is_users, library_dirs, with_packages

_BY_NAME = frozenset({"import_module", "__import__"})
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_NOT_USERS = sys.stdlib_module_names | {"greenroom"}

Modules = dict[str, Module]


def travels_by_value(name: str) -> bool:
    """Return whether code of a module is pickled, as nobody can import it or its user wants so."""
    registered = cloudpickle.list_registry_pickle_by_value()
    return name == "__main__" or not registered.isdisjoint(with_packages(name))


def modules_of(
    names: Iterable[str], codes: Iterable[CodeType], there: frozenset[str] = frozenset()
) -> Modules:
    """Return the modules of these names, those that ``codes`` import, and what they all import.

    ``names`` may have modules that are not the user's: these, and the modules and packages of
    ``there``, replicas have.
    """
    found: Modules = {}
    left = set(names)
    main = getattr(sys.modules.get("__main__"), "__package__", None) or ""
    for code in codes:
        left |= _names(_imports(code), main)
    seen: set[str] = set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        left.update(with_packages(name))
        module = _module(name, there)
        if module is not None:
            found[name] = module
            package = name if module.is_package else name.rpartition(".")[0]
            left |= _names(_imports_in(module.source, module.file), package)
    return dict(sorted(found.items()))


def hash_of(modules: Modules) -> str:
    """Return a hash of what the modules are, wherever they lie, unless they read their place."""
    digest = hashlib.sha256()
    for name, module in sorted(modules.items()):
        place = module.file if b"__file__" in module.source else ""
        digest.update(repr((name, module.source, place)).encode())
    return digest.hexdigest()


class _Import(NamedTuple):
    name: str
    names: tuple[str, ...]  # what is imported from it
    level: int  # the number of leading dots


_ALL = _Import("", ("*",), 0)  # whatever is loaded


def _names(imports: Iterable[_Import], package: str) -> set[str]:
    """Return the names of what may be modules, for ``from x import y`` of x.y too."""
    found: set[str] = set()
    for name, names, level in imports:
        parts = package.split(".") if level else []
        base = ".".join([*parts[: len(parts) - level + 1], *filter(None, [name])])
        below = f"{base}." if base else ""
        found.add(base)
        found |= _loaded(below) if "*" in names else {below + each for each in names}
    return found


@functools.lru_cache(maxsize=1024)  # 60 ms for 1,000 lines, and each deployment asks
def _imports_in(source: bytes, file: str) -> tuple[_Import, ...]:
    code = compile(source, file, "exec")
    return tuple(each for part in _parts(code) for each in _imports(part))


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _imports(code: CodeType) -> Iterator[_Import]:
    if not _BY_NAME.isdisjoint(code.co_names):
        yield _ALL
    if _IMPORT_NAME not in code.co_code[::2]:  # most functions import nothing
        return
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for level, names, each in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if each.opcode == _IMPORT_NAME:
            yield _Import(each.argval, names.argval or (), level.argval)


def _loaded(beginning: str) -> set[str]:
    modules = list(sys.modules.items())
    return {name for name, module in modules if name.startswith(beginning) and is_users(module)}


def _module(name: str, there: frozenset[str]) -> Module | None:
    """Return a module of the user's by its name; None where it is none, or need not travel."""
    top = name.partition(".")[0]
    if not name or top in _NOT_USERS or top in there or travels_by_value(name):
        return None
    module = sys.modules.get(name)
    file = _file_of(name) if module is None else (module.__file__ if is_users(module) else None)
    if file is None:
        return None
    path = Path(file).absolute()
    return Module(name, str(path), path.name == "__init__.py", path.read_bytes())


def _file_of(name: str) -> str | None:
    """Return the file of a module of the user's that is not imported yet, if there is one."""
    package, _, last = name.rpartition(".")
    places = [
        place / each for place in _places(package) for each in (f"{last}/__init__.py", f"{last}.py")
    ]
    return next((str(place) for place in places if place.is_file()), None)


def _places(package: str) -> list[Path]:
    """Return the folders of the user's in which the modules of a package are; "" has sys.path's."""
    if not package:
        return [Path(each) for each in sys.path if not f"{each}/".startswith(library_dirs())]
    module = sys.modules.get(package)
    if module is not None:
        return [Path(each) for each in getattr(module, "__path__", ())]
    parent, _, last = package.rpartition(".")
    return [place / last for place in _places(parent)]
