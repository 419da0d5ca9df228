"""Starts systems from one process that has imported what a start needs.

These imports take more than half of a start's CPU time, and tests start some hundreds of systems.
So a process beside them forks a host as ``greenroom start`` does, once for each system. It is not
multiprocessing's fork server, whose forks would have the tests' modules and path.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from greenroom.actors.host import launcher
from greenroom.actors.runtime import forking
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.errors import StartError

ROOM = {"GREENROOM_TEST_ROOM": "-" * 4096}  # in its environment, for the titles and marks of forks


class Template:
    """The process, of one set of interpreter settings and limits."""

    def __init__(self) -> None:
        self.kind = kind()
        self._pipe, theirs = Pipe()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(fd)],
                env=os.environ | ROOM,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(fd,),
                start_new_session=True,
            )

    def start(self, settings: HostSettings) -> bool:
        """Start a system as launcher.start does, with this process's environment."""
        self._pipe.send((dict(os.environ), settings))
        answer: bool | str = self._pipe.recv()
        if isinstance(answer, str):
            raise StartError(answer)
        return answer

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.wait()


def kind() -> Any:
    """Return what a process inherits at its start, and a fork from another would not have."""
    python = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    return python, resource.getrlimit(resource.RLIMIT_NOFILE)


_made: list[Template] = []  # one at most


def start(settings: HostSettings) -> bool:
    """Start a system; see launcher.start."""
    if not _made or _made[0].kind != kind():
        end()
        _made.append(Template())
    return _made[0].start(settings)


@atexit.register
def end() -> None:
    """End the process; the next start makes another."""
    while _made:
        _made.pop().close()


def _serve(pipe: Connection) -> None:
    with forking.uncollected():
        from greenroom.actors.host import process  # noqa: F401, PLC0415  # what a host imports
    with contextlib.suppress(EOFError):
        while True:
            environ, settings = pipe.recv()
            pid = os.fork()
            if pid == 0:
                pipe.send(_outcome(environ, settings))
                os._exit(0)
            os.waitpid(pid, 0)


def _outcome(environ: dict[str, str], settings: HostSettings) -> bool | str:
    os.environ.clear()
    os.environ.update(environ)
    try:
        return launcher.start(settings, is_command=True)
    except StartError as error:
        return str(error)


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as ours:
        _serve(ours)
