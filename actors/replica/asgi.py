"""ASGI apps that answer a deployment's HTTP requests and WebSockets.

Theory of operation. :class:`AsgiHost` runs the app's lifespan around the replica's life, and calls
the app once for each request or WebSocket; responses.py has the ``send`` of a request.

User code sees a WebSocket as ASGI's events; it travels as the parts of a query and of its answer.
To open one is a query, and to accept it an answer that begins, with status 101. A message is one or
more parts, the last of which says whether it is text or binary; END closes, with code and reason,
in either direction. An answer before ``accept`` refuses the WebSocket: with 403 for a bare
``websocket.close``, or with a response of the app's own. A WebSocket is *connecting*, *open* or
*closed*. Closed is final; the client may also be gone while user code has not heard of it yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message
from starlette.websockets import WebSocketDisconnect

from greenroom.actors.caller.streams import NobodyListensError, Parts
from greenroom.actors.messages.closing import ABNORMAL, NORMAL, check_code, close_frame, close_of
from greenroom.actors.messages.queries import BINARY, END, TEXT, HttpAnswer, HttpCall, StreamEnded
from greenroom.actors.replica import fastapi_routes
from greenroom.actors.replica.context import Headers, Reply
from greenroom.actors.replica.responses import AsgiReply, Body, make_scope
from greenroom.core.errors import (
    DeployFailedError,
    ReplicaUnavailableError,
    UnsupportedResultError,
    UnusableCodeError,
)

SWITCHING = 101
SUBPROTOCOL = b"sec-websocket-protocol"


def make_socket_scope(call: HttpCall, route: str) -> dict[str, Any]:
    """Make what an ASGI app sees of a WebSocket."""
    scope = make_scope(call, route)
    del scope["method"]
    offered = b",".join(value for name, value in call.headers if name == SUBPROTOCOL)
    names = [name.strip() for name in offered.decode("latin-1").split(",")]
    scope["type"] = "websocket"
    scope["subprotocols"] = [name for name in names if name]
    scope["extensions"] = {"websocket.http.response": {}}
    return scope


class AsgiSocket:
    """The ``receive`` and ``send`` of an ASGI app's call for one WebSocket."""

    def __init__(self, reply: Reply, upload: Parts) -> None:
        self._reply = reply
        self._query_id = reply.assignment.query.id
        self._upload = upload
        self._state = "connecting"
        self._has_connected = False  # user code, of the connection
        self._disconnect: Message | None = None
        self._refusal: tuple[int, Headers] | None = None
        self._refusal_body: list[bytes] = []

    async def receive(self) -> Message:
        """Return the next event; cancelling it loses nothing."""
        if not self._has_connected:
            self._has_connected = True
            return {"type": "websocket.connect"}
        if self._disconnect is None:
            part = await self._upload.next_message()
            if part is not None and part.ends == TEXT:
                return {"type": "websocket.receive", "text": part.data.decode()}
            if part is not None and part.ends == BINARY:
                return {"type": "websocket.receive", "bytes": part.data}
            if self._disconnect is None:  # else another task has closed it meanwhile
                self._disconnected(close_frame(ABNORMAL) if part is None else part.data)
        assert self._disconnect is not None
        return self._disconnect

    async def send(self, event: Message) -> None:
        """Take an event; OSError once it is closed, RuntimeError for what is out of order."""
        kind = event["type"]
        if self._state == "closed" or self._upload.is_complete:
            if kind == "websocket.close":
                return
            raise NobodyListensError(f"{kind}: the WebSocket is closed")
        take = _TAKEN.get((self._state, kind))
        if take is None or (self._refusal is not None and kind != "websocket.http.response.body"):
            raise RuntimeError(f"unexpected {kind!r}: the WebSocket is {self._state}")
        await take(self, event)

    async def finish(self, error: Exception | None) -> None:
        """End it as the app has left it; ``error`` is what the app raised, which may be no fault.

        Raises ``error`` where it is one.
        """
        is_gone = self._upload.is_complete or self._disconnect is not None
        if error is not None and not (is_gone and isinstance(error, _NO_FAULTS)):
            raise error
        if self._state == "open" and is_gone:
            self._answer(StreamEnded(self._query_id, SWITCHING))
        elif self._state == "open":
            await self._close({"code": NORMAL})
        elif self._state == "connecting":
            if is_gone:
                raise ReplicaUnavailableError("the replica stops, or the client has gone")
            raise UnsupportedResultError(
                "the ASGI app returned without accepting or refusing a WebSocket"
            )

    async def _accept(self, event: Message) -> None:
        headers = [(bytes(name), bytes(value)) for name, value in event.get("headers", ())]
        subprotocol = event.get("subprotocol")
        if subprotocol:
            headers.append((SUBPROTOCOL, str(subprotocol).encode("latin-1", "replace")))
        self._reply.begin(SWITCHING, tuple(headers))
        self._state = "open"

    async def _message(self, event: Message) -> None:
        text = event.get("text")
        content, ends = (bytes(event["bytes"]), BINARY) if text is None else (text.encode(), TEXT)
        await self._reply.send(content, ends)

    async def _close(self, event: Message) -> None:
        code, reason = event.get("code"), event.get("reason")
        code = NORMAL if code is None else code
        check_code(code)
        frame = close_frame(code, reason or "")
        self._state = "closed"  # before waiting: nothing may be sent after it
        self._disconnected(frame)
        with contextlib.suppress(NobodyListensError):
            await self._reply.send(frame, END)
        self._answer(StreamEnded(self._query_id, SWITCHING))

    async def _refuse(self, _event: Message) -> None:
        self._answer(HttpAnswer(self._query_id, 403, (), b""))

    async def _begin_refusal(self, event: Message) -> None:
        headers = tuple((bytes(name), bytes(value)) for name, value in event.get("headers", ()))
        self._refusal = event["status"], headers

    async def _refusal_part(self, event: Message) -> None:
        if self._refusal is None:
            raise RuntimeError("websocket.http.response.body came before its start")
        self._refusal_body.append(bytes(event.get("body", b"")))
        if not event.get("more_body", False):
            status, headers = self._refusal
            body = b"".join(self._refusal_body)
            self._answer(HttpAnswer(self._query_id, status, headers, body))

    def _answer(self, answer: HttpAnswer | StreamEnded) -> None:
        self._state = "closed"
        if self._disconnect is None:
            self._disconnected(close_frame(ABNORMAL))
        self._reply.answer(answer)

    def _disconnected(self, frame: bytes) -> None:
        code, reason = close_of(frame)
        self._disconnect = {"type": "websocket.disconnect", "code": code, "reason": reason}


