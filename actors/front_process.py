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
from greenroom.actors.logs import open_log
from greenroom.actors.messages import Process
from greenroom.actors.processes import RunRecords, identify
from greenroom.actors.settings import HostSettings

FRONT_ROLE = "http master"
_PROGRAM = """
import sys
from greenroom.actors.front_process import be_front
be_front(*map(int, sys.argv[1:]))
"""


def start_front(settings: HostSettings, records: RunRecords, listener: int) -> Process | None:
    """Start a front on a duplicate of this listening socket; None where it has ended already.

    It waits until it is recorded: if this process is killed before that, nobody would ever stop it.
    """
    gate, opener = os.pipe()
    output, held = open_log(settings, "front"), os.dup(listener)
    try:
        start = _fork if forking.can_fork() else _spawn
        front = identify(start(output, gate, held))
        if front is not None:
            records.add(front, FRONT_ROLE)
            os.write(opener, b".")
    finally:
        for fd in (gate, opener, output, held):
            os.close(fd)
    return front


def be_front(gate: int, listener: int) -> None:
    """Be the front, once somebody writes to the gate; returns when nobody will."""
    is_recorded = os.read(gate, 1)
    os.close(gate)
    if is_recorded:
        with forking.uncollected():
            from greenroom.http_front import server  # noqa: PLC0415  # only here
        os.environ[server.FD_VARIABLE] = str(listener)
        server.main()


def _fork(output: int, gate: int, listener: int) -> int:
    return forking.fork(partial(be_front, gate, listener), output, keep=(gate, listener))


def _spawn(output: int, gate: int, listener: int) -> int:
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(gate), str(listener)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(gate, listener),
    )
    return child.pid
