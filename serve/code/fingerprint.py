"""A hash of code and arguments that is the same in every process, so that a re-run changes nothing.

Theory of operation. The bytes that cloudpickle writes for one class differ from process to process.
So the hash is not taken of those bytes but of a second, canonical pickle, which is never loaded. In
it, whatever only the process decides is written in one way:

- which equal values happen to be one object: strings, bytes, and the aliases of ``typing`` (which
  caches them) are written out each time;
- the order of sets: by the sorted hashes of their elements;
- where the code was written: code goes without file and line numbers;
- names that the process gives: the random id by which cloudpickle tracks a class, and the address
  of an object within a text, as Pydantic's schemas and every default ``repr`` have it.

The random id also decides whether a class that comes back, that of an exception say, is the class
that was sent. A process that deploys equal code again must therefore have the ids that the running
replicas have: :func:`fingerprint` replaces those it caused by ids made of the class's own hash.
Where cloudpickle's tracker is not as we know it, the ids stay random.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as internals

from greenroom.actors.replica.pickling import PROTOCOL
from greenroom.actors.replica.user_code import named_target
from greenroom.serve.code.modules import travels_by_value
from greenroom.serve.decorators.per_instance import decorated_part

# --- Pickling parts of user code that do not pickle by themselves ---------------------------------
#
# An app travels to the replicas together with the class whose requests it answers. FastAPI's
# routers hold locks; a copy in another process gets locks of its own, and so does a cached_property
# before Python 3.12. Starlette's State cannot be unpickled. The results of functools.lru_cache,
# NewType and ParamSpec are pickled as references to their module, which replicas do not have when
# code travels by value. What serve.batch and its like make of a function would take this package's
# own code along.

_WITH_STATE = ("fastapi", "starlette", "functools")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CACHED = type(functools.lru_cache(lambda: None))


def app_part(value: Any) -> Any:
    """Return how to pickle such a part; None for anything else."""
    cls = type(value)
    if (reduced := decorated_part(value)) is not None:
        is_function = cls is types.FunctionType
        by_name = is_function and not _is_by_value(value.__module__, value.__qualname__)
        return None if by_name else reduced
    if cls is _CACHED:
        return _cached_part(value)
    if cls in (typing.NewType, typing.ParamSpec):
        of_new_type = (value.__supertype__,) if cls is typing.NewType else ()
        is_by_value = _is_by_value(value.__module__, value.__name__)
        return (cls, (value.__name__, *of_new_type)) if is_by_value else None
    if not cls.__module__.startswith(_WITH_STATE):
        return None
    state = getattr(value, "__dict__", {})
    if cls.__qualname__ == "State":  # its __getattr__ recurses while it has none
        return cls, (state["_state"],)
    return _part_with_locks(cls, state)


def deployed_reference(value: Any) -> Any:
    """Return how to pickle a deployment's class or function by its name; None where it is not.

    cloudpickle takes it for one without a name, because its module has the deployment by that name.
    """
    if not isinstance(value, type | types.FunctionType):
        return None
    if _is_by_value(value.__module__, value.__qualname__):
        return None
    module, qualname = value.__module__, value.__qualname__
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if getattr(found, "func_or_class", None) is not value:
        return None
    return named_target, (module, qualname)


def _part_with_locks(cls: type, state: dict[str, Any]) -> Any:
    locks = {name: type(part) for name, part in state.items() if isinstance(part, _LOCKS)}
    if not locks:
        return None
    names = tuple((name, kind is _LOCKS[1]) for name, kind in locks.items())
    rest = {name: part for name, part in state.items() if name not in locks}
    return with_locks, (cls, names), rest


def _cached_part(value: Any) -> Any:
    function = value.__wrapped__
    if not _is_by_value(value.__module__, value.__qualname__):
        return None
    made_with = value.cache_parameters()
    return cached, (made_with["maxsize"], made_with["typed"]), function, None, None, set_function


def _is_by_value(module: str | None, name: str) -> bool:
    return module is None or "<locals>" in name or travels_by_value(module)


class _Late:
    """A function that is known later: its globals may have the cached function itself."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def cached(maxsize: int | None, typed: bool) -> Any:
    """Make a cached function that gets what it caches by :func:`set_function`."""
    return functools.lru_cache(maxsize, typed)(_Late())


def set_function(made: Any, function: Callable[..., Any]) -> None:
    """Give a cached function what it is to call."""
    made.__wrapped__.function = function
    functools.update_wrapper(made, function)


def with_locks(cls: type, names: tuple[tuple[str, bool], ...]) -> Any:
    """Make an object that has fresh locks, and gets the rest of its state later."""
    made: Any = object.__new__(cls)
    for name, is_reentrant in names:
        setattr(made, name, threading.RLock() if is_reentrant else threading.Lock())
    return made


