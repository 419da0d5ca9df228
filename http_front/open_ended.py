"""Answers of unknown length to clients of HTTP/1.0, which knows no chunks.

Such an answer ends with its connection (RFC 9112, 6.3); uvicorn would send chunks all the same, and
the client would take their sizes for the body's. One that breaks off resets the connection, as a
close would look like its end.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from greenroom.http_front.exchange import App, Event, Receive, Scope, Send

_AT_ONCE = struct.pack("ii", 1, 0)


def without_chunks(app: App, cycle: Any, transport: asyncio.Transport) -> App:
    """Return what answers as ``app`` does; ``cycle`` is uvicorn's of the request."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def sending(event: Event) -> None:
            nonlocal has_length
            if event["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in event["headers"])
                cycle.chunked_encoding = None if has_length else False
            elif not has_length:
                cycle.expected_content_length = len(event.get("body", b""))
            await send(event)

        try:
            await app(scope, receive, sending)
        finally:
            if not (has_length or cycle.response_complete or transport.is_closing()):
                _reset(transport)

    return answer


def _reset(transport: asyncio.Transport) -> None:
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()
