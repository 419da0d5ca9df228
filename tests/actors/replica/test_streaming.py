"""Responses in parts, through real HTTP: order, back-pressure, ends of every kind."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse

from greenroom import serve
from tests.support.asking import asking, exchange
from tests.support.systems import running_system, wait_until


class Parts:
    """Streams what the query string asks for; ``folder`` is where it and the test meet."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def __call__(self, request: Any) -> Any:
        kind = request.path_params.get("kind") or request.query_params["kind"]
        return getattr(self, kind)(int(request.query_params.get("count", "3")))

    def pid(self, _count: int) -> int:
        return os.getpid()

    async def gated(self, count: int) -> AsyncIterator[str]:
        try:
            for number in range(count):
                yield f"{number}\n"
                while not (self.folder / f"gate{number}").exists():
                    await asyncio.sleep(0.01)
        finally:
            (self.folder / "closed").touch()

    def stepwise(self, count: int) -> Iterator[bytes]:
        try:
            for number in range(count):
                yield b"%d\n" % number
                time.sleep(0.01)
        finally:
            (self.folder / "closed").touch()

    def nothing(self, _count: int) -> Iterator[str]:
        yield from ()

    def breaks(self, count: int) -> Iterator[str]:
        yield from ["a"] * count
        raise ValueError("broken on purpose")

    def in_background(self, _count: int) -> JSONResponse:
        async def later() -> None:
            while not (self.folder / "gate").exists():
                await asyncio.sleep(0.01)
            (self.folder / "closed").touch()

        return JSONResponse({"answered": True}, background=BackgroundTask(later))


@pytest.fixture
def get(running, deployed, name, tmp_path):
    """Return what asks the deployment; the response's body is still to be read."""
    deployed(serve.deployment(max_ongoing_requests=4)(Parts).bind(str(tmp_path)))
    with asking(f"{running.url}/{name}") as ask:
        yield ask


def test_the_first_part_leaves_when_it_is_made(get, tmp_path):
    response = get("gated")
    assert (response.status, response.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    for number in range(3):
        assert response.readline() == b"%d\n" % number
        (tmp_path / f"gate{number}").touch()
    assert response.read() == b""
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize(("kind", "body"), [("stepwise", b"0\n1\n2\n"), ("nothing", b"")])
def test_sync_generators(get, kind, body):
    assert get(kind).read() == body


def test_head_gets_no_parts_and_ends_the_generator(get, tmp_path):
    response = get("gated", method="HEAD")
    assert (response.status, response.read()) == (200, b"")
    wait_until((tmp_path / "closed").exists, 5, "the generator is closed")


def test_a_client_that_leaves_ends_the_generator_and_frees_the_slot(get, tmp_path):
    for _ in range(6):  # more than there are slots
        response = get("gated", Connection="close")  # else closing it keeps the connection
        assert response.readline() == b"0\n"
        response.close()
        wait_until((tmp_path / "closed").exists, 5, "the generator is closed")
        (tmp_path / "closed").unlink()


def test_clients_of_http_1_0_get_no_chunks_and_see_what_breaks_off(running, name, get):
    def ask(what: str) -> bytes:
        request = f"GET /{name}?{what} HTTP/1.0\r\n\r\n".encode()
        return exchange(running.settings.http.port, request)

    head, _, body = ask("kind=stepwise").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"0\n1\n2\n"
    with pytest.raises(ConnectionResetError):
        ask("kind=breaks")


class Reads:
    """Answers before it has read its request, and notes in ``folder`` what it reads after that."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, request: Request) -> JSONResponse:
        async def read() -> None:
            size, kind = 0, ""
            while kind != "http.disconnect":
                event = await request.receive()
                kind, size = event["type"], size + len(event.get("body", b""))
            (self.folder / "read").write_text(str(size))

        if "waits" in request.query_params:  # before the end, and beyond it
            self.tasks.add(asyncio.create_task(read()))
            await asyncio.sleep(0.05)
            return JSONResponse(None)
        return JSONResponse(None, background=BackgroundTask(read))


@pytest.mark.parametrize("query", ["", "?waits"])
@pytest.mark.parametrize("size", [10, 5_000_000])
def test_what_reads_on_after_the_answer_hears_that_its_client_is_gone(
    running, deployed, name, tmp_path, size, query
):
    deployed(serve.deployment(Reads).bind(str(tmp_path)))
    with socket.create_connection(("127.0.0.1", running.settings.http.port)) as client:
        head = f"POST /{name}{query} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
        client.sendall(head.encode() + bytes(min(size, 1_100_000)))  # the rest never comes
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        noted = tmp_path / "read"
        found = wait_until(lambda: noted.exists() and noted.read_text(), 5, "it has read")
    assert int(found) in ([10] if size == 10 else range(1_100_001))


def test_a_background_task_runs_after_the_answer_and_keeps_the_slot(get, tmp_path):
    responses = [get("in_background") for _ in range(4)]
    assert [response.read() for response in responses] == [b'{"answered":true}'] * 4
    late = get("pid", **{"X-Request-Timeout-Seconds": "0.3"})
    assert late.status == 408, "all four slots are taken"
    (tmp_path / "gate").touch()
    assert get("pid").status == 200


def test_the_time_limit_holds_for_the_last_part_too(get, tmp_path):
    response = get("gated", **{"X-Request-Timeout-Seconds": "1.5"})
    assert response.readline() == b"0\n"
    with pytest.raises(http.client.IncompleteRead):
        response.read()
    wait_until((tmp_path / "closed").exists, 5, "the generator is closed")


# --- Deaths -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_system(tmp_path_factory):
    """A system whose processes are killed, one by one; it recovers each time."""
    with running_system(tmp_path_factory.mktemp("own") / "state") as system:
        yield system


@pytest.fixture
def own_get(own_system, tmp_path):
    own_system.deploy(serve.deployment(Parts).bind(str(tmp_path)))
    with asking(f"{own_system.url}/") as ask:
        yield ask


def test_a_replica_that_dies_midway_cuts_the_connection_and_is_not_asked_twice(own_get, tmp_path):
    pid = int(own_get("pid").read())
    response = own_get("gated")
    assert response.readline() == b"0\n"
    for _ in range(3):  # with whose ends the router is told that this answer has begun
        assert int(own_get("pid").read()) == pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(http.client.IncompleteRead):
        response.read()
    assert int(own_get("pid").read()) != pid
    assert not (tmp_path / "closed").exists()


def test_a_stream_outlives_the_router(own_system, own_get, tmp_path):
    response = own_get("gated")
    assert response.readline() == b"0\n"
    os.kill(own_system.pid_of("proxy"), signal.SIGKILL)
    assert own_get("pid").status == 200
    for number in range(3):
        (tmp_path / f"gate{number}").touch()
    assert response.read() == b"1\n2\n"
