"""Hosts on one machine: network namespaces, and a process in each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import traceback
from collections.abc import Callable
from typing import Any

from tests.support.template import enter_namespace

CALL_TIMEOUT_S = 120.0
# A host's process is a fork of one that has imported what tests call there: that takes a second.
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.support.cluster"])


class Host:
    """A process in a network namespace of its own, which calls functions for the test."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._process: Any = None
        self.boot()

    def boot(self) -> None:
        """Start its process."""
        self._pipe, pipe = forks.Pipe()
        args = (pipe, self.name, dict(os.environ))
        self._process = forks.Process(target=_serve, args=args, daemon=False)
        self._process.start()
        pipe.close()

    @property
    def pid(self) -> int:
        """The process that calls for the test."""
        return int(self._process.pid)

    def another(self) -> Host:
        """Return one more process of the same host; it ends with the host."""
        return Host(self.name, self.address)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a module over there; raise what it raises."""
        self._pipe.send((function, args))
        if not self._pipe.poll(CALL_TIMEOUT_S):
            raise AssertionError(f"{function.__name__}{args} did not return on {self.name}")
        succeeded, result = self._pipe.recv()
        if not succeeded:
            raise AssertionError(f"on {self.name}:\n{result}")
        return result

    def pids(self) -> list[int]:
        """Return all processes of the namespace."""
        listed = _run("ip", "netns", "pids", self.name)
        return [int(pid) for pid in listed.split()]

    def kill(self) -> None:
        """SIGKILL all of its processes, as a crash of the machine would; the kernel lives on.

        All are stopped first, so that none reacts to the death of another.
        """
        stopped: set[int] = set()
        while found := set(self.pids()) - stopped:
            self._signal(found, signal.SIGSTOP)
            stopped |= found
        self._signal(stopped, signal.SIGKILL)
        self._process.kill()  # where a Ctrl-C came before it was in the namespace
        self._process.join()
        self._pipe.close()

    @staticmethod
    def _signal(pids: set[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """End this process of the host, and no other."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def delete(self) -> None:
        """Leave nothing."""
        self.kill()
        _run("ip", "netns", "delete", self.name)


def _serve(pipe: Any, name: str, environ: dict[str, str]) -> None:
    os.environ.clear()  # what it is forked from has that of its own start
    os.environ.update(environ)
    enter_namespace(name)
    with contextlib.suppress(EOFError):
        while True:
            function, args = pipe.recv()
            try:
                answer = (True, function(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send(answer)
    os.kill(os.getpid(), signal.SIGKILL)  # without Thespian's atexit handlers


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run_ip(*args: str) -> None:
    """Run ``ip``."""
    _run("ip", *args)
