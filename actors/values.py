"""What user code returns or yields to callers of handles: its way into bytes, whole or in parts.

A value that a generator yields is pickled by itself and sent in parts, the last of which tells that
it is complete; :mod:`.value_streams` is the other end.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import cloudpickle

from greenroom.actors.messages import BINARY, StreamEnded
from greenroom.core.errors import UnsupportedResultError

if TYPE_CHECKING:
    from greenroom.actors.user_code import Reply

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})


def dumps(value: Any, did: str) -> bytes:
    """Pickle a value; UnsupportedResultError, with what the code ``did``, when it cannot be."""
    try:
        if _is_plain(value):
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)  # a tenth of cloudpickle's time
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:  # the user's types may refuse in any way
        if isinstance(value, AsyncIterator) or inspect.isgenerator(value):
            text = f"it {did} a generator; call it with handle.options(stream=True)"
        else:
            text = f"it {did} a {type(value).__name__}, which cannot be pickled: {error}"
        raise UnsupportedResultError(text) from error
    return pickled


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is list or kind is tuple:
        return _PLAIN.issuperset(map(type, value))
    if kind is dict:
        return _PLAIN.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values()))
    return kind in _PLAIN


async def give_values(reply: Reply, values: AsyncIterator[Any]) -> None:
    """Send what a generator yields, one by one, as fast as the caller takes it."""
    has_begun = False
    try:
        async for value in values:
            pickled = dumps(value, "yielded")  # before it begins: a failure may come whole
            if not has_begun:
                reply.begin(200, ())
                has_begun = True
            await reply.send(pickled, BINARY)
    finally:
        if hasattr(values, "aclose"):
            await values.aclose()
    if not has_begun:
        reply.begin(200, ())
    reply.answer(StreamEnded(reply.assignment.query.id, 200))
