"""WebSockets: each is a query, whose answer begins when user code accepts, and a conversation.

What the client sends follows the query, and what user code sends are the parts of its answer, both
straight between this worker and the replica, a bounded number of bytes ahead of the other end. The
side that closes says why: the client, user code, or this worker when it stops (1012), when a
replica has died, or when user code has raised (1011).

:class:`Conversations` is the application's side of that, in ASGI's events, so that middlewares see
them. Its opening is a request like any other, until the app accepts it (:mod:`.protocol`).
:class:`FrontSocket` is the connection from then on, on the websockets library's protocol without
I/O. It has limits for everything that a client can do, or not do:

- a slow client is not a dead one: a ping may stay unanswered while the client has something to
  take, or while a long message is coming;
- a client that stays amid a message for too long is closed with 1008;
- messages that wait for their end, or for user code, are in the budget for bodies that wait, each
  with what it takes besides its bytes, until the connection closes; one for which there is no room
  is closed with 1013;
- a message in a great many fragments takes no more room than its bytes;
- nothing is read while what was written is not taken, and that has a time limit;
- a client that has broken the protocol gets to read why, and one that is gone without a close
  counts as 1006.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sys
import termios

from websockets.datastructures import Headers as OpeningHeaders
from websockets.frames import Frame, Opcode
from websockets.http11 import Request as Opening
from websockets.protocol import State
from websockets.server import ServerProtocol

from greenroom.actors.caller.streams import NobodyListensError, Stream, StreamFailedError
from greenroom.actors.caller.uploads import Upload
from greenroom.actors.messages.closing import (
    ABNORMAL,
    FAILED,
    NORMAL,
    RESTARTING,
    close_frame,
    close_of,
)
from greenroom.actors.messages.queries import BINARY, END, MORE, TEXT
from greenroom.core.routing.tickets import SOCKET
from greenroom.http_front.asgi import Event, Headers, Receive, Send
from greenroom.http_front.bodies import RefusedRequestError
from greenroom.http_front.connections import NO_ROOM, ClientConnection, Connections, Pace
from greenroom.http_front.heads import Head
from greenroom.http_front.link import Link
from greenroom.http_front.request import CLOSE, Request, query_for
from greenroom.http_front.responses import (
    BadHeaderError,
    error_reply,
    passed_on,
    reply_to,
    send_reply,
)

_logger = logging.getLogger(__name__)
_wire_logger = logging.getLogger(f"{__name__}.wire")
_wire_logger.setLevel(logging.ERROR)  # the library would log each that opens and closes

SWITCHING = 101
SUBPROTOCOL = b"sec-websocket-protocol"

OPENING_TIMEOUT_S = 60.0  # where requests have no limit
PING_S = 20.0  # in which a client has to be heard of, too
CLOSE_S = 5.0
MESSAGE_TIMEOUT_S = 30.0  # that a message may lag behind MIN_RATE
TURN = 32 * 1024  # bytes that are read at once: of empty messages, that takes some 50 ms
UNCOUNTED_BYTES = 64 * 1024  # of messages that wait, which cost no more than a connection does
POLICY_VIOLATION = 1008
TRY_AGAIN_LATER = 1013
INVALID_DATA = 1007


# --- The conversation -----------------------------------------------------------------------------


class Conversations:
    """All open WebSockets of one worker."""

    def __init__(self, link: Link, request_timeout_s: float | None) -> None:
        self._link = link
        self._timeout_s = OPENING_TIMEOUT_S if request_timeout_s is None else request_timeout_s
        self._open: set[_Conversation] = set()
        self._is_closing = False

    async def serve(self, request: Request, receive: Receive, send: Send) -> None:
        """Open one, and return when it is closed; cancelled when the client is gone.

        Raises a GreenroomError for an opening that cannot be asked about.
        """
        uploads: list[Upload] = []
        query = query_for(request, self._link.next_id(), self._timeout_s, follows=SOCKET)
        answer = await self._link.ask(query, uploads.append)
        if not isinstance(answer, Stream):
            await send_reply(reply_to(answer, request), request, send)
            return
        conversation = _Conversation(request, receive, send, answer, uploads[0])
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


class _Conversation:
    """One WebSocket that user code has accepted."""

    def __init__(
        self, request: Request, receive: Receive, send: Send, stream: Stream, upload: Upload
    ) -> None:
        self._request = request
        self._receive = receive
        self._send = send
        self._stream = stream
        self._upload = upload
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing_frame = close_frame(ABNORMAL)  # for the replica

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
            reply = error_reply(500, "UnsupportedResultError", str(error), self._request)
            await send_reply(reply, self._request, self._send)
            return
        tasks: set[asyncio.Future[None]] = set()
        try:
            await self._send(accept)
            tasks = {
                asyncio.create_task(self._from_replica()),
                asyncio.create_task(self._from_client()),
                self._closing,
            }
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._closing.done() and not self._closing.cancelled():
                self._closing_frame = close_frame(RESTARTING, "the server stops")
        finally:
            self._leave()
            for task in tasks:
                task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
        if not self._closing.cancelled():
            await self._close(self._closing_frame)

    def _leave(self) -> None:
        self._upload.leave(self._closing_frame)
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
                await self._send(event)
        except OSError:  # the client has gone, and _from_client hears how
            # Behind messages that user code may never take: it writes, and has to hear of the end.
            self._upload.hurry()
            await asyncio.get_running_loop().create_future()
        except StreamFailedError as error:
            _logger.warning("WebSocket %s was cut off: %s", self._request.id, error)
            await self._close(close_frame(FAILED, str(error)))

    async def _next_message(self) -> Event | None:
        """Return the next message; None at the end, which is passed on."""
        content: list[bytes] = []
        ends = MORE
        while ends == MORE:
            part = await self._stream.next()
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
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _from_client(self) -> None:
        """Send on what the client sends, until it has gone."""
        while (event := await self._receive())["type"] != "websocket.disconnect":
            text = event.get("text")
            content, ends = (event["bytes"], BINARY) if text is None else (text.encode(), TEXT)
            with contextlib.suppress(NobodyListensError):  # the end is on its way to the client
                await self._upload.send(content, ends)
        self._closing_frame = close_frame(event.get("code", ABNORMAL), event.get("reason") or "")


# --- The connection -------------------------------------------------------------------------------


def disconnect(code: int = ABNORMAL, reason: str = "") -> Event:
    """Return the event that tells an app of the end."""
    return {"type": "websocket.disconnect", "code": code, "reason": reason}


class ClientGoneError(OSError):
    """The WebSocket is closed; nothing can be sent."""


def handshake(head: Head) -> Headers:
    """Return the headers that accept an opening; RefusedRequestError for one that is malformed."""
    lines = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers]
    conn = ServerProtocol(logger=_wire_logger)
    response = conn.accept(Opening("/", OpeningHeaders(lines)))
    conn.parser.close()  # or the two would hold each other
    headers = [
        (name.lower().encode("ascii"), value.encode("latin-1", "replace"))
        for name, value in response.headers.raw_items()
        if name not in {"Date", "Content-Length", "Content-Type"}
    ]
    if response.status_code != SWITCHING:
        others = tuple(each for each in headers if each != CLOSE)
        raise RefusedRequestError(response.status_code, bytes(response.body).decode(), others)
    return headers


class FrontSocket(ClientConnection):
    """One connection that has become a WebSocket."""

    def __init__(self, shared: Connections, request: Request) -> None:
        super().__init__(shared)
        self._request = request
        self._conn = ServerProtocol(
            state=State.OPEN,
            max_size=shared.options.max_websocket_message_bytes,
            logger=_wire_logger,
        )
        self._queue: asyncio.Queue[tuple[Event, int]] = asyncio.Queue()  # with their sizes
        self._ping_at = shared.loop.time() + PING_S
        self._has_heard = True  # since the last ping
        self._message: bytes | bytearray | None = None  # of which more is to come
        self._is_text = False
        self._pace = Pace()  # of a message that is coming
        self._untaken = 0  # bytes of memory that messages take that are here in full
        self._in_hand = 0  # of these, the message that the app works on
        self._counted = 0  # bytes in Connections.waiting_bytes

    # --- See asyncio ------------------------------------------------------------------------------

    def eof_received(self) -> None:
        """Tell the app now: what the client never takes may keep the transport."""
        self._queue.put_nowait((disconnect(), 0))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio; the app hears of it."""
        self.shared.remove(self)
        self.resume_writing()
        self._message, self._ahead = None, b""
        self._count()
        self._conn.parser.close()  # it and its owner hold each other, with all that has come, and
        self._conn.parser_exc = None  # so does an error, by its frames: until a full collection
        self._is_closing = True
        self._queue.put_nowait((disconnect(), 0))

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._has_heard = True
        super().data_received(data)

    def _read(self) -> None:
        """Take frames; the library discards what comes behind a close or an error."""
        conn = self._conn
        data, self._ahead = self._ahead[:TURN], self._ahead[TURN:]
        conn.receive_data(data)
        has_ended = False
        for event in conn.events_received():
            if isinstance(event, Frame):
                has_ended = True
                self._take_frame(event)
        if conn.close_rcvd is not None:
            self._closes(conn.close_rcvd.code, conn.close_rcvd.reason)
            self._flush()  # the answer to it
            self.transport.close()
            return
        if conn.state is not State.OPEN and not self._is_closing:
            self._break_off()
            return
        self._flush()
        if has_ended and not self._has_begun_message:
            self._pace = Pace()
        else:
            now = self.shared.loop.time()
            self._pace.wait(now)
            self._pace.took(len(data), now)
            if self._must_wait or self._ahead:
                self._pace.stop(now)
        self._count()
        if self._counted and not self._is_closing and self.shared.lacks_room():
            self._break_off(TRY_AGAIN_LATER, NO_ROOM)

    # --- The app's side ---------------------------------------------------------------------------

    async def receive(self) -> Event:
        """Return the next event; the message before it is the app's own from now on."""
        if self._in_hand:
            self._untaken -= self._in_hand
            self._in_hand = 0
            self._count()
        event, self._in_hand = await self._queue.get()
        self.go_on()
        return event

    async def send(self, event: Event) -> None:
        """Take an event of the app; ClientGoneError once the WebSocket is closed, by whomever."""
        kind = event["type"]
        if kind == "websocket.close":
            self.send_close(event.get("code") or NORMAL, event.get("reason") or "")
            return
        await self.drained()
        if self._is_closing:
            raise ClientGoneError
        if kind != "websocket.send":
            raise RuntimeError(f"the ASGI event {kind!r} is not expected now")
        text = event.get("text")
        content = event["bytes"] if text is None else text.encode()
        send = self._conn.send_binary if text is None else self._conn.send_text
        send(content)
        self._request.bytes_out += len(content)
        self._flush()

    def ended(self) -> None:
        """Close it, unless it is closed, and drop what the app has not taken: that has ended."""
        self.send_close(FAILED)
        self._untaken = self._in_hand = 0
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait((disconnect(), 0))  # for a task of the app that still waits for more
        self._count()

    def send_close(self, code: int, reason: str = "") -> None:
        """Close it, unless it is closed, and wait for the client's close; not for long."""
        if self._is_closing:
            return
        self._is_closing = True
        self._conn.send_close(code, reason)
        self._flush()
        self.go_on()
        self.shared.loop.call_later(CLOSE_S, self.transport.abort)

    # --- The client's side ------------------------------------------------------------------------

    @property
    def _has_begun_message(self) -> bool:
        return self._message is not None or len(self._conn.reader.buffer) > 0

    def _count(self) -> None:
        """Count what this worker holds of messages in the budget for bodies that wait.

        Nothing once the connection closes: the app may keep what it has not taken for as long as it
        runs, and that has no limit. Others' bodies would be refused meanwhile.
        """
        unfinished = len(self._ahead) + len(self._conn.reader.buffer) + len(self._message or b"")
        size = 0 if self.transport.is_closing() else self._untaken + unfinished
        counted = size if size > UNCOUNTED_BYTES else 0
        self.shared.waiting_bytes += counted - self._counted
        self._counted = counted

    def _take_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CONT:
            if type(self._message) is not bytearray:  # any number of fragments takes their bytes
                self._message = bytearray(self._message or b"")
            self._message += frame.data
        elif frame.opcode in {Opcode.TEXT, Opcode.BINARY}:
            self._is_text = frame.opcode is Opcode.TEXT
            self._message = bytes(frame.data)
        else:
            return
        if not frame.fin:
            return
        message, self._message = bytes(self._message), None
        if self._is_closing:
            return  # it is not read any more, and the client's close may be behind it
        try:
            content = message.decode() if self._is_text else message
        except UnicodeDecodeError:
            self._break_off(INVALID_DATA, "a text message is not UTF-8")
            return
        event = {"type": "websocket.receive", "text" if self._is_text else "bytes": content}
        size = sys.getsizeof(event) + sys.getsizeof(content)  # an empty one takes some, too
        self._untaken += size
        self._queue.put_nowait((event, size))

    def _break_off(self, code: int = ABNORMAL, reason: str = "") -> None:
        """Close what has broken the protocol, or a rule of ours; it gets time to read why."""
        self._conn.fail(code, reason)  # which changes nothing where the library has failed it
        sent = self._conn.close_sent
        self._closes(*((code, reason) if sent is None else (sent.code, sent.reason)))
        self._flush()
        self.hang_up()

    def _closes(self, code: int, reason: str) -> None:
        """Let the app hear of the end, unless it began that itself."""
        if not self._is_closing:
            self._is_closing = True
            self._queue.put_nowait((disconnect(code, reason), 0))

    def _hung_up(self) -> None:
        self.transport.abort()  # also what is not taken: until then its messages are in the budget

    def _flush(self) -> None:
        written = b"".join(self._conn.data_to_send())
        if written and not self.transport.is_closing():
            self.transport.write(written)

    @property
    def _must_wait(self) -> bool:
        """Whether user code does not take what is here, or the client what was written."""
        return self._writable is not None or not self._queue.empty()

    def _throttled(self) -> None:
        now = self.shared.loop.time()
        if self._is_paused:
            self._pace.stop(now)
        elif self._has_begun_message:
            self._pace.wait(now)

    @property
    def _may_read(self) -> bool:
        return self._is_closing or not self._must_wait

    # --- Dead and slow clients --------------------------------------------------------------------

    @property
    def waiting_since(self) -> float | None:
        """See :class:`.connections.ClientConnection`."""
        return 0.0 if self._is_closing else None

    def close_idle(self, now: float, within_s: float | None) -> None:
        """Ping the client every PING_S, or abandon it."""
        if self._is_closing or now < self._ping_at:
            return
        self._ping_at = now + PING_S
        since = self._pace.since  # None while reading is paused
        if since is not None and now - since > MESSAGE_TIMEOUT_S:
            self._break_off(POLICY_VIOLATION, "a message came too slowly")
        elif self._is_alive():
            self._has_heard = False
            self._conn.send_ping(os.urandom(4))
            self._flush()
        else:
            self._conn.fail(FAILED, "keepalive ping timeout")
            self._flush()
            self.transport.abort()

    def _is_alive(self) -> bool:
        """Return whether the client answers, or takes or sends anything.

        While user code does not take what is here, nothing is read, and so no answer. A client that
        has something to take may not have got the ping, and the kernel limits how long that takes.
        """
        return self._has_heard or not self._queue.empty() or has_unacknowledged(self.fileno())


def has_unacknowledged(fd: int) -> bool:
    """Return whether the other end's kernel has not taken all that was sent."""
    return any(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))
