"""User code and arguments as bytes for another process, and what to name when that fails.

Theory of operation. cloudpickle writes a class or function of an importable module as a mere
reference. A replica has another sys.path, so the modules of the user's application must travel by
value. The application's folders are those of its deployments' top-level packages or modules, and
the script's own; every ``.py`` module loaded from such a folder is registered with cloudpickle, for
good. Installed packages, the standard library and Greenroom itself stay references. Folders are
only added, and modules imported since the last call are found by the count of modules.

What replicas have a copy of, by a runtime_env, travels as references, and is imported there. Code
that cannot travel by value, because its module has a lock or a pool, is treated as if it had such
an environment: :func:`pack_target` adds the modules of its folder.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle

from greenroom.actors.replica.callables import is_users
from greenroom.actors.replica.pickling import PROTOCOL, ByValuePickler, dumps
from greenroom.actors.replica.user_code import ASGI_APP
from greenroom.core.config import BackendConfig
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.code.fingerprint import app_part, deployed_reference, fingerprint
from greenroom.serve.code.runtime_env import PackedEnv, with_modules

_app_dirs: set[Path] = set()
_sent: frozenset[Path] = frozenset()
_seen_modules = 0


def add_app_dir_of(target: Any, sent: frozenset[Path] = frozenset()) -> None:
    """Take the folder of the application that defines ``target`` as one that replicas lack.

    Modules in the folders of ``sent`` travel as references, for these replicas have a copy.
    """
    global _seen_modules, _sent  # noqa: PLW0603 - one registry per process, as cloudpickle's own
    known = _sent, len(_app_dirs)
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    if module is not None and is_users(module):
        _app_dirs.add(_app_dir(module))
    _sent = sent
    if known != (_sent, len(_app_dirs)):
        _seen_modules = 0
    refresh()


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
        # Links are followed only where there is something to find: that asks the disk.
        if _sent and not _sent.isdisjoint(Path(str(module.__file__)).resolve().parents):
            if name in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)
        elif _is_in_app_dirs(module):
            cloudpickle.register_pickle_by_value(module)


def _is_in_app_dirs(module: ModuleType) -> bool:
    return any(folder in _file_of(module).parents for folder in _app_dirs)


def _file_of(module: ModuleType) -> Path:
    # ``python ../main.py`` leaves the dots in __file__, and not in those of the modules beside it.
    return Path(os.path.abspath(str(module.__file__)))


def _app_dir(module: ModuleType) -> Path:
    """Return the folder that has to be on sys.path for the module to be importable."""
    spec = module.__spec__  # of ``python -m``, it has the name that __main__ hides
    name = spec.name if spec is not None else module.__name__
    file = _file_of(module)
    depth = name.count(".") + (file.name == "__init__.py")
    return file.parents[min(depth, len(file.parents) - 1)]


_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
_DEPTH = 6


class Code(NamedTuple):
    """Code with its constructor's arguments, as CreateBackend and DeploymentSpec carry them."""

    pickled: bytes
    hash: str


def pack_code(
    what: str,
    func_or_class: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    version: str | None,
    sent: frozenset[Path] = frozenset(),
) -> Code:
    """Pickle code by value; ``what`` names it in the InvalidRequestError when it cannot be.

    ``sent`` are the folders that replicas have a copy of.
    """
    add_app_dir_of(func_or_class, sent)
    value = (func_or_class, args, kwargs)
    if wrong := _settle_annotations(func_or_class):
        raise InvalidRequestError(f"{what}: {wrong}")
    try:
        mark = fingerprint(value)  # first: it settles the ids that the pickle will have
        pickled = _dumps(value)
    except Exception as error:  # any object may refuse in any way
        roots = {func_or_class.__name__: func_or_class, **_named(args, kwargs)}
        raise InvalidRequestError(f"{what} cannot be pickled: {_blame(roots, error)}") from error
    mark += _hash_of_installed(func_or_class)
    return Code(pickled, hashlib.sha256(f"{mark} {version!r}".encode()).hexdigest())


def _hash_of_installed(target: Callable[..., Any]) -> str:
    """Return the hash of an installed module, of whose code a reference says nothing; else ""."""
    module = sys.modules.get(getattr(target, "__module__", None) or "__main__")
    file = Path(str(getattr(module, "__file__", None)))
    if module is None or is_users(module) or not file.is_file():
        return ""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def pack_target(
    what: str,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    version: str | None,
    env: PackedEnv,
) -> tuple[Code, PackedEnv]:
    """Pickle code for replicas with an environment; return it with the environment that it needs.

    That has the modules of the code's own folder besides, where the code cannot travel by value.
    Raises InvalidRequestError naming what is in the way.
    """
    try:
        return pack_code(what, target, args, kwargs, version, env.paths), env
    except InvalidRequestError:
        folder = _importable_from(target)
        if folder is None or folder in env.paths:
            raise
        try:
            code = pack_code(what, target, args, kwargs, version, env.paths | {folder})
        except InvalidRequestError:
            code = None  # an argument, say, cannot be pickled either way
        if code is None:
            raise
        return code, with_modules(env, folder)


