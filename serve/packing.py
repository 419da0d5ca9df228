"""User code and arguments as bytes for another process, and who is to blame when that fails."""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cloudpickle

from greenroom.actors.user_code import ASGI_APP
from greenroom.core.errors import InvalidRequestError
from greenroom.serve import by_value
from greenroom.serve.app_parts import app_part
from greenroom.serve.fingerprint import PROTOCOL, fingerprint

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
) -> Code:
    """Pickle code by value; ``what`` names it in the InvalidRequestError when it cannot be."""
    by_value.add_app_dir_of(func_or_class)
    value = (func_or_class, args, kwargs)
    if wrong := _settle_annotations(func_or_class):
        raise InvalidRequestError(f"{what}: {wrong}")
    try:
        mark = fingerprint(value)  # first: it settles the ids that the pickle will have
        pickled = _dumps(value)
    except Exception as error:  # any object may refuse in any way
        roots = {func_or_class.__name__: func_or_class, **_named(args, kwargs)}
        raise InvalidRequestError(f"{what} cannot be pickled: {_blame(roots, error)}") from error
    return Code(pickled, hashlib.sha256(f"{mark} {version!r}".encode()).hexdigest())


def _settle_annotations(func_or_class: Callable[..., Any]) -> str:
    source = getattr(func_or_class, ASGI_APP, None)
    return "" if source is None else str(source.settle_annotations())


def pack_arguments(what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle the arguments of one call to ``what``."""
    if _PLAIN.issuperset(map(type, args)) and _PLAIN.issuperset(map(type, kwargs.values())):
        return pickle.dumps((args, kwargs), protocol=PROTOCOL)  # a third of cloudpickle's time
    by_value.refresh()
    try:
        pickled: bytes = cloudpickle.dumps((args, kwargs), protocol=PROTOCOL)
    except Exception as error:  # any object may refuse in any way
        blame = _blame(_named(args, kwargs), error)
        raise InvalidRequestError(f"a call to {what} cannot be pickled: {blame}") from error
    return pickled


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


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    def reducer_override(self, obj: Any) -> Any:
        reduced = app_part(obj)
        return super().reducer_override(obj) if reduced is None else reduced


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _CodePickler(buffer, protocol=PROTOCOL).dump(value)
    return buffer.getvalue()


def _can_be_pickled(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:  # any object may refuse in any way
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
