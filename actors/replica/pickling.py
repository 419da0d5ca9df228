"""Pickling by value, with the names of files and, for code, its source lines.

Theory of operation. cloudpickle writes code without the file that it is from (3.1.3) or with the
path alone (3.0), which another host does not have. :class:`ByValuePickler` adds the name, and where
it ``has_source``, as for a deployment's code, also the text of the user's files, once each. Where
the pickle is loaded the text goes to linecache: tracebacks and ``inspect.getsource`` then show the
lines that run, on other hosts, for notebooks, and after the file was edited.
"""

from __future__ import annotations

import io
import linecache
import types
from functools import partial, partialmethod
from typing import Any

import cloudpickle

from greenroom.actors.replica.modules import library_dirs, remember_source

PROTOCOL = 5
MAX_SOURCE = 1024 * 1024  # characters of one file; generated code may be larger


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """cloudpickle's, but code keeps its file's name, and its source where ``has_source``."""

    has_source = False

    def __init__(self, **options: Any) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=PROTOCOL, **options)
        self._sources: dict[str, str] = {}  # by file: one object each, so that it is written once

    def dumps(self, value: Any) -> bytes:
        """Return the pickle of ``value``; the pickler is of no use any more."""
        self.dump(value)
        return self._buffer.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle ``obj``; NotImplemented for pickle's own way."""
        if type(obj) is partialmethod:  # pickle's own cannot be loaded by Python 3.14 (and 3.15)
            return partial(partialmethod, **obj.keywords), (obj.func, *obj.args), vars(obj)
        if not isinstance(obj, types.CodeType):
            return super().reducer_override(obj)
        _, arguments = self.dispatch_table[types.CodeType](obj)
        return made_code, (arguments, obj.co_filename, self._source_of(obj.co_filename))

    def _source_of(self, filename: str) -> str:
        if not self.has_source or filename.startswith(library_dirs()):
            return ""
        if filename not in self._sources:
            text = "".join(linecache.getlines(filename))
            self._sources[filename] = text if len(text) <= MAX_SOURCE else ""
        return self._sources[filename]


def made_code(arguments: tuple[Any, ...], filename: str, source: str) -> types.CodeType:
    """Make code again, and let linecache know its source; what pickles call."""
    if source:
        remember_source(filename, source)
    return types.CodeType(*arguments).replace(co_filename=filename)


def dumps(value: Any) -> bytes:
    """Pickle a value, by value where it has no module that can be imported."""
    return ByValuePickler().dumps(value)
