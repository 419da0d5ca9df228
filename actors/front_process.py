"""The HTTP front's gunicorn master, as the host process starts it.

The first one is forked, with what has been imported; a later one is a program of its own, for by
then the host process has threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from greenroom.actors import forking
from greenroom.actors.logs import open_log_or_stderr
from greenroom.actors.messages import Process
from greenroom.actors.processes import FRONT_ROLE, RunRecords, identify
from greenroom.actors.settings import HostSettings

_PROGRAM = """
import sys
from greenroom.actors.front_process import be_front
be_front(int(sys.argv[1]))
"""


def start_front(settings: HostSettings, records: RunRecords, listener: int) -> Process | None:
    """Start a front on a duplicate of this listening socket; None where it has ended already."""
    output, held = open_log_or_stderr(settings, "front"), os.dup(listener)
    try:
        start = _fork if forking.can_fork() else _spawn
        front = identify(start(output, held))
    finally:
        os.close(output)
        os.close(held)
    if front is not None:
        records.add(front, FRONT_ROLE)
    return front


def be_front(listener: int) -> None:
    """Be the front, on this listening socket."""
    with forking.uncollected():
        from greenroom.http_front import server  # noqa: PLC0415  # only here
    os.environ[server.FD_VARIABLE] = str(listener)
    server.main()


def _fork(output: int, listener: int) -> int:
    return forking.fork(partial(be_front, listener), output, keep=[listener])


def _spawn(output: int, listener: int) -> int:
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(listener)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[listener],
    )
    return child.pid
