"""What child processes with code of the user's begin with: see policy.py and routing.py.

Such a process finds the pickled code in one descriptor and gets frames on another, each with its
length before it. It ends when its parent closes the connection or is gone.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

from greenroom.actors.replica.modules import users_traceback

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


def report_error(error: BaseException) -> str:
    """Return an error of user code in a line, and print where it was raised."""
    sys.stderr.write(users_traceback(error))
    sys.stderr.flush()
    return "".join(traceback.format_exception_only(type(error), error)).strip()[-2000:]


def _load(fd: int) -> Any:
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(fd, "rb", closefd=False) as stored:
        code = stored.read()
    if not code:
        raise ValueError("it came without its code; set it through greenroom.serve")
    return pickle.loads(code)[0]
