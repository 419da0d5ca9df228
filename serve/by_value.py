"""Which modules' classes and functions travel by value, because a replica cannot import them.

Theory of operation. cloudpickle writes what an importable module defines as a mere reference. A
replica runs elsewhere, with another sys.path, so the modules of the user's application must travel
whole. The application's folder is where its deployments' top-level package or module lies (and the
script's own folder); every ``.py`` module loaded from such a folder is registered with cloudpickle,
for good. Installed packages, the standard library and Greenroom itself stay references. Folders
only ever get added, and modules that were imported since are found when the count of modules has
changed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from greenroom.actors.callables import is_users

_app_dirs: set[Path] = set()
_working_dirs: set[Path] = set()
_seen_modules = 0


def add_app_dir_of(target: Any) -> None:
    """Take the folder of the application that defines ``target`` as one that replicas lack."""
    global _seen_modules  # noqa: PLW0603  # one registry per process, as cloudpickle's own
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    if module is not None and is_users(module):
        _app_dirs.add(_app_dir(module))
    _seen_modules = 0
    refresh()


def add_working_dir(folder: Path) -> None:
    """Have what can be imported from a folder travel as references: replicas have the folder."""
    global _seen_modules  # noqa: PLW0603
    _working_dirs.add(folder.resolve())
    _seen_modules = 0


def refresh() -> None:
    """Register the modules of the application folders that were imported since the last call."""
    global _seen_modules  # noqa: PLW0603
    if _seen_modules == len(sys.modules):
        return
    main = sys.modules.get("__main__")
    if main is not None and is_users(main):
        _app_dirs.add(_app_dir(main))
    _seen_modules = len(sys.modules)
    for name, module in list(sys.modules.items()):
        if not (is_users(module) and module.__name__ == name):
            continue
        if _app_dir(module) in _working_dirs:
            if name in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)
        elif _is_in_app_dirs(module):
            cloudpickle.register_pickle_by_value(module)


def _is_in_app_dirs(module: ModuleType) -> bool:
    file = Path(str(module.__file__))
    return any(folder in file.parents for folder in _app_dirs)


def _app_dir(module: ModuleType) -> Path:
    """Return the folder that has to be on sys.path for the module to be importable."""
    spec = module.__spec__  # of ``python -m``, it has the name that __main__ hides
    name = spec.name if spec is not None else module.__name__
    file = Path(str(module.__file__))
    depth = name.count(".") + (file.name == "__init__.py")
    return file.parents[min(depth, len(file.parents) - 1)]
