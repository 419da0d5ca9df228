"""ASGI apps as a deployment's answer to HTTP: the app's lifespan, and one call per request."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message

from greenroom.actors import string_annotations
from greenroom.actors.messages import HttpCall
from greenroom.actors.responses import AsgiReply
from greenroom.actors.sockets import AsgiSocket, make_socket_scope
from greenroom.actors.user_code import Reply
from greenroom.core.errors import DeployFailedError, UnusableCodeError

ASGI = {"version": "3.0", "spec_version": "2.4"}


class AppSource:
    """An ASGI app, or what makes one in each replica."""

    def __init__(self, app_or_factory: Callable[..., Any]) -> None:
        self._app_or_factory = app_or_factory

    @property
    def is_factory(self) -> bool:
        """Return whether it is called without arguments to make the app."""
        return _takes(self._app_or_factory, 0)

    def settle_annotations(self) -> str:
        """Have an app be understood where it travels to; return why it cannot be, or ""."""
        if self.is_factory:
            return ""
        string_annotations.evaluate(self._app_or_factory)
        return string_annotations.unresolved(self._app_or_factory)

    def app(self) -> ASGIApp:
        """Return the app; UnusableCodeError when what a factory made is none."""
        app = self._app_or_factory() if self.is_factory else self._app_or_factory
        if not is_app(app):
            raise UnusableCodeError(
                f"the factory given to serve.ingress returned a {type(app).__name__}, which is no "
                "ASGI app: it must take scope, receive and send"
            )
        if wrong := string_annotations.unresolved(app):
            raise UnusableCodeError(wrong)
        return app


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
        self._told: asyncio.Queue[Message] = asyncio.Queue()
        self._lifespan: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Run the app's start-up; DeployFailedError when it fails. An app may have none."""
        self._lifespan = asyncio.create_task(self._live())
        told = await self._tell("lifespan.startup")
        if told is not None and told["type"] == "lifespan.startup.failed":
            raise DeployFailedError(f"the ASGI app's start-up failed: {told.get('message', '')}")

    async def stop(self) -> None:
        """Run the app's shutdown; what it raises passes through."""
        told = await self._tell("lifespan.shutdown")
        if told is not None and told["type"] == "lifespan.shutdown.failed":
            raise RuntimeError(f"the ASGI app's shutdown failed: {told.get('message', '')}")

    async def answer(self, reply: Reply, request: Request) -> None:
        """Have the app answer; UnsupportedResultError when it returns without an answer."""
        scope = request.scope
        scope["state"] = self._state.copy()
        await AsgiReply(reply).run(self._app, request)

    async def converse(self, reply: Reply, call: HttpCall) -> None:
        """Have the app take a WebSocket; returns when the app does."""
        assert reply.feed is not None, "a socket has one"
        scope = make_socket_scope(call, reply.assignment.route)
        scope["state"] = self._state.copy()
        socket = AsgiSocket(reply, reply.feed)
        failure: Exception | None = None
        try:
            await self._app(scope, socket.receive, socket.send)
        except Exception as error:
            failure = error
        await socket.finish(failure)

    async def _live(self) -> None:
        scope = {"type": "lifespan", "asgi": ASGI, "state": self._state}
        await self._app(scope, self._events.get, self._told.put)

    async def _tell(self, event: str) -> Message | None:
        """Return what the app says to an event; None when it has no lifespan (any more)."""
        lifespan = self._lifespan
        if lifespan is None or lifespan.done():
            return None
        self._events.put_nowait({"type": event})
        heard = asyncio.ensure_future(self._told.get())
        await asyncio.wait({heard, lifespan}, return_when=asyncio.FIRST_COMPLETED)
        if heard.done() or not self._told.empty():
            return await heard
        heard.cancel()
        lifespan.exception()  # an app without a lifespan raises at its scope: it is to be ignored
        return None
