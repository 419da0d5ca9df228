"""Hosts on one machine: network namespaces with a cable between each two, and a process in each."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.programs import cannot_run
from tests.support.template import enter_namespace

CALL_TIMEOUT_S = 120.0
# A host's process is a fork of one that has imported what tests call there: that takes a second.
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.support.cluster"])
_numbers = itertools.count(1)


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

    def cable(self, *, up: bool) -> None:
        """Plug the cable in, or out: then not even a reset gets through."""
        _run("ip", "-n", self.name, "link", "set", "cable", "up" if up else "down")

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


def make_hosts() -> tuple[Host, Host]:
    """Return two hosts, 10.77.0.1 and 10.77.0.2; the caller deletes them."""
    stem = f"greenroom-{os.getpid()}-{next(_numbers)}"
    names = [f"{stem}{letter}" for letter in "ab"]
    for name in names:
        _run("ip", "netns", "add", name)
    _run(
        *("ip", "-n", names[0], "link", "add", "cable", "type", "veth"),
        *("peer", "name", "cable", "netns", names[1]),
    )
    for number, name in enumerate(names, 1):
        _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
        for link in ("cable", "lo"):
            _run("ip", "-n", name, "link", "set", link, "up")
    one, other = (Host(name, f"10.77.0.{number}") for number, name in enumerate(names, 1))
    return one, other


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts; skip where that cannot be done, but fail in CI."""
    try:
        hosts = make_hosts()
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or error
        cannot_run(f"network namespaces cannot be made here: {why}")
    try:
        yield hosts
    finally:
        for host in hosts:
            host.delete()