def _importable_from(target: Callable[..., Any]) -> Path | None:
    """Return the folder of the user's from which code can be imported by its name, if there is."""
    module = sys.modules.get(getattr(target, "__module__", None) or "__main__")
    is_named = "<locals>" not in getattr(target, "__qualname__", "<locals>")
    if module is None or module.__name__ == "__main__" or not (is_named and is_users(module)):
        return None
    return _app_dir(module).resolve()


def _settle_annotations(func_or_class: Callable[..., Any]) -> str:
    source = getattr(func_or_class, ASGI_APP, None)
    return "" if source is None else str(source.settle_annotations())


def pack_arguments(what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle the arguments of one call to ``what``."""
    if _PLAIN.issuperset(map(type, args)) and _PLAIN.issuperset(map(type, kwargs.values())):
        return pickle.dumps((args, kwargs), protocol=PROTOCOL)  # a third of cloudpickle's time
    refresh()
    try:
        return dumps((args, kwargs))
    except Exception as error:  # any object may refuse in any way
        blame = _blame(_named(args, kwargs), error)
        raise InvalidRequestError(f"a call to {what} cannot be pickled: {blame}") from error


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {f"argument {number}": value for number, value in enumerate(args, 1)} | {
        f"argument {name!r}": value for name, value in kwargs.items()
    }


def _blame(roots: dict[str, Any], error: Exception) -> str:
    for name, value in roots.items():
        if not _can_be_pickled(value):
            path, culprit = _culprit(name, value, _DEPTH)
            return f"{path} is {_short(culprit)} ({type(error).__name__}: {error})"
    return f"{type(error).__name__}: {error}"


def _culprit(path: str, value: Any, depth: int) -> tuple[str, Any]:
    """Follow the parts that cannot be pickled down to the smallest that we can name."""
    if depth:
        for step, part in _parts(value):
            if not _can_be_pickled(part):
                return _culprit(f"{path}{step}", part, depth - 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif inspect.isfunction(value):
        names = inspect.getclosurevars(value)
        variables = {**names.globals, **names.nonlocals}
        yield from ((f", which uses {name},", part) for name, part in variables.items())
    elif not inspect.ismodule(value):
        attributes = getattr(value, "__dict__", {})
        skip = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__")
        yield from ((f".{name}", part) for name, part in attributes.items() if name not in skip)


class _CodePickler(ByValuePickler):
    has_source = True

    def reducer_override(self, obj: Any) -> Any:
        reduced = app_part(obj) or deployed_reference(obj)
        return super().reducer_override(obj) if reduced is None else reduced


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _CodePickler(buffer).dump(value)
    return buffer.getvalue()


def _can_be_pickled(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:  # any object may refuse in any way
        return False
    return True


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # the user's may raise anything, and the error is about another thing
        text = object.__repr__(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- Code of the user's in settings: autoscaling policies and request routers ---------------------


def packed(what: str, config: BackendConfig) -> BackendConfig:
    """Return a config whose code of the user's travels by value; ``what`` owns it, in errors."""
    changes: dict[str, Any] = {}
    scaling, router = config.autoscaling_config, config.request_router_config
    if scaling is not None and scaling.policy.is_custom and not scaling.policy.code:
        told = f"the autoscaling policy of {what}"
        given = scaling.policy.policy_function
        packed_code = _packed_code(told, "policy_function", given, "function")
        policy = scaling.policy.model_copy(update=packed_code)
        changes["autoscaling_config"] = scaling.model_copy(update={"policy": policy})
    if router is not None and not router.code:
        told = f"the request router of {what}"
        given = router.request_router_class
        packed_code = _packed_code(told, "request_router_class", given, "class")
        changes["request_router_config"] = router.model_copy(update=packed_code)
    return config.model_copy(update=changes) if changes else config


def packed_changes(what: str, config: BackendConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that ``config`` gives, validated, and no others."""
    if isinstance(config, BackendConfig):
        return packed(what, config).model_dump(exclude_unset=True)
    made = packed(what, BackendConfig().updated(config))
    names = {"autoscaling_config" if config[n] == "auto" else n for n in config}
    return {name: value for name, value in made.model_dump().items() if name in names}


def _packed_code(what: str, setting: str, given: Any, kind: str) -> dict[str, Any]:
    """Return the fields of a UserCode for a function or class, or for its import path."""
    told = f"{what}: {setting}={_short(given)}"
    if isinstance(given, str):
        given = _imported(told, given)
    if not callable(given) or not hasattr(given, "__name__"):
        raise InvalidRequestError(f"{told} is no {kind}")
    if kind == "class" and not (inspect.isclass(given) and hasattr(given, "choose_replicas")):
        raise InvalidRequestError(f"{told} is no serve.request_router.RequestRouter")
    code = pack_code(what, given, (), {}, None)
    name = f"{given.__module__}.{getattr(given, '__qualname__', given.__name__)}"
    return {setting: name, "code": code.pickled, "code_hash": code.hash}


def _imported(what: str, path: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(f"{what} cannot be imported: {error}") from error
