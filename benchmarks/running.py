"""A system that runs: started in a nursery, asked over HTTP, ended with all it left."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import APPS, CLONE, ECHO, BenchmarkError
from benchmarks.processes import descendants
from benchmarks.systems import System, Victim
from benchmarks.venvs import Venv

POLL_S = 0.005
READY_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 45.0
END_TIMEOUT_S = 30.0
# What may go wrong with one system without keeping the others from being measured.
FAILURES = (
    BenchmarkError,
    OSError,
    http.client.HTTPException,
    json.JSONDecodeError,
    subprocess.SubprocessError,
)
OURS = ("PYTHON", "VIRTUAL_ENV", "GREENROOM_", "RAY_", "BENTOML_", "MOSEC_", "GUNICORN_")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Running:
    """Context manager: entering starts the system and waits for its first 200."""

    def __init__(self, system: System, venv: Venv, victim: Victim | None = None) -> None:
        self.system = system
        self.work = Path(tempfile.mkdtemp(prefix="bench-"))
        self.port, admin_port = _free_ports(2)
        self._words = {
            "bin": venv.bin,
            "apps": APPS,
            "work": self.work,
            "port": self.port,
            "admin_port": admin_port,
        }
        self._arguments = system.command + (victim.extra_arguments if victim else ())
        self._nursery: subprocess.Popen[str] | None = None
        self.start_s = 0.0

    def __enter__(self) -> "Running":  # noqa: PYI034 - typing.Self came with Python 3.11
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def pids(self) -> set[int]:
        """Return the pids of all living processes of the system."""
        return descendants(self._nursery.pid) if self._nursery else set()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Make one request on a connection of its own; return the status and the parsed JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            return response.status, json.loads(content) if response.status == 200 else None
        finally:
            connection.close()

    def alive_body(self) -> dict | None:
        """Return the body of the request that user code answers with its pid."""
        return {**ECHO, "name": "pid"} if self.system.alive_method == "POST" else None

    def user_code_pid(self) -> int:
        """Ask the user code which process it runs in."""
        system = self.system
        status, answer = self.ask(system.alive_method, system.alive_path, self.alive_body())
        if status != 200:
            raise BenchmarkError(f"{system.name}: {system.alive_path} answered {status}")
        return answer["pid"]

    def status(self) -> dict:
        """Return what `greenroom status --json` prints."""
        done = self._command(self.system.status_command)
        try:
            return json.loads(done.stdout)
        except json.JSONDecodeError:
            raise BenchmarkError(f"status printed no JSON: {done.stdout}{done.stderr}") from None

    def _fill(self, arguments: tuple[str, ...]) -> list[str]:
        return [a.format(**self._words) for a in arguments]

    def _environment(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        ours = {k: v.format(**self._words) for k, v in self.system.environment.items()}
        return {**clean, **ours, "PATH": f"{self._words['bin']}{os.pathsep}{clean['PATH']}"}

    def _start(self) -> None:
        nursery = [sys.executable, "-m", "benchmarks.nursery", str(self.work)]
        with (self.work / "output.log").open("w") as log:
            self._nursery = subprocess.Popen(
                nursery + self._fill(self._arguments),
                cwd=CLONE,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is ours to act on
            )
        line = self._nursery.stdout.readline()
        if not line:
            raise BenchmarkError(self._failure("could not be started"))
        self.start_s = self._first_200_at() - json.loads(line)["started_at"]

    def _first_200_at(self) -> float:
        deadline = time.monotonic() + READY_TIMEOUT_S
        look_at = time.monotonic() + 2
        while (now := time.monotonic()) < deadline:
            if self._echoes():
                return time.monotonic()
            if now > look_at:
                look_at = now + 2
                if not self.pids():
                    raise BenchmarkError(self._failure("ended before it served"))
            time.sleep(POLL_S)
        raise BenchmarkError(self._failure(f"did not serve within {READY_TIMEOUT_S:.0f} s"))

    def _echoes(self) -> bool:
        try:
            status, answer = self.ask("POST", self.system.echo_path, ECHO)
        except (OSError, http.client.HTTPException):
            return False
        if status == 200 and answer != ECHO:
            raise BenchmarkError(f"{self.system.name} answered {answer!r}, not an echo")
        return status == 200

    def _failure(self, what: str) -> str:
        tail = (self.work / "output.log").read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"{self.system.name} {what}; the end of its output:", *tail])

    def _command(self, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._fill(arguments),
            cwd=self.work,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )

    def _end(self) -> None:
        nursery = self._nursery
        try:
            if nursery and self.system.stop_command and self.pids():
                self._command(self.system.stop_command)
        except (subprocess.TimeoutExpired, OSError) as error:
            print(f"{self.system.name}: {error}", file=sys.stderr)
        finally:
            if nursery:
                nursery.stdin.close()
                nursery.stdout.close()
                self._wait_for(nursery)
            shutil.rmtree(self.work, ignore_errors=True)

    def _wait_for(self, nursery: "subprocess.Popen[str]") -> None:
        if nursery.wait(timeout=END_TIMEOUT_S):
            print(self._failure("left something behind"), file=sys.stderr)
