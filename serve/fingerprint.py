"""A hash of code and arguments that is the same in every process, so that a re-run changes nothing.

Theory of operation. The bytes that cloudpickle writes for one class differ from process to process:
a random id per class, the order of sets, and which equal strings happen to be one object. So the
hash is not taken of those bytes but of a second, canonical pickle, which is never loaded: strings
are always written out, sets by the sorted hashes of their elements, code without file and line
numbers.

The random id (cloudpickle's "class tracker") also decides whether a class that comes back, that of
an exception say, is the class that was sent. A process that deploys equal code again must therefore
have the ids that the running replicas have: :func:`fingerprint` replaces those it caused by ids
made of the class's own hash. Where cloudpickle's tracker is not as we know it, the ids stay random.
"""

from __future__ import annotations

import hashlib
import io
import types
from collections.abc import Iterable
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as internals

from greenroom.serve.app_parts import app_part

PROTOCOL = 5
_ids = getattr(internals, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})
_classes = getattr(internals, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
_PLACE = ("__file__", "__path__", "__cached__", "__loader__", "__spec__")
_SKELETONS = ("_make_skeleton_class", "_make_skeleton_enum")


def fingerprint(value: Any) -> str:
    """Return the hash of ``value``, and give the classes in it ids that depend on it alone."""
    canonical = _CanonicalPickler()
    digest = canonical.digest(value)
    _settle_ids(canonical.fresh)
    return digest


def _settle_ids(classes: Iterable[type]) -> None:
    for cls in classes:
        digest = _CanonicalPickler().digest(cls)
        stable = hashlib.sha256(
            f"{cls.__module__}.{cls.__qualname__}.{digest}".encode()
        ).hexdigest()
        if cls in _ids and stable not in _classes:  # an equal class, alive: it keeps the id
            _classes.pop(_ids[cls], None)
            _ids[cls] = stable
            _classes[stable] = cls


class _CanonicalPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """Writes equal values as equal bytes; ``fresh`` are the classes it made cloudpickle track."""

    def __init__(self, within: frozenset[int] = frozenset()) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=PROTOCOL)
        self._within = within  # ids of the sets that are being written, against cycles
        self.fresh: list[type] = []

    def digest(self, value: Any) -> str:
        self.dump(value)
        return hashlib.sha256(self._buffer.getvalue()).hexdigest()

    def persistent_id(self, obj: Any) -> Any:
        # Asked for every object; what is returned is written in its place, unless it is None.
        kind = type(obj)
        if kind is str:
            return obj.encode("utf-8", "surrogatepass")  # a new object, so never a back reference
        if kind is set or kind is frozenset:
            return kind.__name__, self._elements(obj)
        return None

    def _elements(self, obj: Any) -> list[str]:
        if id(obj) in self._within:
            return []
        within = self._within | {id(obj)}
        digests = []
        for element in obj:
            nested = _CanonicalPickler(within)
            digests.append(nested.digest(element))
            self.fresh += nested.fresh
        return sorted(digests)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return types.CodeType, _parts_of(obj)
        if (reduced := app_part(obj)) is not None:
            return reduced
        if isinstance(obj, types.ModuleType):
            return _without_place(self.dispatch_table[types.ModuleType](obj))
        tracked = isinstance(obj, type) and obj in _ids
        reduced = super().reducer_override(obj)
        if isinstance(obj, types.FunctionType) and isinstance(reduced, tuple):
            return _without_place(reduced)
        if isinstance(reduced, tuple) and getattr(reduced[0], "__name__", "") in _SKELETONS:
            if not tracked:
                self.fresh.append(obj)
            return self._without_id(reduced)
        return reduced

    @staticmethod
    def _without_id(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        maker, arguments, (attributes, slots), *rest = reduced
        attributes = dict(attributes)
        attributes.pop("__firstlineno__", None)
        if "__static_attributes__" in attributes:  # in the order of a set, up to Python 3.13.0
            attributes["__static_attributes__"] = sorted(attributes["__static_attributes__"])
        return maker, (*arguments[:-2], None, None), (attributes, slots), *rest


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
    return (
        code.co_name,
        code.co_code,
        code.co_consts,
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
