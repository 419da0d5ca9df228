"""The child process of an autoscaling policy: a function of the user's, asked by JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from greenroom.actors.plugins.program import HEADER, MAX_FRAME_BYTES, begin, frame, report_error
from greenroom.core.autoscaling.config import AutoscalingContext


def main(*given: str) -> int:
    """Answer until the other end closes."""
    begun = begin(*given)
    if begun is None:
        return 1
    connection, load = begun
    stream = connection.makefile("rb")
    function: Callable[..., Any] | None = None
    while (question := _read_frame(stream)) is not None:
        try:
            function = function or load()
            answer = _answer(function, json.loads(question))
        except BaseException as error:  # sys.exit() of user code is a failed answer too
            answer = {"error": report_error(error)}
        connection.sendall(_encoded(answer))
    return 0


def _read_frame(stream: Any) -> bytes | None:
    """Return the next frame's content; None at the end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    body: bytes = stream.read(HEADER.unpack(header)[0])
    return body


def _answer(function: Callable[..., Any], question: dict[str, Any]) -> dict[str, Any]:
    given = question["context"]
    config = SimpleNamespace(**given.pop("config"))
    context = AutoscalingContext(config=config, **given)
    result = function(context, **question["kwargs"])
    if inspect.isawaitable(result):
        raise TypeError("it is async; a policy is a plain function")
    if isinstance(result, tuple) and len(result) == 2:
        return {"replicas": _plain(result[0]), "state": result[1]}
    return {"replicas": _plain(result)}


def _plain(number: Any) -> Any:
    """Make a Python number of one of numpy's."""
    item = getattr(number, "item", None)
    return item() if callable(item) else number


def _encoded(answer: dict[str, Any]) -> bytes:
    try:
        body = json.dumps(answer).encode()
    except (TypeError, ValueError) as error:
        body = json.dumps({"error": f"its answer is not JSON-able: {error}"}).encode()
    if len(body) > MAX_FRAME_BYTES:
        text = f"its answer takes {len(body)} bytes; at most {MAX_FRAME_BYTES} are let through"
        body = json.dumps({"error": text}).encode()
    return frame(body)
