"""The child process of the controller in which one autoscaling policy of a user runs.

User code never runs in the controller, because it could block or end it. This process finds the
pickled function in one descriptor and gets questions on another, each a frame of JSON with its
length before it. It answers each with a frame. It ends when the controller closes the connection or
is gone. What the function prints goes to a log of its own.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from greenroom.actors.replica.callables import users_traceback
from greenroom.core.autoscaling.config import AutoscalingContext

HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 64 * 1024  # with the policy's state; a socket takes that without a reader
PR_SET_PDEATHSIG = 1


def frame(body: bytes) -> bytes:
    """Return ``body`` with its length before it."""
    return HEADER.pack(len(body)) + body


def main() -> int:
    """Answer until the other end closes; argv has the descriptors and the controller's pid."""
    connection_fd, code_fd, controller = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != controller:
        return 1  # it went before it could be said that we go with it
    connection = socket.socket(fileno=connection_fd)
    stream = connection.makefile("rb")
    function: Callable[..., Any] | None = None
    while (question := _read(stream)) is not None:
        try:
            function = function or _load(code_fd)
            answer = _answer(function, json.loads(question))
        except BaseException as error:  # sys.exit() of user code is a failed answer too
            sys.stderr.write(users_traceback(error))
            sys.stderr.flush()
            text = "".join(traceback.format_exception_only(type(error), error)).strip()
            answer = {"error": text[-2000:]}
        connection.sendall(_encoded(answer))
    return 0


def _read(stream: Any) -> bytes | None:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    body: bytes = stream.read(HEADER.unpack(header)[0])
    return body


def _load(fd: int) -> Callable[..., Any]:
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(fd, "rb", closefd=False) as stored:
        code = stored.read()
    if not code:
        raise ValueError("it came without its code; set it through greenroom.serve")
    function: Callable[..., Any] = pickle.loads(code)[0]
    return function


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


if __name__ == "__main__":
    sys.exit(main())
