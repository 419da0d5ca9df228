"""A connection to a front in this process: the protocol, the application, and a fake link."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from greenroom.http_front.app import Front
from greenroom.http_front.connections import Connections
from greenroom.http_front.protocol import FrontProtocol

OPEN = os.pipe()  # of which nobody leaves
# The way that requests go: "off" for the first one takes them through Falcon, and a middleware,
# such as tests.support.middlewares:untouched, by ASGI's events.
WAY = {
    name: os.environ[name]
    for name in ("GREENROOM_HTTP_SHORT_WAY", "GREENROOM_HTTP_MIDDLEWARES")
    if name in os.environ
}


class WireSocket:
    """What is watched while nothing is read of a wire."""

    def fileno(self) -> int:
        return OPEN[0]

    def setsockopt(self, *option: Any) -> None:
        pass


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.writes = 0
        self.closed = False
        self.paused = False
        self.socket = WireSocket()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        known = {"socket": self.socket, "peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 1)}
        return known.get(name, default)

    def write(self, data: Any) -> None:
        self.written += bytes(data)
        self.writes += 1

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def turn_over() -> None:
    """Let everything on the loop happen that is ready to."""
    for _ in range(30):
        await asyncio.sleep(0)


async def respond(send: Any, body: bytes = b"") -> None:
    """Answer 200 with a body, as an application does."""
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Conversation:
    """One connection to an application; to be made on a running loop."""

    def __init__(
        self, app: Any, options: Any, begin: Any = None, connections: Connections | None = None
    ) -> None:
        self.wire = Wire()
        self.connections = connections or Connections(app, options, 100)
        self.protocol: Any = FrontProtocol(self.connections, begin)
        self.wire.set_protocol = self._become  # type: ignore[method-assign]
        self.protocol.connection_made(self.wire)

    def _become(self, protocol: Any) -> None:
        self.protocol = protocol  # a WebSocket's

    def say(self, data: bytes) -> None:
        self.protocol.data_received(data)

    async def end(self) -> None:
        self.protocol.connection_lost(None)
        while self.connections.tasks:
            await asyncio.wait(self.connections.tasks)


def head(method: bytes, path: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join([b"%s %s HTTP/1.1" % (method, path), b"Host: x", *lines, b"", b""])


async def exchange(front: Front, *segments: bytes) -> bytes:
    """Send each segment when the one before it has been dealt with; return all that comes."""
    connection = connected(front)
    for segment in segments:
        if not connection.wire.closed:
            connection.say(segment)
            await turn_over()
    written = connection.wire.written
    await connection.end()
    return written


def connected(front: Front) -> Conversation:
    return Conversation(front, front.options, front.begin)
