"""Request bodies that follow their query in parts, through real HTTP."""

import asyncio
import contextlib
import hashlib
import http.client
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
from fastapi import FastAPI, Request, UploadFile
from fastapi.responses import StreamingResponse

from greenroom import serve
from greenroom.actors.caller.uploads import KEPT
from greenroom.http_front.bodies import WHOLE
from tests.actors.noting import DEADLINE_S, Noting
from tests.support.asking import answer as answer_of, connect as connect_to
from tests.support.metrics import ongoing
from tests.support.systems import running_system, wait_until

LARGE = 5 * WHOLE
BEGUN = WHOLE + 1000  # enough of a body for its query to leave
MUCH = KEPT + 2 * WHOLE  # of which more than KEPT has followed the query
api = FastAPI()


@serve.deployment
@serve.ingress(api)
class Taker(Noting):
    """Takes bodies in every way."""

    @api.get("/pid")
    async def pid(self) -> int:
        return os.getpid()

    @api.api_route("/whole", methods=["PUT", "POST"])
    async def whole(self, request: Request) -> dict[str, Any]:
        body = await request.body()
        return {"size": len(body), "sha256": hashlib.sha256(body).hexdigest()}

    @api.post("/parts")
    async def parts(self, request: Request) -> dict[str, Any]:
        digest, size, most, count = hashlib.sha256(), 0, 0, 0
        async for part in request.stream():
            digest.update(part)
            size, most, count = size + len(part), max(most, len(part)), count + 1
        return {"size": size, "sha256": digest.hexdigest(), "most": most, "count": count}

    @api.post("/file")
    async def file(self, file: UploadFile, name: str = "") -> dict[str, Any]:
        digest = hashlib.sha256(await file.read()).hexdigest()
        return {"name": file.filename, "sha256": digest}

    @api.post("/echo")
    async def echo(self, request: Request) -> StreamingResponse:
        return StreamingResponse(request.stream())

    @api.put("/stuck")
    async def stuck(self, request: Request) -> int:
        """Note the first part, and take no more before there is a gate."""
        size = 0
        try:
            async for part in request.stream():
                if not size:
                    self.note(f"began {os.getpid()}")
                size += len(part)
                if size > MUCH:
                    self.note("much")
                while not (self.folder / "gate").exists():
                    await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.note("cancelled")
            raise
        return size

    @api.post("/stuck")
    async def stuck_too(self, request: Request) -> int:
        return await self.stuck(request)

    @api.post("/early")
    async def early(self) -> str:
        return "no, thanks"


Connect = Callable[[], http.client.HTTPConnection]


@pytest.fixture
def connect(running):
    with contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(contextlib.closing(connect_to(running.url)))


@pytest.fixture(scope="module")
def path(deployed_once, tmp_path_factory):
    """One for all who need to know nothing of what it did, and leave it as it was."""
    return deployed_once(Taker.bind(str(tmp_path_factory.mktemp("taker"))))


@pytest.fixture
def own_path(name, deployed, tmp_path):
    deployed(Taker.bind(str(tmp_path)))
    return f"/{name}"


def answer(connection: http.client.HTTPConnection) -> tuple[int, bytes]:
    got = answer_of(connection)
    return got.status, got.body


def begin(
    connection: http.client.HTTPConnection, method: str, path: str, length: int
) -> socket.socket:
    """Send the headers of a request; return where its body goes."""
    connection.putrequest(method, path)
    connection.putheader("Content-Length", str(length))
    connection.endheaders()
    assert connection.sock is not None
    return connection.sock


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


# --- what arrives -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["whole", "parts"])
def test_bodies_of_every_size_arrive_as_they_were_sent(path, connect, way):
    for size in (0, 1, WHOLE - 1, WHOLE, WHOLE + 1, LARGE, 20 * WHOLE):
        body = os.urandom(size)
        connection = connect()
        connection.request("POST", f"{path}/{way}", body)
        status, got = answer(connection)
        assert status == 200
        assert hashlib.sha256(body).hexdigest().encode() in got, size


def test_parts_arrive_while_later_ones_are_not_sent_yet(path, connect):
    connection = connect()
    connection.putrequest("POST", f"{path}/echo")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    body = connection.sock
    body.sendall(chunk(b"first"))
    response = connection.getresponse()
    assert response.read1() == b"first"
    for each in (b"second", b"third"):
        body.sendall(chunk(each))
        assert response.read1() == each
    body.sendall(chunk(b""))
    assert response.read() == b""


def test_user_code_that_does_not_read_holds_the_client_back(own_path, connect, noted, tmp_path):
    length = 90 * WHOLE  # the kernel alone may keep 32 MiB for the reader, 4 MiB for the writer
    body = begin(connection := connect(), "PUT", f"{own_path}/stuck", length)
    body.settimeout(1)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < length:
            sent += body.send(b"x" * min(WHOLE, length - sent))
    assert sent < 60 * WHOLE
    noted("began")
    (tmp_path / "gate").touch()
    body.settimeout(DEADLINE_S)
    body.sendall(b"x" * (length - sent))
    assert answer(connection) == (200, b"%d" % length)