_ids = getattr(internals, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})
_classes = getattr(internals, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
_PLACE = ("__file__", "__path__", "__cached__", "__loader__", "__spec__", "__warningregistry__")
# In default reprs, and in Pydantic's names of classes: shop.Page:94203348761200[int:9452480];
# addresses of arguments may be low.
_ADDRESS = re.compile(
    r"( at )0x[0-9a-f]+(?=>)|((?:\.\w+|\]):)[0-9]{14,15}(?![0-9])|([\[,]\w+:)[0-9]{6,15}(?=[\],])"
)
_ID_LENGTHS = (32, 64)  # of cloudpickle's ids, and of ours
_LONGEST_TEXT = 100_000  # arguments may be large, and have no addresses then
_ALIASES: tuple[type, ...] = (types.GenericAlias, types.UnionType, type(typing.List[int]))  # noqa: UP006


def fingerprint(value: Any) -> str:
    """Return the hash of ``value``, and give the classes in it ids that depend on it alone."""
    fresh: list[Any] = []
    digest = _CanonicalPickler(fresh).digest(value)
    _assign_ids(fresh)
    return digest


def _assign_ids(classes: Iterable[Any]) -> None:
    for cls in classes:
        name = f"{cls.__module__}.{getattr(cls, '__qualname__', cls.__name__)}"
        stable = hashlib.sha256(f"{name}.{_CanonicalPickler([]).digest(cls)}".encode()).hexdigest()
        if cls in _ids and stable not in _classes:  # an equal class, alive: it keeps the id
            _classes.pop(_ids[cls], None)
            _ids[cls] = stable
            _classes[stable] = cls


def _without_addresses(text: str) -> str:
    """Take out of a text the names that its process gave."""
    if len(text) in _ID_LENGTHS and text in _classes:
        return "a tracked class"
    return _ADDRESS.sub(r"\1\2\3an address", text) if len(text) <= _LONGEST_TEXT else text


class _CanonicalPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """Writes equal values as equal bytes."""

    def __init__(self, fresh: list[Any], within: frozenset[int] = frozenset()) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=PROTOCOL)
        self._fresh = fresh  # the classes and type variables that cloudpickle began to track
        self._within = within  # ids of the sets that are being written, against cycles

    def digest(self, value: Any) -> str:
        self.dump(value)
        return hashlib.sha256(self._buffer.getvalue()).hexdigest()

    def persistent_id(self, obj: Any) -> Any:
        # Asked for every object; what is returned is written in its place, unless it is None. It is
        # a new object, so never a back reference.
        kind = type(obj)
        if kind is str:
            return b"s" + _without_addresses(obj).encode("utf-8", "surrogatepass")
        if kind is bytes:
            return b"b" + (obj if len(obj) <= _LONGEST_TEXT else hashlib.sha256(obj).digest())
        if isinstance(obj, set | frozenset | weakref.WeakSet):
            state = None if kind is weakref.WeakSet else getattr(obj, "__dict__", None)
            return kind, self._elements(obj), state
        if isinstance(obj, _ALIASES) and kind is not type:
            return kind, typing.get_origin(obj), list(typing.get_args(obj))
        return None

    def _elements(self, obj: Iterable[Any]) -> list[str]:
        if id(obj) in self._within:
            return []
        within = self._within | {id(obj)}
        return sorted(_CanonicalPickler(self._fresh, within).digest(element) for element in obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return types.CodeType, _parts_of(obj)
        if (reduced := app_part(obj) or deployed_reference(obj)) is not None:
            return reduced
        if isinstance(obj, types.ModuleType):
            return _without_place(self.dispatch_table[types.ModuleType](obj))
        if isinstance(obj, type | typing.TypeVar):
            return self._reduce_tracked(obj)
        reduced = super().reducer_override(obj)
        if isinstance(obj, types.FunctionType) and isinstance(reduced, tuple):
            reduced[2][1].pop("_cloudpickle_submodules", None)  # depends on what is imported
            return _without_place(reduced)
        return reduced

    def _reduce_tracked(self, obj: Any) -> Any:
        tracked = obj in _ids
        if isinstance(obj, type):
            reduced = super().reducer_override(obj)
            if isinstance(reduced, tuple) and len(reduced) > 2:  # by value
                reduced = _without_chance(obj, reduced)
        else:
            reduced = self.dispatch_table[typing.TypeVar](obj)
        if not tracked and obj in _ids:
            self._fresh.append(obj)
        return reduced


def _without_chance(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Take out of what describes a class what only the process decides, and line numbers."""
    maker, arguments, (attributes, slots), *rest = reduced
    attributes = dict(attributes)
    for name in ("__firstlineno__", "__slotnames__"):  # the latter: copyreg's cache
        attributes.pop(name, None)
    for name in ("__static_attributes__", "_abc_impl"):  # the latter: the registered classes
        if name in attributes:
            attributes[name] = frozenset(attributes[name])
    doc = attributes.get("__doc__")
    if "__dataclass_fields__" in attributes and str(doc).startswith(f"{cls.__name__}("):
        del attributes["__doc__"]  # made of its signature, with the reprs of sets
    return maker, arguments, (attributes, slots), *rest


def _without_place(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Take out where the module is, which cloudpickle adds to each function, and to modules.

    Another checkout of the same code is the same code. Functions that read ``__file__`` have it
    among the globals that they use as well, and there it stays.
    """
    names = reduced[1][1] if len(reduced[1]) > 1 else None
    if isinstance(names, dict):
        for name in _PLACE:
            names.pop(name, None)
    return reduced


def _parts_of(code: types.CodeType) -> tuple[Any, ...]:
    """Return what makes the code do what it does, without where it was written."""
    constants = code.co_consts
    if code.co_filename.startswith("<attrs generated"):  # which writes hash() of a name into it
        constants = tuple(part for part in constants if not isinstance(part, int))
    return (
        code.co_name,
        code.co_code,
        constants,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        getattr(code, "co_exceptiontable", b""),
    )