_NO_FAULTS = (WebSocketDisconnect, NobodyListensError)
_TAKEN: dict[tuple[str, str], Callable[[AsgiSocket, Message], Awaitable[None]]] = {
    ("connecting", "websocket.accept"): AsgiSocket._accept,
    ("connecting", "websocket.close"): AsgiSocket._refuse,
    ("connecting", "websocket.http.response.start"): AsgiSocket._begin_refusal,
    ("connecting", "websocket.http.response.body"): AsgiSocket._refusal_part,
    ("open", "websocket.send"): AsgiSocket._message,
    ("open", "websocket.close"): AsgiSocket._close,
}


ASGI = {"version": "3.0", "spec_version": "2.4"}


class AppSource:
    """An ASGI app, or what makes one in each replica."""

    def __init__(self, app_or_factory: Callable[..., Any]) -> None:
        self._app_or_factory = app_or_factory

    @property
    def is_factory(self) -> bool:
        """Return whether it is called without arguments to make the app."""
        return _takes(self._app_or_factory, 0)

    def resolve_annotations(self) -> str:
        """Make an app independent of its module's names; return why that fails, or ""."""
        if self.is_factory:
            return ""
        fastapi_routes.evaluate_annotations(self._app_or_factory)
        return fastapi_routes.unresolved_annotations(self._app_or_factory)

    def app(self, cls: type) -> ASGIApp:
        """Return the app for a class; UnusableCodeError when what a factory made is none."""
        app = self._app_or_factory() if self.is_factory else self._app_or_factory
        if not is_app(app):
            raise UnusableCodeError(
                f"the factory given to serve.ingress returned a {type(app).__name__}, which is no "
                "ASGI app: it must take scope, receive and send"
            )
        if wrong := fastapi_routes.unresolved_annotations(app):
            raise UnusableCodeError(wrong)
        return fastapi_routes.without_other_classes(app, cls)  # type: ignore[no-any-return]


def is_app(value: Any) -> bool:
    """Return whether it can be called with scope, receive and send."""
    return callable(value) and _takes(value, 3)


def _takes(function: Callable[..., Any], number: int) -> bool:
    try:
        inspect.signature(function).bind(*range(number))
    except (TypeError, ValueError):
        return False
    return True


class AsgiHost:
    """One app in one replica, on user code's event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._state: dict[str, Any] = {}  # what the lifespan leaves for requests
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self._lifespan: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Run the app's start-up; DeployFailedError when it fails. An app may have none."""
        self._lifespan = asyncio.create_task(self._live())
        sent = await self._send_event("lifespan.startup")
        if sent is not None and sent["type"] == "lifespan.startup.failed":
            raise DeployFailedError(f"the ASGI app's start-up failed: {sent.get('message', '')}")

    async def stop(self) -> None:
        """Run the app's shutdown; what it raises passes through."""
        sent = await self._send_event("lifespan.shutdown")
        if sent is not None and sent["type"] == "lifespan.shutdown.failed":
            raise RuntimeError(f"the ASGI app's shutdown failed: {sent.get('message', '')}")

    async def answer(self, reply: Reply, call: HttpCall) -> None:
        """Let the app answer; UnsupportedResultError when it returns without an answer."""
        scope = make_scope(call, reply.assignment.route)
        scope["state"] = self._state.copy()
        await AsgiReply(reply).run(self._app, scope, Body(call.body, reply).receive)

    async def converse(self, reply: Reply, call: HttpCall) -> None:
        """Run the app for a WebSocket; return when the app does."""
        assert reply.upload is not None, "a socket has one"
        scope = make_socket_scope(call, reply.assignment.route)
        scope["state"] = self._state.copy()
        socket = AsgiSocket(reply, reply.upload)
        failure: Exception | None = None
        try:
            await self._app(scope, socket.receive, socket.send)
        except Exception as error:
            failure = error
        await socket.finish(failure)

    async def _live(self) -> None:
        scope = {"type": "lifespan", "asgi": ASGI, "state": self._state}
        await self._app(scope, self._events.get, self._sent.put)

    async def _send_event(self, event: str) -> Message | None:
        """Return what the app says to an event; None when it has no lifespan (any more)."""
        lifespan = self._lifespan
        if lifespan is None or lifespan.done():
            return None
        self._events.put_nowait({"type": event})
        heard = asyncio.ensure_future(self._sent.get())
        await asyncio.wait({heard, lifespan}, return_when=asyncio.FIRST_COMPLETED)
        if heard.done() or not self._sent.empty():
            return await heard
        heard.cancel()
        lifespan.exception()  # an app without a lifespan raises at its scope: it is to be ignored
        return None
