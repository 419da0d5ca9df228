"""Two ways to a front, whose link is a fake: in this process, and real processes.

Variables of the environment say which way requests go through it: see ``WAY`` in wire.py.
"""

import asyncio
import contextlib
import http.client
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.core.config import HTTPOptions
from greenroom.core.validation import validated
from greenroom.http_front.app import Front
from tests.http.fake_link import FakeLink
from tests.http.wire import WAY, Conversation, connected
from tests.support.asking import Got, ask
from tests.support.systems import free_port, listens, wait_until

DEADLINE_S = 30.0
FILES, MANY = 256, 300  # that a worker may have open where they are few, and more than that


def until(what: str, condition: Callable[[], Any]) -> Any:
    """Wait for a condition: for DEADLINE_S, with the default patience."""
    return wait_until(condition, DEADLINE_S / 4, what)


# --- in this process ------------------------------------------------------------------------------


class AppClient:
    """Sends requests to a front in this process, each over a connection and loop of its own."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self.link = FakeLink()
        self.rebuild()

    def rebuild(self, **http: Any) -> "AppClient":
        options = validated(HTTPOptions, {**self.settings.http.model_dump(), **http})
        self.settings, _ = self.settings.with_options(options)
        self.front = Front(self.settings, self.link)
        return self

    def ask(self, method: str = "GET", target: str = "/", **options: Any) -> Got:
        return asyncio.run(self.call(method, target, **options))

    async def call(
        self,
        method: str,
        target: str,
        *,
        headers: tuple[tuple[bytes, bytes], ...] = ((b"host", b"test"),),
        body: bytes = b"",
    ) -> Got:
        names = {name for name, _ in headers}
        if body and not names & {b"content-length", b"transfer-encoding"}:
            headers = (*headers, (b"content-length", b"%d" % len(body)))
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        head = f"{method} {target} HTTP/1.1\r\n".encode() + lines + b"\r\n"
        connection = connected(self.front)
        try:
            connection.say(head + body)
            while not is_complete(connection, method):
                await asyncio.sleep(0)
        finally:
            await connection.end()
        return parsed(connection.wire.written)

    def log(self) -> list[dict[str, Any]]:
        self.front.access_log.flush()
        lines = (self.settings.logs_dir / "access.log").read_text().splitlines()
        return [json.loads(line) for line in lines]


def is_complete(connection: Conversation, method: str) -> bool:
    head, ends, body = connection.wire.written.partition(b"\r\n\r\n")
    if connection.wire.closed or not connection.connections.all:
        return True
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    return bool(ends) and (method == "HEAD" or len(body) >= int(length[1] if length else 0))


def parsed(written: bytes) -> Got:
    stream = io.BytesIO(written)
    status = int(stream.readline().split()[1])
    return Got(status, http.client.parse_headers(stream), stream.read())


@pytest.fixture
def app(tmp_path: Path) -> Iterator[AppClient]:
    client = AppClient(read_settings(WAY, state_dir=tmp_path))
    yield client
    client.front.access_log.flush()


# --- processes ------------------------------------------------------------------------------------


class FrontProcess:
    """A gunicorn master with its workers; the listening socket is the test's, passed by number.

    Without ``pass_socket`` the front opens its own.
    """

    def __init__(self, state_dir: Path, *, pass_socket: bool = True, **variables: str) -> None:
        self.state_dir = state_dir
        self.listener = socket.create_server(("127.0.0.1", 0 if pass_socket else free_port()))
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.stderr_path = state_dir / "stderr"
        environ = {
            **os.environ,
            "GREENROOM_STATE_DIR": str(state_dir),
            "GREENROOM_HTTP_PORT": str(self.port),
            "GREENROOM_FRONT_FD": str(self.listener.fileno()) if pass_socket else "",
            "PYTHONWARNINGS": "default",
            **variables,
        }
        passed = [self.listener.fileno()] if pass_socket else []
        if not pass_socket:
            self.listener.close()
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("front_process.py"))],
                env=environ,
                stderr=stderr,
                pass_fds=passed,
            )

    def wait_until_ready(self) -> "FrontProcess":
        until("the front answers", self._answers)
        return self

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.stderr_path.read_text()
        try:
            return self.ask("/-/healthz").status == 200
        except (ConnectionRefusedError, TimeoutError):
            return False

    def ask(self, path: str, method: str = "GET", body: Any = None, **head: str) -> Got:
        return ask(f"{self.url}{path}", body, method, **head)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)

    def workers(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def log(self) -> list[dict[str, Any]]:
        path = self.state_dir / "logs" / "access.log"
        written = path.read_text() if path.exists() else ""
        # A line may be there in part: reading is not atomic beside an append.
        return [json.loads(line) for line in written.split("\n")[:-1]]

    def logged(self, path: str) -> dict[str, Any]:
        def entry() -> dict[str, Any] | None:
            return next((entry for entry in self.log() if entry["path"] == path), None)

        found: dict[str, Any] = until(f"{path} is in the access log", entry)
        return found

    def limit_files(self, most: int) -> None:
        """Have another worker, which may have so many files open."""
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (most, most))
        (worker,) = self.workers()
        os.kill(worker, signal.SIGKILL)  # the next one inherits it
        until("another worker is here", lambda: self.workers() not in ([], [worker]))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> float:
        """Stop by SIGTERM and return the seconds it took; fails if a kill was needed."""
        began = time.monotonic()
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            pytest.fail(f"SIGTERM did not stop the front:\n{self.stderr_path.read_text()}")
        finally:
            self.listener.close()
        return time.monotonic() - began

    def _kill(self) -> None:
        for pid in [*self.workers(), self.process.pid]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


StartFront = Callable[..., FrontProcess]


@pytest.fixture
def start_front(tmp_path: Path) -> Iterator[StartFront]:
    started: list[FrontProcess] = []

    def start(**options: Any) -> FrontProcess:
        front = FrontProcess(tmp_path, **options)
        started.append(front)
        return front.wait_until_ready()

    yield start
    for front in started:
        if front.process.poll() is None:
            front.stop()
        front.listener.close()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    """Give a front whose body limit is 100,000 bytes, shared by a module's tests."""
    running = FrontProcess(tmp_path_factory.mktemp("front"), GREENROOM_HTTP_MAX_BODY_BYTES="100000")
    try:
        yield running.wait_until_ready()
    finally:
        running.stop()


@pytest.fixture(name="until")
def make_until() -> Callable[..., Any]:
    return until


@pytest.fixture
def start_nginx() -> Iterator[Callable[[list[str], int], None]]:
    """Give a function that runs a command of nginx from when it listens until the test's end."""
    with contextlib.ExitStack() as stack:

        def start(command: list[str], port: int) -> None:
            process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            stack.callback(process.terminate)
            until("nginx listens", lambda: listens(port) or process.poll() is not None)
            assert process.poll() is None, command

        yield start
