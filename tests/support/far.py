"""What a client does with a host's front: parts, uploads, WebSockets. Called on a host."""

from __future__ import annotations

import hashlib
import http.client
import time
from pathlib import Path

from websockets.sync.client import connect

from tests.support.asking import ask

APP = """
import asyncio
import hashlib
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from greenroom import serve

async def parts(request):
    async def made():
        for number in range(int(request.query_params["parts"])):
            yield b"%d " % number * 1000
    return StreamingResponse(made())

async def wait(request):
    async def made():
        yield b"begun"
        await asyncio.sleep(60)
    return StreamingResponse(made())

async def upload(request):
    digest = hashlib.sha256()
    async for piece in request.stream():
        digest.update(piece)
    return PlainTextResponse(digest.hexdigest())

async def talk(socket):
    await socket.accept()
    async for message in socket.iter_text():
        await socket.send_text(message[::-1])

now = peak = 0

async def count(request):
    global now, peak
    now += 1
    peak = max(peak, now)
    await asyncio.sleep(0.005)
    now -= 1
    return PlainTextResponse(str(peak))

routes = [Route("/parts", parts), Route("/wait", wait), Route("/upload", upload, methods=["POST"]),
          Route("/count", count), WebSocketRoute("/talk", talk)]

@serve.deployment(max_ongoing_requests=4,
                  ray_actor_options={"label_selector": {"zone": "there"}})
@serve.ingress(Starlette(routes=routes))
class Far:
    pass

app = Far.bind()
"""
BACKEND = "default#Far"
TIMEOUT_S = 60
_waiting: list[http.client.HTTPResponse] = []


def read_parts(port: int, count: int) -> bool:
    """GET an answer in parts; tell whether it came whole."""
    got = ask(f"http://127.0.0.1:{port}/parts?parts={count}")
    return got.body == b"".join(b"%d " % number * 1000 for number in range(count))


def begin_to_wait(port: int) -> None:
    """GET an answer of which no more than its beginning comes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", "/wait")
    _waiting.append(connection.getresponse())
    assert _waiting[0].read(5) == b"begun"


def is_idle() -> bool:
    """Return whether each connection of this host has acknowledged what was sent over it."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return all(
        queues.startswith("00000000:") for _, _, _, state, queues, *_ in rows if state == "01"
    )


def seconds_until_broken() -> float:
    """Return how long it takes until that answer is cut short, which it has to be."""
    begun = time.monotonic()
    try:
        rest = _waiting.pop().read()
    except (http.client.IncompleteRead, ConnectionResetError):
        return time.monotonic() - begun
    raise AssertionError(f"it came whole, with {rest!r}")


def upload(port: int, size: int) -> bool:
    """POST a body; tell whether it arrived as it was sent."""
    body = bytes(range(256)) * (size // 256)
    got = ask(f"http://127.0.0.1:{port}/upload", body)
    return got.body.decode() == hashlib.sha256(body).hexdigest()


def talk(port: int, count: int) -> bool:
    """Send messages over a WebSocket; tell whether each came back reversed, in order."""
    said = [f"message {number}" for number in range(count)]
    with connect(f"ws://127.0.0.1:{port}/talk", open_timeout=TIMEOUT_S, close_timeout=TIMEOUT_S,
                 proxy=None) as socket:  # fmt: skip
        for each in said:
            socket.send(each)
        return [socket.recv(TIMEOUT_S) for _ in said] == [each[::-1] for each in said]
