"""Modules of the user's in a process that has none of their files.

Theory of operation. A deployment's code refers to modules of the user's by their names, and brings
them along as text (serve/code/modules.py). Here they are imported from that text, before anything
that sys.path may have by their names, as modules of the files that they were read from: tracebacks,
``inspect.getsource``, pickles of their classes and what lies beside ``__file__`` on the same host
are as they were where the code was deployed, also after the files were edited or deleted.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import linecache
import pickle
import sys
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
