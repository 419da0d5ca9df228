"""Starts systems and runs commands from one process that has imported what they need.

These imports take more than half of a start's CPU time, and nearly all of a command's, and tests
start some hundreds of systems and run more commands than that. So a process beside them forks for
each. It is not multiprocessing's fork server, whose forks would have the tests' modules and path.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from greenroom.actors.host import launcher
from greenroom.actors.runtime import forking
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.errors import StartError
from greenroom.serve.cli.main import main

ROOM = {"GREENROOM_TEST_ROOM": "-" * 4096}  # in its environment, for the titles and marks of forks
COMMAND_TIMEOUT_S = 100  # on a busy machine importing scikit-learn, say, can take a minute
CLONE_NEWNET = 0x40000000  # setns(2)

Command = tuple[tuple[str, ...], str, str]  # its arguments, folder, and network namespace or ""


class Template:
    """The process, of one set of interpreter settings and limits."""

    def __init__(self) -> None:
        self.kind = kind()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("")  # the kernel finds a name
            listening.listen()
            self._address = listening.getsockname()
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())],
                env=os.environ | ROOM,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(listening.fileno(),),
                start_new_session=True,
            )

    def ask(self, environ: dict[str, str], job: HostSettings | Command) -> Any:
        """Have a fork do something, and return what it says."""
        with socket.socket(socket.AF_UNIX) as connecting:
            connecting.connect(self._address)
            connection = Connection(connecting.detach())
        with connection:
            connection.send((environ, job))
            return connection.recv()

    def close(self) -> None:
        """End it; what it has started goes on."""
        self._process.kill()
        self._process.communicate()


def kind() -> Any:
    """Return what a process inherits at its start, and a fork from another would not have."""
    python = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    return python, resource.getrlimit(resource.RLIMIT_NOFILE)


_made: list[Template] = []  # one at most


def _template() -> Template:
    if not _made or _made[0].kind != kind():
        end()
        _made.append(Template())
    return _made[0]


def start(settings: HostSettings) -> bool:
    """Start a system as launcher.start does, with this process's environment."""
    answer: bool | str = _template().ask(dict(os.environ), settings)
    if isinstance(answer, str):
        raise StartError(answer)
    return answer


def greenroom(
    *args: str,
    environ: Mapping[str, str],
    cwd: Path | None = None,
    namespace: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run the command line with more variables in its environment."""
    command = (args, str(cwd or Path.cwd()), namespace)
    code, out, err = _template().ask({**os.environ, **environ}, command)
    if code == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(["greenroom", *args], COMMAND_TIMEOUT_S, out, err)
    return subprocess.CompletedProcess(["greenroom", *args], code, out, err)


def afresh(
    *args: str, environ: Mapping[str, str], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, which imports all that it needs."""
    return subprocess.run(
        [sys.executable, "-m", "greenroom.serve.cli.main", *args],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
        **options,
    )


@atexit.register
def end() -> None:
    """End the process; the next start makes another."""
    while _made:
        _made.pop().close()


# --- In the process -------------------------------------------------------------------------------


def _serve(listening: socket.socket) -> bool:
    """Fork for each job; return True in a fork that is to run a command, False at the end.

    The end is that of the tests' process, at the other end of stdin.
    """
    with forking.uncollected():
        _import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that forks leave no zombies
    while sys.stdin.fileno() not in wait([listening, sys.stdin.fileno()]):
        accepted, _ = listening.accept()
        with Connection(accepted.detach()) as connection:
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
                return True
    return False


def _import_all() -> None:
    """Import what a host imports, and what commands do."""
    from greenroom.actors.host import process  # noqa: F401, PLC0415
    from greenroom.serve.cli import commands, deploying, hosts, starting  # noqa: F401, PLC0415


def _answer(connection: Connection) -> None:
    """Do what is asked for in this process, a fork, and end it; return in a command's own."""
    environ, job = connection.recv()
    os.environ.clear()
    os.environ.update(environ)
    if isinstance(job, HostSettings):
        connection.send(_start(job))
        os._exit(0)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(job, out.fileno(), err.fileno())
            return
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.send((code, *map(_text, (out, err))))
    os._exit(0)


def _start(settings: HostSettings) -> bool | str:
    try:
        return launcher.start(settings, is_command=True)
    except StartError as error:
        return str(error)


def _become(command: Command, out: int, err: int) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    signal.alarm(COMMAND_TIMEOUT_S)
    args, cwd, namespace = command
    os.chdir(cwd)
    if namespace:
        enter_namespace(namespace)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [cwd, *filter(None, paths)]
    sys.argv = ["greenroom", *args]


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())


def enter_namespace(name: str) -> None:
    """Put this process into a network namespace that ``ip netns`` has made."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        is_command = _serve(ours)
    if is_command:
        main()
