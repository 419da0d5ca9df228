"""The short way: plain requests from the parser to the router and back, past ASGI and Falcon.

ASGI takes a request through a task, and Falcon through a request and a response object more. A
request whose body is here, and whose response is whole, needs none of that: the query leaves, and a
callback writes the answer. docs/performance.md says what this brings. The bytes are the same as
those of the long way, because both take the steps in :mod:`.exchange`. The option ``short_way``
switches it off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from greenroom.core.errors import GreenroomError
from greenroom.http_front.app import Front, guarded, send_reply
from greenroom.http_front.exchange import (
    CLIENT_LEFT,
    EXCHANGE_KEY,
    Exchange,
    Receive,
    Reply,
    Scope,
    Send,
    query_for,
)
from greenroom.http_front.protocol import Begin, Request
from greenroom.http_front.responses import Answer, end_body, error_reply_for, reply_to, unexpected


def beginning(front: Front) -> Begin | None:
    """Return what begins a request whose body is here, for a worker's connections.

    It returns what to call when the client leaves, or None for a request that goes the long way:
    it is not plain, or there is no router to ask yet. None where the short way is off.
    """
    if not front.options.short_way or front.options.middlewares:
        return None

    def begin(request: Request, body: bytes) -> Callable[[], object] | None:
        if not front.is_plain(request.scope, body):
            return None
        shortened = _Shortened(front, request, body)
        return shortened.leave if shortened.begin() else None

    return begin


class _Shortened:
    """One request on the short way."""

    __slots__ = ("_cancel", "_exchange", "_front", "_is_over", "_reply", "_request", "_sending")

    def __init__(self, front: Front, request: Request, body: bytes) -> None:
        self._front = front
        self._request = request
        self._exchange: Exchange = front.exchanges.begin(request.scope)
        self._exchange.body = body
        self._cancel: Callable[[], object] | None = None
        self._reply: Reply | None = None  # in parts, once it is being sent
        self._sending: Any = None
        self._is_over = False

    def begin(self) -> bool:
        """Ask or refuse; False when there is no router to ask yet."""
        front, exchange = self._front, self._exchange
        try:
            front.admit(exchange)
            query = query_for(exchange, front.link.next_id(), front.options.request_timeout_s)
            self._cancel = front.link.submit(query, self._answered)
            exchange.body = b""  # the query has it
            if self._cancel is None:
                self._request.scope[EXCHANGE_KEY] = exchange  # the long way goes on with it
                return False
        except GreenroomError as error:
            self._send(error_reply_for(error, exchange))
        except Exception as error:
            self._send(unexpected(error, exchange))
        return True

    def leave(self) -> None:
        """Cancel the query, or the response that is being sent."""
        if self._sending is not None:
            self._sending.cancel()
        elif not self._is_over and self._cancel is not None:
            self._cancel()
            self._end(CLIENT_LEFT)

    def _answered(self, answer: Answer) -> None:
        if self._is_over:
            return
        try:
            reply = reply_to(answer, self._exchange)
        except Exception as error:
            reply = unexpected(error, self._exchange)
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        exchange, add_cors = self._exchange, self._front.add_cors
        if add_cors is not None:
            reply = reply._replace(headers=add_cors(exchange.scope, reply.headers))
        if not isinstance(reply.body, bytes):
            self._reply = reply
            self._sending = self._request.go_on(self._send_parts)
            self._sending.add_done_callback(self._sent)
            return
        exchange.bytes_out = len(reply.body)
        self._is_over = True
        self._request.reply(reply.status, exchange.completed(reply.headers), reply.body)
        self._end(reply.status)

    async def _send_parts(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        assert self._reply is not None
        await guarded(self._exchange, send, partial(send_reply, self._reply))

    def _sent(self, _task: object) -> None:
        end_body(self._reply)  # the task may have been cancelled before its first step
        self._end(self._exchange.status or CLIENT_LEFT)

    def _end(self, status: int) -> None:
        self._is_over = True
        self._exchange.status = status
        self._exchange.end()
