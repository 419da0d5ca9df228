"""Queries as callers send them, with what a test does not care about filled in."""

from __future__ import annotations

import pickle
from typing import Any

from greenroom.actors.messages import queries as m
from greenroom.serve.code.packing import pack_arguments


def query(number: int, **settings: Any) -> m.Query:
    """Return a query of that id: to endpoint "e" by a handle, unless ``settings`` say otherwise."""
    plain = {
        "endpoint": "e",
        "path": "",
        "http_method": "",
        "call_method": "",
        "call": b"",
        "request_id": f"query-{number}",
        "timeout_s": None,
        "retryable": True,
        "shard_key": None,
    }
    return m.Query(id=number, **(plain | settings))


def python_call(*args: Any, method: str = "") -> dict[str, Any]:
    """Return the settings of a query that calls a method with these arguments."""
    call = m.PythonCall(method or "__call__", pack_arguments("a test's call", args, {}))
    return {"call_method": method, "call": pickle.dumps(call)}
