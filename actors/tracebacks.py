"""Tracebacks as the user reads them: with the frames of user code, and none of ours."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Collection

from greenroom.actors.callables import library_dirs


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
