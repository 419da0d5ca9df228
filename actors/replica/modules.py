"""Modules of the user's: which they are, and how a process has them that lacks their files.

Theory of operation. A deployment's code refers to modules of the user's by their names, and brings
them along as text (serve/code/modules.py). Here they are imported from that text, before anything
that sys.path may have by their names, as modules of the files that they were read from: tracebacks,
``inspect.getsource``, pickles of their classes and what lies beside ``__file__`` on the same host
are as they were where the code was deployed, also after the files were edited or deleted.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import linecache
import pickle
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, NamedTuple


class Module(NamedTuple):
    """A module of the user's as it travels."""

    name: str
    file: str  # where it was read
    is_package: bool
    source: bytes


def loaded(modules: Collection[Module], pickled: bytes) -> Any:
    """Load what was pickled, with the modules that it needs and this process lacks."""
    missing = {module.name: module for module in modules if module.name not in sys.modules}
    if missing:
        sys.meta_path.insert(0, _Finder(missing))
    return pickle.loads(pickled)


def with_packages(name: str) -> Iterator[str]:
    """Yield a module's name, then those of the packages that it is in."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def remember_source(file: str, source: str) -> None:
    """Let linecache show this text for the file, whatever becomes of it."""
    known = linecache.cache.get(file)
    if known is None or known[0] != len(source) or "".join(known[2]) != source:
        # Without a time of change, so that linecache never looks at the file.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)


class _Loader(SourceFileLoader):
    def __init__(self, module: Module) -> None:
        super().__init__(module.name, module.file)
        self._module = module

    def exec_module(self, module: ModuleType) -> None:
        remember_source(self._module.file, self.get_source(self._module.name) or "")
        super().exec_module(module)

    def get_data(self, path: str) -> bytes:
        return self._module.source if path == self._module.file else super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"{path} has travelled as text: what is compiled from it is not kept")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: Mapping[str, Module]) -> None:
        self._modules = modules
        packages = {package for name in modules for package in with_packages(name)}
        self._namespaces = packages - modules.keys()  # folders without an __init__.py

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self._modules.get(fullname)
        if module is not None:
            # A package has no folder here: what has not travelled is missing on every host alike.
            spec = ModuleSpec(
                fullname, _Loader(module), origin=module.file, is_package=module.is_package
            )
            spec.has_location = True
            return spec
        if fullname in self._namespaces:  # which may have an installed part as well
            return PathFinder.find_spec(fullname, path) or ModuleSpec(
                fullname, None, is_package=True
            )
        return None


# --- Which modules are the user's -----------------------------------------------------------------


def is_users(module: Any) -> bool:
    """Return whether a module is a file of the user's: not installed, not Python's, not ours."""
    if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] == "greenroom":
        return False
    file = getattr(module, "__file__", None) or ""
    return file.endswith(".py") and not file.startswith(library_dirs())


@functools.cache
def library_dirs() -> tuple[str, ...]:
    """Return the folders of Python's own and of installed modules, each with a slash."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    # A virtual environment's sysconfig names its own folders for some, the base's for others.
    bases = [sysconfig.get_paths()[name] for name in names]
    bases += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return tuple({path.rstrip("/") + "/" for path in bases})


# --- Tracebacks with the frames of user code only -------------------------------------------------


def users_traceback(error: BaseException) -> str:
    """Format ``error`` with the frames of user code and of the libraries that it called."""
    described = traceback.TracebackException.from_exception(error)
    _cut(described, _own_files(), seen=set())
    return "".join(described.format())


def _own_files() -> frozenset[str]:
    """Return the files of ours, and that by which we import the user's modules."""
    modules = list(sys.modules.items())
    ours = {str(getattr(module, "__file__", "")) for name, module in modules if _is_ours(name)}
    return frozenset(ours | {importlib.__file__})


def _is_ours(name: str) -> bool:
    return name.startswith("greenroom.")


def _cut(
    described: traceback.TracebackException | None, own: Collection[str], seen: set[int]
) -> None:
    if described is None or id(described) in seen:
        return
    seen.add(id(described))
    frames = [
        frame
        for frame in described.stack
        if frame.filename not in own and not frame.filename.startswith("<frozen importlib")
    ]
    # What is before the first frame of the user's called it on our behalf.
    users = [
        number
        for number, frame in enumerate(frames)
        if not frame.filename.startswith(library_dirs())
    ]
    described.stack[:] = frames[users[0] :] if users else frames
    for other in (described.__cause__, described.__context__):
        _cut(other, own, seen)
    for part in getattr(described, "exceptions", None) or ():
        _cut(part, own, seen)
