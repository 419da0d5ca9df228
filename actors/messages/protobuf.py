"""Protobuf messages on their way between a gRPC server and replicas.

A message is pickled by the name of its class. Stubs that were compiled in another folder than the
one that they are imported from name a module that nothing can import: Triton's are of
``grpc_service_pb2``, in ``tritonclient.grpc``. Such a message travels by the module that has its
file, by its full name, and serialized.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

_PROTOBUF = "google.protobuf.message"


def portable(value: Any) -> Any:
    """Return what to pickle in place of a value: itself, unless it is such a message."""
    protobuf = sys.modules.get(_PROTOBUF)
    if protobuf is None or not isinstance(value, protobuf.Message):
        return value
    kind: Any = type(value)
    home = _home_of(kind)
    return value if home is None else _Portable(home, value)


@functools.lru_cache(maxsize=1_000)
def _home_of(kind: Any) -> str | None:
    """Return the module to import for a message's class; None where its name will do."""
    file = kind.DESCRIPTOR.file
    homes = [name for name, each in list(sys.modules.items()) if _describes(each, file)]
    return None if kind.__module__ in homes or not homes else homes[0]


def _describes(module: Any, file: Any) -> bool:
    return getattr(module, "__dict__", {}).get("DESCRIPTOR") is file


class _Portable:
    def __init__(self, home: str, message: Any) -> None:
        self._home = home
        self._message = message

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str, bytes]]:
        message = self._message
        return _read, (self._home, message.DESCRIPTOR.full_name, message.SerializeToString())


def _read(home: str, full_name: str, content: bytes) -> Any:
    from google.protobuf import message_factory  # noqa: PLC0415  # of the extra

    pool = importlib.import_module(home).DESCRIPTOR.pool
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name))
    return kind.FromString(content)
