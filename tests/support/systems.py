"""A whole Greenroom system for one test: own ports, own state dir, nothing left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from greenroom import serve
from greenroom.actors.caller.connection import Connection
from greenroom.actors.host import launcher as system
from greenroom.actors.runtime.processes import identify
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.core.operations import GetStatus
from greenroom.serve.admin import session
from tests.support import logs, template
from tests.support.asking import ask

# The factor by which every deadline is longer than on a quiet machine. Beside two programs that
# compute, everything takes two to three times as long.
PATIENCE = float(os.environ.get("GREENROOM_TEST_PATIENCE", "4"))
PORTS = range(10_000, 32_768)  # the kernel gives clients ports above these


_own_ports: set[int] = set()
_drawn = (Path(tempfile.gettempdir()) / f"greenroom-test-ports-{os.getuid()}").open("a")


def free_port() -> int:
    """Return a port that is free and stays free: the kernel gives clients only higher ones.

    No other test draws the same port, in this process or another. Most systems under test open no
    TCP port that a probe would find, but sockets named after it. So each port is a byte of a file,
    which the process that drew it keeps locked.
    """
    while True:
        port = PORTS[secrets.randbelow(len(PORTS))]  # not random's, which hypothesis seeds
        if port in _own_ports:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            fcntl.lockf(_drawn, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            _own_ports.add(port)
            probe.bind(("", port))
            return port


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Poll until the condition is true; return its value, or fail naming ``what``.

    ``timeout_s`` is for a quiet machine; the deadline is PATIENCE times as long.
    """
    deadline = time.monotonic() + PATIENCE * timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {PATIENCE:g} times {timeout_s:g} s: {what}")
        time.sleep(0.01)


def listens(port: int, address: str = "127.0.0.1") -> bool:
    """Return whether a process accepts connections at a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def alive(pid: int) -> bool:
    """Return whether there is a process of that pid, other than a zombie."""
    return identify(pid) is not None


class RunningSystem:
    """One host's system, and what tests ask of it."""

    def __init__(self, state_dir: Path, **environ: str) -> None:
        self.environ = {
            "GREENROOM_STATE_DIR": str(state_dir),
            "GREENROOM_HTTP_PORT": str(free_port()),
            "GREENROOM_ADMIN_PORT": str(free_port()),
            **environ,
        }
        self.settings: HostSettings = read_settings(self.environ)
        self.url = f"http://127.0.0.1:{self.settings.http.port}"
        self._connection: Connection | None = None

    @property
    def connection(self) -> Connection:
        """A connection, opened at the first use."""
        if self._connection is None:
            self._connection = Connection.open(self.settings)
        return self._connection

    def start(self) -> None:
        """Start it."""
        logs.begin(self.settings.logs_dir)
        with patched_environ(self.environ):
            assert template.start(self.settings)

    def stop(self, *, forget: bool = False) -> None:
        """Stop the system, and check that nothing of it is left."""
        pids = self.pids()
        self.disconnect()
        logs.end(self.settings.logs_dir)
        system.stop(self.settings, forget=forget)
        left = {role: pid for role, pid in pids if alive(pid)}
        assert not left, f"still running after stop: {left}"
        port = self.settings.http.port
        # A front that was not recorded yet when its host died ends by itself.
        wait_until(lambda: not listens(port), 1, f"nobody listens at {port}")

    def disconnect(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def pids(self) -> list[tuple[str, int]]:
        """Return (role, pid) of every recorded process."""
        records = RunRecords(self.settings.run_dir).alive()
        return [(role, process.pid) for process, role in records.items()]

    def pid_of(self, role: str) -> int:
        """Return the pid of the one process of a role, once there is exactly one."""

        def only() -> list[int]:
            found = [pid for each, pid in self.pids() if each == role]
            return found if len(found) == 1 else []

        (pid,) = wait_until(only, 10, f"exactly one {role}")
        return int(pid)

    def status(self) -> dict[str, Any]:
        """Return what ``greenroom status --json`` prints."""
        return self.connection.request(GetStatus(), timeout_s=20)  # type: ignore[no-any-return]

    def replica_pids(self, application: str = "default") -> list[int]:
        """Return the pids of the running replicas of an application."""
        deployments = self.status()["applications"][application]["deployments"].values()
        return [
            replica["pid"]
            for deployment in deployments
            for replica in deployment["replicas"]
            if replica["state"] == "RUNNING"
        ]

    def get(
        self,
        path: str = "/",
        data: bytes | None = None,
        method: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, bytes]:
        """GET (or with ``data`` POST) a path; returns status and body."""
        got = ask(self.url + path, data, method, headers.items())
        return got.status, got.body

    @contextlib.contextmanager
    def as_default(self) -> Iterator[None]:
        """Make ``serve``'s functions in this process talk to this system."""
        with patched_environ(self.environ):
            session.use(self.settings)
            try:
                yield
            finally:
                session.use(self.settings).disconnect()

    def deploy(self, app: serve.Application, **options: Any) -> Any:
        """Deploy as ``serve.run`` does, and leave it deployed; returns the handle."""
        with self.as_default():
            return serve.run(app, **options)

    def greenroom(self, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command line against this system."""
        logs.begin(self.settings.logs_dir)
        return template.greenroom(*args, environ=self.environ, cwd=cwd)

    def status_json(self) -> dict[str, Any]:
        """Return ``greenroom status --json`` through the command line."""
        return json.loads(self.greenroom("status", "--json").stdout)  # type: ignore[no-any-return]


@contextlib.contextmanager
def patched_environ(environ: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def running_system(state_dir: Path, **environ: str) -> Iterator[RunningSystem]:
    """Start a system; at the end stop it and check that nothing is left."""
    running = RunningSystem(state_dir, **environ)
    running.start()
    try:
        yield running
    finally:
        running.stop()
