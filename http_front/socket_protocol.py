"""WebSockets on a connection of the worker: uvicorn's protocol on the websockets library.

What is added to uvicorn's (written against 0.54, ``protocols/websockets/websockets_sansio_impl``):

- an opening whose client leaves is cancelled, wherever it waits;
- a client that is slow is no dead one: a ping may stay unanswered while what was sent before it is
  being taken, or a long message is coming;
- one that stays amid a message for too long is given up, with 1008;
- a message in a great many fragments takes no more room than its bytes;
- what a client has not taken does not keep a connection that is closed;
- who has broken the protocol gets to read why;
- who is gone without a close is told as 1006.
"""

from __future__ import annotations

import asyncio
import struct
from socket import IPPROTO_TCP, TCP_INFO
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState
    from websockets.frames import Frame

PING_S = 20.0  # uvicorn's defaults
PONG_S = 20.0
CLOSE_S = 5.0
MESSAGE_TIMEOUT_S = 30.0  # and a second more for every MIN_RATE bytes of it
MIN_RATE = 500
POLICY_VIOLATION = 1008
PING_BYTES = 64  # more than one has, with TLS too
LINGER_S = 2.0
_ACKNOWLEDGED_AT = 120  # tcpi_bytes_acked in Linux's struct tcp_info


class FrontSocket(WebSocketsSansIOProtocol):
    """One connection that has become a WebSocket, or asks to."""

    def __init__(self, config: Config, server_state: ServerState, app_state: Any) -> None:
        super().__init__(config, server_state, app_state)
        self.close_timeout = CLOSE_S
        self._running: asyncio.Task[Any] | None = None
        self._is_broken = False
        self._has_heard = False  # since the last ping
        self._acknowledged = 0
        self._incomplete_since: float | None = None  # of a message that is coming

    async def run_asgi(self) -> None:
        """Run the app, which logs its own errors."""
        self._running = asyncio.current_task()
        try:
            await self.app(self.scope, self.receive, self.send)
        except (asyncio.CancelledError, ClientDisconnected):
            pass
        except Exception:
            self._fail()
        else:
            self.send_500_response()  # unless it has answered
        finally:
            self._running = None
        if self.close_timer is None:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio; nobody wants an opening any more that is not answered."""
        if self.handshake_complete:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": 1006})
        elif self._running is not None:
            self._running.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._has_heard = True
        if self._is_broken:
            return
        super().data_received(data)
        if not (self.frames or self.conn.reader.buffer):
            self._incomplete_since = None
        elif self._incomplete_since is None:
            self._incomplete_since = self.loop.time()

    def handle_cont(self, event: Frame) -> None:
        """Take the next fragment; any number of them takes no more room than their bytes."""
        if not isinstance(self.frames[0], bytearray):
            self.frames[0] = bytearray(self.frames[0])  # type: ignore[call-overload]
        self.frames[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """Note that a message is complete."""
        self._incomplete_since = None
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """Return the next event; the client may not be slower than we are."""
        was_paused = self.read_paused
        event = await super().receive()
        if was_paused and not self.read_paused and self._incomplete_since is not None:
            self._incomplete_since = self.loop.time()
        return event

    async def send(self, message: Any) -> None:
        """Take an event of the app; ClientDisconnected once it is closed, by whomever."""
        is_close = message["type"] == "websocket.close"
        if self.close_sent:
            if is_close:
                return
            raise ClientDisconnected
        await super().send(message)
        if self.close_timer is not None and is_close:
            self.close_timer.cancel()
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)

    def send_keepalive_ping(self) -> None:
        """Ping the client, or give it up."""
        self._has_heard = False
        if self._is_too_slow():
            self.conn.fail(POLICY_VIOLATION, "a message came too slowly")
            self.handle_parser_exception()
        else:
            super().send_keepalive_ping()

    def keepalive_timeout(self) -> None:
        """Give up a client that neither answers nor takes or sends anything.

        While user code does not take what is here, nothing is read, and so no answer.
        """
        if self._has_heard or self.read_paused or self._has_taken():
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        self.transport.abort()

    def handle_parser_exception(self) -> None:
        """Close what has broken the protocol; as what it sends is not read, it gets time to see."""
        broken = self.conn.close_sent
        code, reason = (1006, "") if broken is None else (broken.code, broken.reason)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.stop_keepalive()
        self.close_sent = self._is_broken = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _fail(self) -> None:
        """Answer or close as what has failed."""
        self.send_500_response()
        if not (self.close_sent or self.disconnected):
            self.conn.send_close(1011)
            self.transport.write(b"".join(self.conn.data_to_send()))

    def _is_too_slow(self) -> bool:
        """Tell whether a message has been coming for too long; not while nobody reads it."""
        if self._incomplete_since is None or self.read_paused:
            return False
        slow_s = self.loop.time() - self._incomplete_since
        return slow_s > MESSAGE_TIMEOUT_S + self._unfinished_size() / MIN_RATE

    def _unfinished_size(self) -> int:
        """Return how much of a message is here that is not complete."""
        return sum(map(len, self.frames)) + len(self.conn.reader.buffer)

    def _has_taken(self) -> bool:
        """Tell whether the client's side has taken anything but pings since the last time."""
        sock = self.transport.get_extra_info("socket")
        try:
            state = sock.getsockopt(IPPROTO_TCP, TCP_INFO, _ACKNOWLEDGED_AT + 8)
        except OSError:  # closed, or no TCP
            return False
        acknowledged: int = struct.unpack_from("=Q", state, _ACKNOWLEDGED_AT)[0]
        taken, self._acknowledged = acknowledged - self._acknowledged, acknowledged
        return taken > PING_BYTES
