"""An engine of another maker: gunicorn's own ASGI worker runs this app, as :data:`COMMAND` says."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

COMMAND = (
    f"{sys.executable} -m gunicorn --worker-class asgi --no-control-socket --chdir "
    f"{Path(__file__).parents[2]} --bind 127.0.0.1:{{port}} tests.support.engine:app"
)
cut: list[str] = []  # what was asked for by clients that left


async def health(_request: Request) -> Response:
    return PlainTextResponse(
        "ok", 200 if not Path(os.environ.get("SICK", "/none")).exists() else 503
    )


async def echo(request: Request) -> Response:
    """Answer what came: the body, and how."""
    body = b"".join([part async for part in request.stream()])
    headers = {
        "x-target": f"{request.url.path}?{request.url.query}",
        "x-said": request.headers.get("x-said", ""),
        "x-length": request.headers.get("content-length", "none"),
        "x-host": request.headers["host"],
    }
    return Response(body, int(request.query_params.get("status", 200)), headers)


async def parts(request: Request) -> Response:
    """Stream so many events, with a pause where asked for."""

    async def made() -> AsyncIterator[str]:
        try:
            for number in range(int(request.query_params["count"])):
                yield f"data: {number}\n\n"
                await asyncio.sleep(float(request.query_params.get("pause_s", 0)))
        except asyncio.CancelledError:
            cut.append(request.query_params["name"])
            raise

    return StreamingResponse(made(), media_type="text/event-stream")


async def were_cut(_request: Request) -> Response:
    return PlainTextResponse(",".join(cut))


async def pid(_request: Request) -> Response:
    return PlainTextResponse(f"{os.getppid()} {os.getpid()}")


async def wait(_request: Request) -> Response:
    await asyncio.sleep(0.2)
    return PlainTextResponse("waited")


async def talk(socket: WebSocket) -> None:
    if socket.query_params.get("refuse"):
        await socket.close()
        return
    said = [socket.headers.get(name) for name in ("host", "origin", "cookie", "user-agent")]
    await socket.accept(
        subprotocol=(socket.scope["subprotocols"] or [None])[0],
        headers=[(b"set-cookie", b"c=d"), (b"x-said", json.dumps(said).encode())],
    )
    async for text in socket.iter_text():
        if text == "close":
            await socket.close(4001, "as asked")
            return
        await socket.send_text(text[::-1])


app = Starlette(
    routes=[
        Route("/health", health),
        Route("/echo", echo, methods=["GET", "POST", "HEAD"]),
        Route("/parts", parts),
        Route("/cut", were_cut),
        Route("/pid", pid),
        Route("/wait", wait),
        WebSocketRoute("/talk", talk),
    ]
)
