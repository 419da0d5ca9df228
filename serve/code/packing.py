"""User code and arguments as bytes for another process, and what to name when that fails.

Theory of operation. cloudpickle writes a class or function of an importable module as a mere
reference. Where the module is the user's, and no runtime_env has a copy of it, its text goes along
(modules.py). What nobody can import travels by value: a script's ``__main__``, a notebook, what is
defined within a function, and modules that the user gave to cloudpickle's
``register_pickle_by_value``.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

from greenroom.actors.replica.modules import Module, is_users, loaded
from greenroom.actors.replica.pickling import PROTOCOL, ByValuePickler, dumps
from greenroom.actors.replica.servable import ASGI_APP
from greenroom.core.autoscaling.settings import AutoscalingConfig, check_arguments
from greenroom.core.config import BackendConfig
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.code.fingerprint import app_part, deployed_reference, fingerprint
from greenroom.serve.code.modules import Modules, hash_of, modules_of

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
_DEPTH = 6


class Code(NamedTuple):
    """Code with its constructor's arguments, as CreateBackend and DeploymentSpec carry them."""

    alone: bytes
    modules: Modules
    hash: str

    @property
    def pickled(self) -> bytes:
        """The code with the modules that it needs."""
        return self.carrying(self.modules)

    def carrying(self, modules: Modules) -> bytes:
        """Return the code with these modules; its hash is of its own."""
        if not modules:
            return self.alone
        return pickle.dumps(_Carried(tuple(modules.values()), self.alone), protocol=PROTOCOL)


class _Carried(NamedTuple):
    modules: tuple[Module, ...]
    alone: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return loaded, tuple(self)


def pack_code(
    what: str,
    func_or_class: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    version: str | None,
    there: frozenset[str] = frozenset(),
) -> Code:
    """Pickle code; ``what`` names it in the InvalidRequestError when it cannot be.

    ``there`` are the modules and packages that the runtime_env brings.
    """
    value = (func_or_class, args, kwargs)
    if wrong := _resolve_annotations(func_or_class):
        raise InvalidRequestError(f"{what}: {wrong}")
    try:
        mark = fingerprint(value)  # first: it assigns the ids that the pickle will have
        pickler = CodePickler()
        alone = pickler.dumps(value)
        modules = modules_of(pickler.names, pickler.codes, there)
    except Exception as error:  # any object may refuse in any way
        roots = {func_or_class.__name__: func_or_class, **_named(args, kwargs)}
        problem = f"{what} cannot be pickled: {_blame(roots, error)}"
        if func_or_class.__module__ == "__main__" and isinstance(error, TypeError):
            problem += "; make it in the constructor, or deploy the script with greenroom deploy"
        raise InvalidRequestError(problem) from error
    mark += hash_of(modules) + _hash_of_installed(func_or_class)
    return Code(alone, modules, hashlib.sha256(f"{mark} {version!r}".encode()).hexdigest())


def pack_by_value(what: str, function: Callable[..., Any]) -> bytes:
    """Pickle a function for processes that may have modules of the user's in another version.

    So none goes along: what it uses of them is part of the pickle.
    """
    modules = pack_code(what, function, (), {}, None).modules
    there = [sys.modules[name] for name in modules if name in sys.modules]
    for module in there:
        cloudpickle.register_pickle_by_value(module)
    try:
        return pack_code(what, function, (), {}, None).alone
    finally:
        for module in there:
            cloudpickle.unregister_pickle_by_value(module)


def _hash_of_installed(target: Callable[..., Any]) -> str:
    """Return the hash of an installed module, of whose code a reference says nothing; else ""."""
    module = sys.modules.get(getattr(target, "__module__", None) or "__main__")
    file = Path(str(getattr(module, "__file__", None)))
    if module is None or is_users(module) or not file.is_file():
        return ""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _resolve_annotations(func_or_class: Callable[..., Any]) -> str:
    source = getattr(func_or_class, ASGI_APP, None)
    return "" if source is None else str(source.resolve_annotations())


def pack_arguments(what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle the arguments of one call to ``what``."""
    if _PLAIN.issuperset(map(type, args)) and _PLAIN.issuperset(map(type, kwargs.values())):
        return pickle.dumps((args, kwargs), protocol=PROTOCOL)  # a third of cloudpickle's time
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


class CodePickler(ByValuePickler):
    """Pickles code with all that travels with it; knows afterwards which modules that needs."""

    has_source = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.names: set[str] = set()  # of modules that the code refers to
        self.codes: list[CodeType] = []  # what travels by value

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle ``obj``; NotImplemented for pickle's own way."""
        if isinstance(obj, CodeType):
            self.codes.append(obj)
        elif isinstance(obj, ModuleType):
            self.names.add(obj.__name__)
        elif isinstance(module := getattr(obj, "__module__", None), str):
            self.names.add(module)
        reduced = app_part(obj) or deployed_reference(obj)
        return super().reducer_override(obj) if reduced is None else reduced


def _can_be_pickled(value: Any) -> bool:
    try:
        CodePickler().dumps(value)
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
    if scaling is not None and scaling.policy.is_custom and scaling.policy.named is None:
        changes["autoscaling_config"] = _with_policy(f"the autoscaling policy of {what}", scaling)
    if router is not None and not router.code:
        place = f"the request router of {what}"
        given = _found(place, "request_router_class", router.request_router_class, "class")
        packed_code = _packed_code(place, "request_router_class", given)
        changes["request_router_config"] = router.model_copy(update=packed_code)
    return config.model_copy(update=changes) if changes else config


def packed_changes(what: str, config: BackendConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that ``config`` gives, validated, and no others."""
    if isinstance(config, BackendConfig):
        return packed(what, config).model_dump(exclude_unset=True)
    made = packed(what, BackendConfig().updated(config))
    names = {"autoscaling_config" if config[n] == "auto" else n for n in config}
    return {name: value for name, value in made.model_dump().items() if name in names}


def _with_policy(place: str, scaling: AutoscalingConfig) -> AutoscalingConfig:
    policy = scaling.policy
    if policy.code:  # packed before
        return scaling
    given = _found(place, "policy_function", policy.policy_function, "function")
    try:
        check_arguments(given, policy.policy_kwargs)
    except TypeError as error:
        raise InvalidRequestError(f"{place}: policy_kwargs: {error}") from None
    policy = policy.model_copy(update=_packed_code(place, "policy_function", given))
    return scaling.model_copy(update={"policy": policy})


def _found(what: str, setting: str, given: Any, kind: str) -> Any:
    """Return a function or class of the user's, which may be given by its import path."""
    place = f"{what}: {setting}={_short(given)}"
    if isinstance(given, str):
        given = _imported(place, given)
    if not callable(given) or not hasattr(given, "__name__"):
        raise InvalidRequestError(f"{place} is no {kind}")
    if kind == "class" and not (inspect.isclass(given) and hasattr(given, "choose_replicas")):
        raise InvalidRequestError(f"{place} is no serve.request_router.RequestRouter")
    return given


def _packed_code(what: str, setting: str, found: Any) -> dict[str, Any]:
    """Return the fields of a UserCode for it."""
    code = pack_code(what, found, (), {}, None)
    name = f"{found.__module__}.{getattr(found, '__qualname__', found.__name__)}"
    return {setting: name, "code": code.pickled, "code_hash": code.hash}


def _imported(what: str, path: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(f"{what} cannot be imported: {error}") from error
