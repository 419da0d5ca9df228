"""Requests that are here in one piece, as nearly all are: answered without a task of their own.

An ASGI app takes events from a coroutine and gives others back; for a request whose body has come
and whose answer is whole, that is a third of what the worker spends on it (docs/performance.md).
Here the query leaves, and a callback writes the answer. Whatever needs more goes the way of ASGI:
our own pages, middlewares, bodies that are still on their way, and answers in parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from greenroom.actors.caller.streams import Stream
from greenroom.actors.messages.queries import Pieces
from greenroom.core.errors import GreenroomError
from greenroom.http_front.answers import failed_reply, failure_of, reply_to, unexpected
from greenroom.http_front.dispatcher import Outcome
from greenroom.http_front.exchange import CLIENT_LEFT, App, Exchange, Headers, Reply, Scope

if TYPE_CHECKING:
    from greenroom.http_front.front import Front


class Turn(Protocol):
    """A request whose turn it is on its connection, with all of its body."""

    scope: Scope
    body: bytes

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the whole answer."""

    def go_on(self, app: App) -> asyncio.Task[None]:
        """Have an ASGI app answer instead, in a task."""
        ...


class WholeQuery:
    """One such request on its way through the worker."""

    __slots__ = ("_cancel", "_exchange", "_front", "_is_over", "_sending", "_turn")

    def __init__(self, front: Front, turn: Turn, exchange: Exchange) -> None:
        self._front = front
        self._turn = turn
        self._exchange = exchange
        self._cancel: Callable[[], object] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._is_over = False

    def begin(self) -> bool:
        """Ask, or refuse; False when there is nobody to ask yet."""
        front, exchange = self._front, self._exchange
        front.in_flight += 1
        try:
            reply = front.refusal(exchange)
            if reply is None:
                front.resolve(exchange)
                self._cancel = front.asker.submit(exchange, self._answered)
                if self._cancel is None:
                    front.in_flight -= 1
                    return False
                exchange.body = b""  # the query has it
                return True
        except GreenroomError as error:
            reply = failed_reply(failure_of(error), exchange)
        except Exception as error:
            reply = unexpected(exchange, error)
        self._reply(reply)
        return True

    def leave(self) -> None:
        """Cancel the query, or the answer that is being sent: the client has left."""
        if self._sending is not None:
            self._sending.cancel()
        elif not self._is_over and self._cancel is not None:
            self._cancel()
            self._end(CLIENT_LEFT)

    def _answered(self, answer: Outcome) -> None:
        if self._is_over:
            return
        exchange = self._exchange
        try:
            if isinstance(answer, Stream):
                self._send(answer, partial(self._streamed, answer))
                return
            reply = reply_to(answer, exchange)
        except Exception as error:
            reply = unexpected(exchange, error)
        self._reply(reply)

    def _send(self, answer: Stream | Reply, on_sent: Callable[[asyncio.Task[None]], None]) -> None:
        """Send, in a task, what does not leave at once."""
        self._sending = self._turn.go_on(self._front.sending(self._exchange, answer))
        self._sending.add_done_callback(on_sent)

    def _streamed(self, stream: Stream, task: asyncio.Task[None]) -> None:
        stream.close()  # as it is already, unless the task was cancelled before its first step
        self._sent(task)

    def _sent(self, _task: asyncio.Task[None]) -> None:
        self._end(self._exchange.status or CLIENT_LEFT)

    def _reply(self, reply: Reply) -> None:
        if isinstance(reply.body, Pieces):
            self._send(reply, self._sent)
            return
        headers, body = self._exchange.finish(reply)
        self._end(reply.status)
        self._turn.reply(reply.status, headers, body)

    def _end(self, status: int) -> None:
        self._is_over = True
        self._exchange.status = status
        self._front.over(self._exchange)
