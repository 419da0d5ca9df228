"""WebSockets: each is a query, whose answer begins when user code accepts, and a conversation.

What the client sends follows the query, and what user code sends are the parts of its answer, both
straight between this worker and the replica, a bounded number of bytes ahead of the other end. The
side that closes says why: the client, user code, or this worker when it stops (1012), when a
replica has died, or when user code has raised (1011).

:class:`Conversations` is the application's side of that, in ASGI's events, so that middlewares see
them. :class:`FrontSocket` is the connection, on the websockets library's protocol without I/O. It
has limits for everything that a client can do, or not do:

- every opening is answered: one that is malformed at once, any other by the app within a time;
- a slow client is not a dead one: a ping may stay unanswered while the client has something to
  take, or while a long message is coming;
- a client that stays amid a message for too long is closed with 1008;
- messages that wait for their end, or for user code, are in the budget for bodies that wait; one
  for which there is no room is closed with 1013;
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
import termios

from websockets.frames import Frame, Opcode
from websockets.http11 import Request as Opening, Response
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
from greenroom.http_front.connections import NO_ROOM, ClientConnection, Connections, Pace
from greenroom.http_front.link import Link
from greenroom.http_front.request import CLOSE, Reply, Request, query_for
from greenroom.http_front.responses import (
    TEXT as TEXT_TYPE,
    BadHeaderError,
    error_reply,
    passed_on,
    reply_to,
    response_head,
)

_logger = logging.getLogger(__name__)
_wire_logger = logging.getLogger(f"{__name__}.wire")
_wire_logger.setLevel(logging.ERROR)  # the library would log each that opens and closes

SWITCHING = 101
RESPONSE = "websocket.http.response"
SUBPROTOCOL = b"sec-websocket-protocol"

OPENING_TIMEOUT_S = 60.0  # where requests have no limit
ANSWER_MARGIN_S = 5.0  # the router's 408 comes first
PING_S = 20.0
PONG_S = 20.0
CLOSE_S = 5.0
MESSAGE_TIMEOUT_S = 30.0  # that a message may lag behind MIN_RATE
UNCOUNTED_BYTES = 64 * 1024  # of messages that wait, which cost no more than a connection does
POLICY_VIOLATION = 1008
TRY_AGAIN_LATER = 1013
INVALID_DATA = 1007
MAX_EARLY_BYTES = 64 * 1024  # that may come before the opening is answered
_OURS = frozenset({b"content-length", b"connection", b"transfer-encoding", b"date"})
_HANDSHAKE_HEADERS = frozenset({b"connection", b"upgrade", b"origin"})


# --- The conversation -----------------------------------------------------------------------------


async def refuse(reply: Reply, request: Request, send: Send) -> None:
    """Answer an opening with a response; with a bare 403 where the server cannot give another."""
    if RESPONSE not in request.scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        return
    body = reply.body
    if not isinstance(body, bytes):
        body = b"".join([bytes(part) async for part in body])
    start = {"type": f"{RESPONSE}.start", "status": reply.status, "headers": reply.headers}
    await send(start)
    await send({"type": f"{RESPONSE}.body", "body": body})


class Conversations:
    """All open WebSockets of one worker."""

    def __init__(self, link: Link, request_timeout_s: float | None) -> None:
        self._link = link
        self._timeout_s = opening_timeout_s(request_timeout_s)
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
            await refuse(reply_to(answer, request), request, send)
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


def opening_timeout_s(request_timeout_s: float | None) -> float:
    """Return how long user code may take to accept a WebSocket."""
    return OPENING_TIMEOUT_S if request_timeout_s is None else request_timeout_s


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
            await refuse(reply, self._request, self._send)
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


class ClientGoneError(OSError):
    """The WebSocket is closed; nothing can be sent."""


class FrontSocket(ClientConnection):
    """One connection that has become a WebSocket, or asks to."""

    def __init__(self, shared: Connections, request: Request) -> None:
        super().__init__(shared)
        self._request = request
        self._conn = ServerProtocol(
            max_size=shared.options.max_websocket_message_bytes, logger=_wire_logger
        )
        self._made_at = shared.loop.time()
        self._timeout_s = opening_timeout_s(shared.options.request_timeout_s) + ANSWER_MARGIN_S
        self._task: asyncio.Task[None] | None = None
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._is_answered = False  # the opening is
        self._is_open = False
        self._is_deaf = False  # what comes is not read
        self._is_disconnected = False
        self._early = b""  # what came before the opening was answered
        self._refusal: Event | None = None
        self._refusal_body = b""
        self._close_timer: asyncio.TimerHandle | None = None
        self._ping_timer: asyncio.TimerHandle | None = None
        self._pinged_at: float | None = None
        self._has_heard = False  # since the last ping
        self._message: bytes | bytearray | None = None  # of which more is to come
        self._is_text = False
        self._pace = Pace()  # of a message that is coming
        self._untaken = 0  # bytes of messages that are here in full
        self._in_hand = 0  # of these, of the message that the app works on
        self._counted = 0  # bytes in Connections.waiting_bytes

    # --- See asyncio ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection over, with its opening; the app is asked unless that is malformed."""
        super().connection_made(transport)
        response = self._handshake()
        if response.status_code != SWITCHING:
            headers = [
                (name.lower().encode("ascii"), value.encode("latin-1", "replace"))
                for name, value in response.headers.raw_items()
            ]
            self._respond(response.status_code, headers, bytes(response.body))
            return
        self._response = response
        scope = self._request.scope
        offered = [value for name, value in self._request.headers if name == SUBPROTOCOL]
        scope["subprotocols"] = [
            each.strip() for each in b",".join(offered).decode("latin-1").split(",") if each.strip()
        ]
        scope["extensions"] = {RESPONSE: {}}
        self._queue.put_nowait({"type": "websocket.connect"})
        self._task = self.shared.run(self._run())

    def eof_received(self) -> None:
        """Tell the app now: what the client never takes may keep the transport."""
        self._client_left()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self.shared.remove(self)
        self._is_disconnected = self._is_closing = True
        for timer in (self._ping_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        self.resume_writing()
        self._message, self._early = None, b""
        self._count()
        self._conn.parser.close()  # it and its owner hold each other, with all that has come, and
        self._conn.parser_exc = None  # so does an error, by its frames: until a full collection
        self._client_left()

    def _client_left(self) -> None:
        """Tell the app; cancel it where the opening is not answered."""
        if self._is_open:
            self._queue.put_nowait(_disconnect(ABNORMAL))
        else:
            self._cancel()

    def data_received(self, data: bytes) -> None:
        """Take frames."""
        self._has_heard = True
        if self._is_deaf:
            return
        if self._is_open:
            self._take(data)
            return
        self._early += data
        if len(self._early) > MAX_EARLY_BYTES:
            self._respond(400, [], b"too much was sent before the WebSocket was opened")
            self._cancel()

    # --- For the other connections' owner ---------------------------------------------------------

    @property
    def waiting_since(self) -> float | None:
        """See :class:`.connections.ClientConnection`."""
        return 0.0 if self._is_deaf else None

    def close_idle(self, now: float, *, idle_s: float, fresh_s: float) -> None:
        """Refuse an opening that is not answered in time."""
        if not self._is_answered and now - self._made_at > self._timeout_s:
            headers = [(b"retry-after", b"1")]
            self._respond(503, headers, b"the WebSocket was not accepted in time")
            self._cancel()

    # --- The opening ------------------------------------------------------------------------------

    def _handshake(self) -> Response:
        """Check what concerns the handshake alone; the front has checked all the rest."""
        lines = [
            b"%b: %b\r\n" % header
            for header in self._request.headers
            if header[0] in _HANDSHAKE_HEADERS or header[0].startswith(b"sec-websocket-")
        ]
        conn = self._conn
        conn.receive_data(b"GET / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n")
        for event in conn.events_received():
            if isinstance(event, Opening):
                return conn.accept(event)
        return conn.reject(400, "the WebSocket's opening cannot be read\n")

    async def _run(self) -> None:
        """Run the app, which logs its own errors."""
        try:
            await self.shared.app(self._request.scope, self.receive, self.send)
        except (asyncio.CancelledError, ClientGoneError):
            pass
        except Exception:
            self._fail()
        else:
            if not self._is_answered:
                self._fail()
        finally:
            self._task = None
        if not (self._is_deaf or self._close_timer):
            self.transport.close()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _fail(self) -> None:
        """Answer or close as what has failed."""
        if not self._is_answered:
            self._respond(500, [TEXT_TYPE], b"Internal Server Error")
        elif not self._is_closing:
            self._send_close(FAILED, "")

    def _respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer the opening with a response, and close."""
        if self._is_answered:
            return
        self._is_answered = self._is_closing = True
        kept = [(name, value) for each, value in headers if (name := each.lower()) not in _OURS]
        ends = ((b"content-length", b"%d" % len(body)), CLOSE)
        self._write_head(status, [*kept, *ends])
        self._request.bytes_out += len(body)
        self.transport.write(body)
        self.hang_up()

    def _write_head(self, status: int, headers: Headers) -> None:
        request = self._request
        request.status = status
        if request.id:
            headers = [*headers, (b"x-request-id", request.id.encode("ascii"))]
        self.transport.write(response_head(status, headers, self.shared.default_head))

    def _accept(self, event: Event) -> None:
        self._is_answered = self._is_open = True
        headers: Headers = [
            (name.lower().encode("ascii"), value.encode("ascii"))
            for name, value in self._response.headers.raw_items()
            if name != "Date"
        ]
        if event.get("subprotocol"):
            headers.append((SUBPROTOCOL, event["subprotocol"].encode("latin-1")))
        self._conn.send_response(self._response)
        self._conn.data_to_send()  # the same response, without the app's headers
        more = [(name.lower(), value) for name, value in event.get("headers", ())]
        self._write_head(SWITCHING, [*headers, *more])
        self._ping_timer = self.shared.loop.call_later(PING_S, self._keep_alive)
        early, self._early = self._early, b""
        if early:
            self._take(early)

    # --- The app's side ---------------------------------------------------------------------------

    async def receive(self) -> Event:
        """Return the next event; the message before it is the app's own from now on."""
        if self._in_hand:
            self._untaken -= self._in_hand
            self._in_hand = 0
            self._count()
        event = await self._queue.get()
        self._in_hand = len(event.get("bytes") or event.get("text") or b"")
        self.throttle()
        return event

    async def send(self, event: Event) -> None:
        """Take an event of the app; ClientGoneError once the WebSocket is closed, by whomever."""
        kind = event["type"]
        if kind != "websocket.close":
            await self.drained()
        if not self._is_answered:
            self._answer(kind, event)
        elif kind == "websocket.close":
            if not self._is_closing:
                self._send_close(event.get("code") or NORMAL, event.get("reason") or "")
        elif self._is_closing:
            raise ClientGoneError
        elif kind == "websocket.send":
            text = event.get("text")
            content = event["bytes"] if text is None else text.encode()
            send = self._conn.send_binary if text is None else self._conn.send_text
            send(content)
            self._request.bytes_out += len(content)
            self._flush()
        else:
            raise RuntimeError(f"the ASGI event {kind!r} is not expected now")

    def _answer(self, kind: str, event: Event) -> None:
        """Take an event that answers the opening."""
        if self._is_disconnected:
            raise ClientGoneError
        if kind == "websocket.accept":
            self._accept(event)
        elif kind == "websocket.close":
            self._queue.put_nowait(_disconnect(ABNORMAL))
            self._respond(403, [], b"")
        elif kind == f"{RESPONSE}.start":
            self._refusal = event
        elif kind == f"{RESPONSE}.body" and self._refusal is not None:
            self._refusal_body += event.get("body", b"")
            if not event.get("more_body", False):
                headers = list(self._refusal.get("headers", ()))
                self._respond(self._refusal["status"], headers, self._refusal_body)
        else:
            raise RuntimeError(f"the ASGI event {kind!r} is not expected now")

    # --- The client's side ------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        """Take bytes of frames."""
        conn = self._conn
        conn.receive_data(data)
        has_ended = False
        for event in conn.events_received():
            if isinstance(event, Frame):
                has_ended = True
                self._take_frame(event)
        if self._is_deaf:
            return
        if conn.close_sent is not None and conn.close_rcvd is None and not self._is_closing:
            self._break_off()
            return
        self._flush()
        if has_ended and not self._has_begun_message:
            self._pace = Pace()
        else:
            now = self.shared.loop.time()
            self._pace.wait(now)
            self._pace.took(len(data), now)
        self._count()
        if self._counted and self.shared.lacks_room():
            self._conn.fail(TRY_AGAIN_LATER, NO_ROOM)
            self._break_off()
        else:
            self.throttle()

    @property
    def _has_begun_message(self) -> bool:
        return self._message is not None or len(self._conn.reader.buffer) > 0

    def _count(self) -> None:
        """Count what this worker holds of messages in the budget for bodies that wait."""
        unfinished = len(self._conn.reader.buffer) + len(self._message or b"")
        size = 0 if self._is_disconnected else self._untaken + unfinished
        counted = size if size > UNCOUNTED_BYTES else 0
        self.shared.waiting_bytes += counted - self._counted
        self._counted = counted

    def _take_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self._take_close()
        elif frame.opcode is Opcode.CONT:
            if type(self._message) is not bytearray:  # any number of fragments takes their bytes
                self._message = bytearray(self._message or b"")
            self._message += frame.data
            self._end_message(frame.fin)
        elif frame.opcode in {Opcode.TEXT, Opcode.BINARY}:
            self._is_text = frame.opcode is Opcode.TEXT
            self._message = bytes(frame.data)
            self._end_message(frame.fin)

    def _end_message(self, is_end: bool) -> None:
        if not is_end or self._message is None:
            return
        message, self._message = bytes(self._message), None
        if self._is_closing:
            return  # it is not read any more, and the client's close may be behind it
        try:
            content = message.decode() if self._is_text else message
        except UnicodeDecodeError:
            self._conn.fail(INVALID_DATA, "a text message is not UTF-8")
            self._break_off()
            return
        self._untaken += len(content)
        kind = "text" if self._is_text else "bytes"
        self._queue.put_nowait({"type": "websocket.receive", kind: content})

    def _take_close(self) -> None:
        received = self._conn.close_rcvd
        if not self._is_closing and received is not None:
            self._queue.put_nowait(_disconnect(received.code, received.reason))
        self._is_closing = self._is_deaf = True
        self._flush()  # the answer to it
        self.transport.close()

    def _break_off(self) -> None:
        """Close what has broken the protocol; it gets time to read why."""
        sent = self._conn.close_sent
        code, reason = (ABNORMAL, "") if sent is None else (sent.code, sent.reason)
        self._queue.put_nowait(_disconnect(code, reason))
        self._is_closing = True
        self._flush()
        self.hang_up()

    def _send_close(self, code: int, reason: str) -> None:
        """Close, and wait for the client's close; not for long."""
        self._is_closing = True
        self._conn.send_close(code, reason)
        self._flush()
        self.throttle()
        self._close_timer = self.shared.loop.call_later(CLOSE_S, self.transport.abort)

    def hang_up(self) -> None:
        """See :class:`.connections.ClientConnection`; nothing more is read."""
        self._is_deaf = True
        self._early = b""
        super().hang_up()

    def _hung_up(self) -> None:
        self.transport.abort()  # also what is not taken: until then its messages are in the budget

    def _flush(self) -> None:
        written = b"".join(self._conn.data_to_send())
        if written and not self._is_disconnected:
            self.transport.write(written)

    @property
    def _must_wait(self) -> bool:
        """Whether user code does not take what is here, or the client what was written."""
        return self._is_open and (self._writable is not None or not self._queue.empty())

    def _throttled(self) -> None:
        now = self.shared.loop.time()
        if self._is_paused:
            self._pace.stop(now)
        elif self._has_begun_message:
            self._pace.wait(now)

    # --- Dead and slow clients --------------------------------------------------------------------

    def _keep_alive(self) -> None:
        """Ping the client, or abandon it."""
        loop = self.shared.loop
        if self._is_closing or self.transport.is_closing():
            return
        now = loop.time()
        if self._is_too_slow(now):
            self._conn.fail(POLICY_VIOLATION, "a message came too slowly")
            self._break_off()
            return
        is_late = self._pinged_at is not None and now - self._pinged_at >= 0.9 * PONG_S
        if is_late and not self._is_alive():
            self._conn.fail(FAILED, "keepalive ping timeout")
            self._flush()
            self.transport.abort()
            return
        if self._pinged_at is None or self._has_heard or is_late:
            self._has_heard = False
            self._pinged_at = now
            self._conn.send_ping(os.urandom(4))
            self._flush()
        self._ping_timer = loop.call_later(PING_S, self._keep_alive)

    def _is_alive(self) -> bool:
        """Return whether the client answers, or takes or sends anything.

        While user code does not take what is here, nothing is read, and so no answer. A client that
        has something to take may not have got the ping, and the kernel limits how long that takes.
        """
        return self._has_heard or not self._queue.empty() or has_unacknowledged(self.fileno())

    def _is_too_slow(self, now: float) -> bool:
        """Return whether a message has been coming for too long; not while reading is paused."""
        since = self._pace.since
        return since is not None and now - since > MESSAGE_TIMEOUT_S


def has_unacknowledged(fd: int) -> bool:
    """Return whether the other end's kernel has not taken all that was sent."""
    return any(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))


def _disconnect(code: int, reason: str = "") -> Event:
    return {"type": "websocket.disconnect", "code": code, "reason": reason}
