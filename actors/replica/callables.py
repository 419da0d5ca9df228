"""How methods of user code are to be called, and which of them HTTP requests may name.

Each method is inspected only once, because that takes 10 us.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Collection
from types import ModuleType
from typing import Any, NamedTuple

from greenroom.core.validation import HOOKS


class Manner(NamedTuple):
    """How to call one function or method; what ``makes_generator`` then runs no user code yet."""

    takes_argument: bool
    is_async: bool
    makes_generator: bool

    @classmethod
    def of(cls, function: Any) -> Manner:
        """Look at ``function``."""
        generates = inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)
        return cls(_takes_argument(function), is_async(function), generates)


def is_async(function: Any) -> bool:
    """Return whether calling it gives an awaitable that runs it."""
    if inspect.iscoroutinefunction(function):
        return True
    if inspect.isfunction(function) or inspect.ismethod(function):
        return False
    call = getattr(type(function), "__call__", None)  # noqa: B004  # an instance's may be async
    return inspect.iscoroutinefunction(call)


def _takes_argument(function: Any) -> bool:
    try:
        return len(inspect.signature(function).parameters) > 0
    except (TypeError, ValueError):  # some callables in C have no signature
        return True


def http_methods(cls: type) -> frozenset[str]:
    """Return the methods that HTTP requests may name in X-Serve-Call-Method.

    These are the public functions (also async, generating, static or of the class) that the class,
    or a base of the user's, defines: nothing that comes from Python or an installed package, no
    callable attribute, no hook of the replica's.
    """
    methods: dict[str, bool] = {}
    for base in cls.__mro__:
        is_users = base is cls or _is_users_base(base, cls)
        for name, value in vars(base).items():
            methods.setdefault(name, is_users and _is_def(value))  # the first one is what is called
    public = {name for name, may in methods.items() if may and not name.startswith("_")}
    return frozenset(public - HOOKS)


def _is_def(value: Any) -> bool:
    is_wrapped = isinstance(value, staticmethod | classmethod)
    return inspect.isfunction(value.__func__ if is_wrapped else value)


def _is_users_base(base: type, cls: type) -> bool:
    package = base.__module__.partition(".")[0]
    if package in {"__main__", cls.__module__.partition(".")[0]}:
        return True
    module = sys.modules.get(base.__module__)
    return module is None or is_users(module)  # what is not there has come by value


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
