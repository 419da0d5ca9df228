"""WebSockets: each is a query, whose answer begins when user code accepts, and a conversation.

What the client sends follows the query, and what user code sends are the parts of its answer, both
straight between this worker and the replica, a bounded number of bytes ahead of the other end.
Whoever closes says why: the client, user code, this worker when it stops (1012), or its absence
when a replica has died or user code has raised (1011).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from greenroom.actors.messages import BINARY, END, MORE, TEXT
from greenroom.actors.streams import NobodyListensError, Stream, StreamFailedError
from greenroom.core.closing import (
    ABNORMAL,
    FAILED,
    NORMAL,
    RESTARTING,
    close_frame,
    close_of,
)
from greenroom.core.errors import GreenroomError
from greenroom.core.tickets import SOCKET
from greenroom.http_front.answers import BadHeaderError, error_reply, passed_on, reply_to
from greenroom.http_front.asking import Ask
from greenroom.http_front.dispatcher import Feed
from greenroom.http_front.exchange import Event, Exchange, Headers, Receive, Reply

_logger = logging.getLogger(__name__)

SWITCHING = 101
RESPONSE = "websocket.http.response"
SUBPROTOCOL = b"sec-websocket-protocol"


class SocketExchange(Exchange):
    """A WebSocket's opening, and what leaves in it."""

    __slots__ = ()

    async def send(self, event: Event) -> None:
        """Pass an ASGI event to the server, adding the request id to what answers the opening."""
        kind = event["type"]
        if kind == "websocket.send":
            self.bytes_out += len(event.get("bytes") or event.get("text") or b"")
        elif kind == f"{RESPONSE}.body":
            self.bytes_out += len(event.get("body", b""))
        elif kind in {"websocket.accept", f"{RESPONSE}.start"}:
            self.status = event.get("status", SWITCHING)
            own = (b"x-request-id", self.request_id.encode("ascii"))
            event = {**event, "headers": [*event.get("headers", ()), own]}
        elif not self.status:  # a close that refuses
            self.status = 403
        await self._send(event)


class Sockets:
    """All WebSockets of one worker."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._open: set[_Conversation] = set()
        self._is_closing = False

    async def serve(self, exchange: Exchange, receive: Receive) -> None:
        """Open one, and return when it is closed; cancelled when the client is gone."""
        fed: list[Feed] = []
        try:
            answer = await self._ask(exchange, SOCKET, fed.append)
        except GreenroomError as error:
            reply = error_reply(error.http_status, type(error).__name__, str(error), exchange)
            await refuse(exchange, reply)
            return
        if not isinstance(answer, Stream):
            await refuse(exchange, reply_to(answer, exchange))
            return
        conversation = _Conversation(exchange, receive, answer, fed[0])
        self._open.add(conversation)
        if self._is_closing:
            conversation.close()
        try:
            await conversation.run()
        finally:
            self._open.remove(conversation)

    def close_all(self) -> None:
        """Close all, and those that are being opened, with 1012: the worker stops."""
        self._is_closing = True
        for conversation in self._open:
            conversation.close()


async def refuse(exchange: Exchange, reply: Reply) -> None:
    """Answer an opening with a response; with a bare 403 where the server cannot give another."""
    if RESPONSE not in exchange.scope.get("extensions", {}):
        await exchange.send({"type": "websocket.close", "code": 1008})
        return
    start = {"type": f"{RESPONSE}.start", "status": reply.status, "headers": reply.headers}
    await exchange.send(start)
    await exchange.send({"type": f"{RESPONSE}.body", "body": bytes(reply.body)})


class _Conversation:
    """One WebSocket that user code has accepted."""

    def __init__(self, exchange: Exchange, receive: Receive, stream: Stream, feed: Feed) -> None:
        self._exchange = exchange
        self._receive = receive
        self._stream = stream
        self._feed = feed
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last_words = close_frame(ABNORMAL)  # for the replica

    def close(self) -> None:
        """Close it: the worker stops."""
        if not self._closing.done():
            self._closing.set_result(None)

    async def run(self) -> None:
        """Carry messages both ways until one side ends it."""
        try:
            accept = self._accept()
        except BadHeaderError as error:
            self._leave()
            reply = error_reply(500, "UnsupportedResultError", str(error), self._exchange)
            await refuse(self._exchange, reply)
            return
        tasks: set[asyncio.Future[None]] = set()
        try:
            await self._exchange.send(accept)
            tasks = {
                asyncio.create_task(self._from_replica()),
                asyncio.create_task(self._from_client()),
                self._closing,
            }
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._closing.done() and not self._closing.cancelled():
                self._last_words = close_frame(RESTARTING, "the server stops")
        finally:
            self._leave()
            for task in tasks:
                task.cancel()
        await self._finish(tasks)

    async def _finish(self, tasks: set[asyncio.Future[None]]) -> None:
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]  # it is not None
        if self._closing.done() and not self._closing.cancelled():
            await self._close(self._last_words)

    def _leave(self) -> None:
        self._feed.leave(self._last_words)
        self._stream.close()

    def _accept(self) -> Event:
        headers: Headers = []
        subprotocol = None
        for name, value in passed_on(self._stream.headers):
            if name == SUBPROTOCOL:
                subprotocol = value.decode("latin-1")
            elif not name.startswith(b"sec-websocket-"):
                headers.append((name, value))
        return {"type": "websocket.accept", "subprotocol": subprotocol, "headers": headers}

    async def _from_replica(self) -> None:
        """Send what user code sends, and close as it closes."""
        try:
            while (event := await self._next_message()) is not None:
                await self._exchange.send(event)
        except OSError:  # the client has gone, and _from_client hears how
            await asyncio.get_running_loop().create_future()
        except StreamFailedError as error:
            _logger.warning("WebSocket %s was cut off: %s", self._exchange.request_id, error)
            await self._close(close_frame(FAILED, str(error)))

    async def _next_message(self) -> Event | None:
        """Return the next message; None at the end, which is passed on."""
        content: list[bytes] = []
        ends = MORE
        while ends == MORE:
            part = await self._stream.next_part()
            if part is None or part.ends == END:
                await self._close(close_frame(NORMAL) if part is None else part.data)
                return None
            content.append(part.data)
            ends = part.ends
        message = content[0] if len(content) == 1 else b"".join(content)
        if ends == TEXT:
            return {"type": "websocket.send", "text": message.decode()}
        return {"type": "websocket.send", "bytes": message}

    async def _close(self, frame: bytes) -> None:
        code, reason = close_of(frame)
        with contextlib.suppress(OSError):  # the client was quicker
            await self._exchange.send({"type": "websocket.close", "code": code, "reason": reason})

    async def _from_client(self) -> None:
        """Send on what the client sends, until it has gone."""
        while (event := await self._receive())["type"] != "websocket.disconnect":
            text = event.get("text")
            content, ends = (event["bytes"], BINARY) if text is None else (text.encode(), TEXT)
            with contextlib.suppress(NobodyListensError):  # the end is on its way to the client
                await self._feed.send(content, ends)
        self._last_words = close_frame(event.get("code", ABNORMAL), event.get("reason") or "")