def test_an_answer_before_the_end_of_the_body_arrives(path, connect):
    connection = connect()
    body = begin(connection, "POST", f"{path}/early", LARGE)
    body.sendall(b"x" * (LARGE - 1))
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b'"no, thanks"')
    assert response.headers["connection"] == "close"


# --- what does not --------------------------------------------------------------------------


def test_a_client_that_leaves_amid_its_body_cancels_the_query(
    own_path, connect, noted, running, name
):
    body = begin(connection := connect(), "PUT", f"{own_path}/stuck", LARGE)
    body.sendall(b"x" * (WHOLE + 1000))
    noted("began")
    connection.close()
    noted("cancelled")
    wait_until(lambda: ongoing(running, name) == 0, DEADLINE_S, "the slot is free")


@serve.deployment
class Sizes:
    async def __call__(self, request: Any) -> int:
        return len(await request.body())


@serve.deployment
class Forwarding:
    def __init__(self, sizes: Any) -> None:
        self.sizes = sizes

    async def __call__(self, request: Any) -> Any:
        if request.method == "POST":
            await request.body()
        try:
            return await self.sizes.remote(request)
        except ValueError as error:
            return str(error)


def test_a_request_whose_body_is_here_may_be_passed_on(running, deployed, name):
    deployed(Forwarding.bind(Sizes.bind()))
    asked = partial(running.get, f"/{name}")
    assert asked(method="PUT", data=b"small") == (200, b"5")
    assert asked(method="POST", data=bytes(LARGE)) == (200, b"%d" % LARGE)
    status, found = asked(method="PUT", data=bytes(LARGE))
    assert status == 200
    assert b"await its body() before it is passed on" in found


@pytest.mark.slow
def test_there_may_be_no_limit_and_memory_stays_as_it_was(tmp_path):
    size = 200 * WHOLE
    part = os.urandom(WHOLE)
    with running_system(tmp_path / "state", GREENROOM_HTTP_MAX_BODY_BYTES="none") as own:
        own.deploy(Taker.bind(str(tmp_path)))
        processes = [
            psutil.Process(pid)
            for role, pid in own.pids()
            if role in {"proxy", "http worker"} or role.startswith("replica")
        ]
        connection = connect_to(own.url)
        connection.request("POST", "/parts", b"warm" * WHOLE)
        assert answer(connection)[0] == 200
        before = [process.memory_info().rss for process in processes]
        most = list(before)
        body = begin(connection, "POST", "/echo", size)
        digest = hashlib.sha256()
        response = None
        for _ in range(size // WHOLE):
            body.sendall(part)
            response = response or connection.getresponse()
            digest.update(response.read(WHOLE))
            now = [process.memory_info().rss for process in processes]
            most = [max(pair) for pair in zip(most, now, strict=True)]
        assert response is not None
        digest.update(response.read())
        connection.close()
    expected = hashlib.sha256()
    for _ in range(size // WHOLE):
        expected.update(part)
    assert digest.digest() == expected.digest()
    grown = [after - early for early, after in zip(before, most, strict=True)]
    assert max(grown) < 30 * WHOLE, f"by bytes: {grown}"


# --- deaths -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_query_whose_body_has_hardly_left_runs_again_at_another_replica(
    own_path, connect, noted, tmp_path
):
    body = begin(connection := connect(), "PUT", f"{own_path}/stuck", LARGE)
    body.sendall(b"x" * BEGUN)
    (pid,) = noted("began ")
    os.kill(int(pid), signal.SIGKILL)
    (tmp_path / "gate").touch()
    body.sendall(b"x" * (LARGE - BEGUN))
    assert answer(connection) == (200, b"%d" % LARGE)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "sent"), [("PUT", MUCH), ("POST", BEGUN)])
def test_what_cannot_be_sent_again_or_may_not_run_again_is_503(
    own_path, connect, noted, method, sent, tmp_path
):
    body = begin(connection := connect(), method, f"{own_path}/stuck", LARGE)
    body.sendall(b"x" * BEGUN)
    (pid,) = noted("began ")
    if sent > BEGUN:  # more is taken than is kept
        (tmp_path / "gate").touch()
        body.sendall(b"x" * (LARGE - BEGUN - 1))
        noted("much")
    os.kill(int(pid), signal.SIGKILL)
    status, text = answer(connection)
    assert (status, b"died" in text) == (503, True), text


@pytest.mark.slow
def test_an_upload_outlives_the_proxy(tmp_path, noted):
    with running_system(tmp_path / "state") as own:
        own.deploy(Taker.bind(str(tmp_path)))
        connection = connect_to(own.url)
        body = begin(connection, "POST", "/stuck", LARGE)
        body.sendall(b"x" * BEGUN)
        noted("began")
        os.kill(own.pid_of("proxy"), signal.SIGKILL)
        (tmp_path / "gate").touch()
        body.sendall(b"x" * (LARGE - BEGUN))
        assert answer(connection) == (200, b"%d" % LARGE)
