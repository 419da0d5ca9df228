"""gunicorn's WebSocket protocol, made to refuse with a response and to give up on dead clients.

It reaches into gunicorn 27.0 (``gunicorn/asgi/websocket.py``):

- An app may answer an opening with a response of its own (ASGI's ``websocket.http.response``).
- What a client sends before user code takes it is bounded in bytes. The stock protocol bounds the
  number of messages, 32 of 16 MB each.
- Unmasking takes some milliseconds per MiB. The stock one blocks the worker for a hundred.
- Clients are pinged. One that neither answers nor takes what is sent to it is dropped, and so is
  one that stays in the middle of a message for too long.
- The application hears the reason of a close. A client that does not close its side in return is
  cut off, with what it has not taken.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from socket import IPPROTO_TCP, TCP_INFO
from typing import Any

from gunicorn.asgi import websocket

PING_S = 20.0
MOST_UNREAD = 256 * 1024
MESSAGE_TIMEOUT_S = 30.0  # and a second more for every MIN_RATE bytes of it
MIN_RATE = 500
UNMASKED = 4096  # bytes at once; a multiple of 4
POLICY_VIOLATION = 1008
_ACKNOWLEDGED_AT = 120  # in Linux's struct tcp_info, tcpi_bytes_acked
RESPONSE = "websocket.http.response"


def install() -> None:
    """Have gunicorn use this protocol from now on; it asks its module at each opening."""
    websocket.WebSocketProtocol = FrontSocket


class FrontSocket(websocket.WebSocketProtocol):  # type: ignore[misc]  # gunicorn ships no types
    """One connection that has become a WebSocket, or asks to."""

    def __init__(
        self,
        transport: asyncio.Transport,
        scope: dict[str, Any],
        app: Any,
        log: Any,
        max_message_size: int,
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(transport, scope, app, log, max_message_size, drain)
        scope["extensions"] = {RESPONSE: {}}
        self._refusal: dict[str, Any] | None = None
        self._refusal_body = b""
        self._unread = 0  # bytes of messages that wait for the app
        self._has_heard = False
        self._acknowledged = 0
        self._loop = asyncio.get_running_loop()
        self._slow_since: float | None = None

    def feed_data(self, data: bytes) -> None:
        """Take what has come."""
        self._has_heard = True
        super().feed_data(data)

    async def run(self) -> None:
        """Run the app, with an eye on the client."""
        watching = asyncio.create_task(self._watch())
        try:
            await super().run()
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while not self.closed:
            self._has_heard = False
            await asyncio.sleep(PING_S / 2)
            if self.accepted and not self._close_sent:
                await self._send_frame(websocket.OPCODE_PING, b"")
            await asyncio.sleep(PING_S / 2)
            if self.accepted and not (self._has_heard or self._has_taken()):
                self.log.debug("a WebSocket client is silent")
                self.transport.abort()
            elif self._is_too_slow():
                await self._send_close(POLICY_VIOLATION, "a message came too slowly")
                self.transport.close()

    def _has_taken(self) -> bool:
        """Tell whether the client's side has taken anything since the last time."""
        sock = self.transport.get_extra_info("socket")
        try:
            state = sock.getsockopt(IPPROTO_TCP, TCP_INFO, _ACKNOWLEDGED_AT + 8)
        except OSError:  # closed, or no TCP
            return False
        (acknowledged,) = struct.unpack_from("=Q", state, _ACKNOWLEDGED_AT)
        has: bool = acknowledged > self._acknowledged
        self._acknowledged = acknowledged
        return has

    def _is_too_slow(self) -> bool:
        """Tell whether a message has been coming for too long; not while nobody reads it."""
        size: int = self._fragments_size + len(self._buffer)
        if not size or len(self._buffer) >= self._wanted:
            self._slow_since = None
            return False
        if self._slow_since is None:
            self._slow_since = self._loop.time()
        slow_s: float = self._loop.time() - self._slow_since
        return slow_s > MESSAGE_TIMEOUT_S + size / MIN_RATE

    async def _put_message(self, message: dict[str, Any]) -> None:
        while self._unread >= MOST_UNREAD and not self._close_sent:
            self._queue_space.clear()
            await self._queue_space.wait()
        self._slow_since = None
        self._unread += _size(message)
        await super()._put_message(message)

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await super()._receive()
        self._unread -= _size(message)
        if self._unread >= MOST_UNREAD:
            self._queue_space.clear()
        if message["type"] == "websocket.disconnect":
            message["reason"] = self.close_reason
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == f"{RESPONSE}.start" and not self.accepted:
            self._refusal = message
        elif kind == f"{RESPONSE}.body" and self._refusal is not None:
            self._refusal_body += message.get("body", b"")
            if not message.get("more_body", False):
                self._refuse(self._refusal, self._refusal_body)
        else:
            await super()._send(message)
            if kind == "websocket.close" and self.accepted and not self._close_received:
                self.transport.abort()

    def _refuse(self, start: dict[str, Any], body: bytes) -> None:
        self._denied = self.closed = True
        self._close_event.set()
        status = start["status"]
        try:
            phrase = HTTPStatus(status).phrase
        except ValueError:
            phrase = ""
        headers = [(k, v) for k, v in start["headers"] if k not in _FRAMING]
        headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        lines = b"".join([b"%s: %s\r\n" % (name, value) for name, value in headers])
        head = b"HTTP/1.1 %d %s\r\n" % (status, phrase.encode())
        self.transport.write(head + lines + b"\r\n" + body)
        self.transport.close()

    def _unmask(self, payload: bytes, masking_key: bytes) -> bytes:
        starts = range(0, len(payload), UNMASKED)
        return b"".join([_xor(payload[at : at + UNMASKED], masking_key) for at in starts])


def _xor(piece: bytes, masking_key: bytes) -> bytes:
    size = len(piece)
    mask = (masking_key * (size // 4 + 1))[:size]
    as_numbers = int.from_bytes(piece, "big") ^ int.from_bytes(mask, "big")
    return as_numbers.to_bytes(size, "big")


_FRAMING = frozenset({b"content-length", b"connection", b"transfer-encoding"})


def _size(message: dict[str, Any]) -> int:
    return len(message.get("bytes") or message.get("text") or b"")
