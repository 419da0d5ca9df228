"""What a child process with code of the user's runs: here an autoscaling policy; see routing.py.

Such a process finds the pickled code in one descriptor and gets frames on another, each with its
length before it. It ends when its parent closes the connection or is gone.
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

from greenroom.actors.replica.modules import users_traceback
from greenroom.core.autoscaling.settings import AutoscalingContext

POLICY, REQUEST_ROUTER = "policy", "request-router"  # roles
BEGUN, ASKED, ROUTED = "begun", "asked", "routed"  # frames to a request router: see routing.py
HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 64 * 1024  # of an answer, with the policy's state
PR_SET_PDEATHSIG = 1


def frame(body: bytes) -> bytes:
    """Return ``body`` with its length before it."""
    return HEADER.pack(len(body)) + body


def begin(*given: str) -> tuple[socket.socket, Callable[[], Any]] | None:
    """Return the connection, and what loads the code; None where the parent has gone.

    ``given`` are both descriptors and the parent's pid.
    """
    connection_fd, code_fd, parent = map(int, given)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return None  # it went before it could be said that we go with it
    return socket.socket(fileno=connection_fd), lambda: _load(code_fd)


def encoded(answer: dict[str, Any], **known: int) -> bytes:
    """Return a frame with an answer, or with why that cannot be sent; ``known`` is in either."""
    try:
        body = json.dumps({**known, **answer}).encode()
    except BaseException as error:  # the user's types may refuse in any way, also to be shown
        text = f"its answer is not JSON-able: {report_error(error)}"
        body = json.dumps({**known, "error": text}).encode()
    if len(body) > MAX_FRAME_BYTES:
        text = f"its answer takes {len(body)} bytes; at most {MAX_FRAME_BYTES} are let through"
        body = json.dumps({**known, "error": text}).encode()
    return frame(body)


def report_error(error: BaseException) -> str:
    """Return an error of user code in a line, and print where it was raised."""
    sys.stderr.write(users_traceback(error))
    sys.stderr.flush()
    return "".join(traceback.format_exception_only(type(error), error)).strip()[:2000]  # then notes


def _load(fd: int) -> Any:
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(fd, "rb", closefd=False) as stored:
        code = stored.read()
    if not code:
        raise ValueError("it came without its code; set it through greenroom.serve")
    return pickle.loads(code)[0]


# --- An autoscaling policy: a function, asked by JSON ---------------------------------------------


def run_policy(*given: str) -> int:
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
        connection.sendall(encoded(answer))
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
