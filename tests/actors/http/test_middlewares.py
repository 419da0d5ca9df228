"""Middlewares of a whole system, which also WebSockets and streams pass through."""
# No postponed annotations: FastAPI resolves them in the replica.

import gzip
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from greenroom import serve
from tests.support.systems import RunningSystem, running_system

ROOT = Path(__file__).parents[3]
HERE = "tests.support.middlewares"
api = FastAPI()


@serve.deployment
@serve.ingress(api)
class Talk:
    @api.websocket("/echo")
    async def echo(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(await websocket.receive_text())
        await websocket.send_text(websocket.headers["x-tags"])
        await websocket.close(4001)

    @api.get("/parts")
    def parts(self) -> StreamingResponse:
        return StreamingResponse(f"{number}\n" * 500 for number in range(20))

    @api.post("/size")
    async def size(self, payload: dict[str, Any]) -> int:
        return len(payload["text"])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    middlewares = [
        (f"{HERE}:Tag", {"word": "seen"}),
        (f"{HERE}:Guard", {"password": "open"}),
        f"{HERE}:Stamp",
        ("starlette.middleware.gzip:GZipMiddleware", {"minimum_size": 100}),
    ]
    environ = {
        "GREENROOM_HTTP_MIDDLEWARES": json.dumps(middlewares),
        "GREENROOM_HTTP_MIDDLEWARES_DIR": str(ROOT),
        "GREENROOM_HTTP_CORS": "*",
    }
    with running_system(tmp_path_factory.mktemp("guarded"), **environ) as running:
        running.deploy(Talk.bind())
        yield running


def ask(running: RunningSystem, path: str, data: bytes | None = None, **head: str) -> Any:
    head = {"Authorization": "open", "Origin": "https://a.example", **head}
    request = urllib.request.Request(running.url + path, data, head)
    return urllib.request.urlopen(request, timeout=20)


def test_a_websocket_passes_through_them_both_ways(guarded: RunningSystem) -> None:
    url = guarded.url.replace("http", "ws") + "/echo"
    with connect(url, additional_headers={"Authorization": "open"}) as opened:
        assert opened.response is not None
        assert opened.response.headers["x-tags"] == "seen"
        opened.send("hello")
        assert (opened.recv(20), opened.recv(20)) == ("hello", "seen")
        with pytest.raises(ConnectionClosed):
            opened.recv(20)
        assert opened.close_code == 4001


def test_parts_pass_through_them(guarded: RunningSystem) -> None:
    with ask(guarded, "/parts", **{"Accept-Encoding": "gzip"}) as response:
        assert response.headers["content-encoding"] == "gzip"
        assert response.headers["x-tags"] == "seen"
        assert response.headers["access-control-allow-origin"] == "*"
        compressed = response.read()
    whole = "".join(f"{number}\n" * 500 for number in range(20)).encode()
    assert gzip.decompress(compressed) == whole
    with ask(guarded, "/parts") as response:
        assert response.read() == whole, "nothing of the first one is in the second"


def test_a_large_body_passes_through_them(guarded: RunningSystem) -> None:
    body = json.dumps({"text": "x" * 3_000_000}).encode()
    with ask(guarded, "/size", body, **{"Content-Type": "application/json"}) as response:
        assert response.read() == b"3000000"
