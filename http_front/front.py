"""The outermost ASGI layer of a worker: what must hold for every request, whoever answers it.

In this order, for each request: give it an id; take it through the middlewares, where the settings
name any; refuse it when draining or malformed; read its body within the limits, or what is to go
with its query; have the router's replicas answer it, or one of our own pages; write its line in the
access log. A request that is here in whole takes a shorter way (:mod:`.whole`) to the same end.

States: serving, then draining (set by the worker on SIGTERM, never taken back). While draining,
what is in flight goes on and everything new is answered 503. A worker whose master died hands over
to the next master's workers instead: it goes on serving the connections it has, and asks each
client to come back on a new one.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import lru_cache
from time import perf_counter, time
from typing import NamedTuple

from greenroom.actors.caller.streams import Stream, StreamFailedError
from greenroom.actors.messages.queries import FailedAnswer
from greenroom.core.config import HTTPOptions
from greenroom.core.errors import (
    BodyIncompleteError,
    BodyTooLargeError,
    GreenroomError,
    RouteNotFoundError,
)
from greenroom.core.routing.tickets import BODY
from greenroom.http_front.access_log import AccessLog, Entry
from greenroom.http_front.answers import (
    WITHOUT_BODY,
    BadHeaderError,
    check_status,
    declared_length,
    error_reply,
    failed_reply,
    failure_of,
    passed_on,
    reply_to,
    retry_after,
    unexpected,
)
from greenroom.http_front.asking import Asker
from greenroom.http_front.dispatcher import Dispatcher
from greenroom.http_front.exchange import (
    CLIENT_LEFT,
    CLOSE,
    HEALTH,
    PAGES_KEY,
    SCOPE_KEY,
    App,
    Body,
    BodyLimits,
    Event,
    Exchange,
    Headers,
    Receive,
    Reply,
    RequestIds,
    Scope,
    Send,
    Upload,
)
from greenroom.http_front.websocket import SocketExchange, Sockets, refuse
from greenroom.http_front.whole import Turn, WholeQuery

# Responses whose parts are sent on as they come from the replica.

_END: Event = {"type": "http.response.body", "body": b"", "more_body": False}


async def send_stream(stream: Stream, exchange: Exchange) -> None:
    """Send ``stream`` as the response; StreamFailedError when it broke off.

    It is held to the length that it declares. However this ends, no more parts are wanted then. A
    client that has all of a declared length may leave before the end is here: that is no reason to
    cancel what user code does after it.
    """
    left: int | None = None
    try:
        begun = _begin(stream, exchange)
        if isinstance(begun, Reply):
            await exchange.reply(begun)
            return
        headers, left = begun
        start = {"type": "http.response.start", "status": stream.status, "headers": headers}
        await exchange.send(start)
        while (data := await stream.next_bytes()) is not None:
            if left is not None:
                left -= len(data)
                if left < 0:
                    break
            await exchange.send({"type": "http.response.body", "body": data, "more_body": True})
        if left:
            raise StreamFailedError("the parts are not as long as their Content-Length")
        await exchange.send(_END)
    finally:
        if left == 0:
            stream.leave()
        else:
            stream.close()


def _begin(stream: Stream, exchange: Exchange) -> tuple[Headers, int | None] | Reply:
    """Return headers and declared length, or the whole reply that is to be given instead."""
    try:
        check_status(stream.status)
        headers = passed_on(stream.headers)
    except BadHeaderError as error:
        return error_reply(500, "UnsupportedResultError", str(error), exchange)
    length = declared_length(stream.headers)
    if length is not None:
        headers.append((b"content-length", length))
    if exchange.method == "HEAD" or stream.status in WITHOUT_BODY:
        return Reply(stream.status, headers, b"")
    return headers, None if length is None else int(length)


# Requests that the server lets through, and that HTTP wants refused.
#
# The protocol refuses what it cannot frame: two lengths, a length beside Transfer-Encoding, a
# folded header, a lone line feed, a NUL. What is looked at here is framed, but another server in
# front of us may read it otherwise, which is what routing by Host lives on.

# RFC 3986's host and port: a name or address, an IPv6 address in brackets; empty is allowed.
_is_authority = re.compile(
    rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~!$&'()*+,;=%]*)(:[0-9]{0,5})?"
).fullmatch
_absolute = re.compile(r"(https?)://([^/?#]*)", re.IGNORECASE).match


_DEFAULT_PORTS = {"http": b":80", "https": b":443"}


def reply_at_once(exchange: Exchange) -> Reply | None:
    """Return the answer to a request that goes no further; None for nearly all."""
    head = exchange.head
    host = head.get(b"host")
    if host is None:
        if exchange.scope["http_version"] == "1.1":
            return _refused(exchange, "the Host header is missing, which HTTP/1.1 requires")
    elif not _is_host(host):
        shown = host[:100].decode("latin-1")
        return _refused(exchange, f"the Host header {shown!r} is no name or address with a port")
    if exchange.path[:1] != "/":
        return _reply_to_odd_target(exchange, host)
    return None


def _refused(exchange: Exchange, text: str) -> Reply:
    """Refuse this request alone: where it ends is clear, so the connection can go on."""
    return error_reply(400, "InvalidRequestError", text, exchange)


@lru_cache(maxsize=1024)
def _is_host(host: bytes) -> bool:
    return _is_authority(host) is not None


def _reply_to_odd_target(exchange: Exchange, host: bytes | None) -> Reply | None:
    target = exchange.raw_path.decode("latin-1")
    if target == "*" and exchange.method == "OPTIONS":  # asks whether the server is there
        return Reply(204, [], b"")
    absolute = _absolute(target)
    if absolute is None:
        text = f"the request target {target[:100]!r} is neither a path nor an http URL"
        return _refused(exchange, text)
    scheme, authority = absolute.groups()
    default_port = _DEFAULT_PORTS[scheme.lower()]
    named = authority.encode("latin-1", "replace").lower().removesuffix(default_port)
    if host is not None and named != host.lower().removesuffix(default_port):
        text = f"the request target {target[:100]!r} is for another host than the Host header"
        return _refused(exchange, text)
    return None


_logger = logging.getLogger(__name__)

_NOT_FOUND = FailedAnswer(0, RouteNotFoundError.__name__, "")
_EMPTY_BODY: Event = {"type": "http.request", "body": b"", "more_body": False}


async def _no_body() -> Event:
    return _EMPTY_BODY


class Pages(NamedTuple):
    """Our own pages: their paths, and the app that serves them."""

    paths: frozenset[str]
    app: App


class Front:
    """The ASGI application of one worker; make it after the fork."""

    def __init__(
        self,
        options: HTTPOptions,
        dispatcher: Dispatcher,
        asker: Asker,
        pages: Pages,
        access_log: AccessLog,
    ) -> None:
        self.draining = False
        self.leaving = False
        self.in_flight = 0
        self.access_log = access_log
        self.asker = asker
        self._dispatcher = dispatcher
        self._pages = pages
        self._sockets = Sockets(asker.ask)
        self._has_chain = bool(options.middlewares or options.cors)
        self._serve_one = self._take_and_answer
        self._converse_one = self._open_socket
        if self._has_chain:
            from greenroom.http_front.middlewares import Chain  # noqa: PLC0415  # for who has some

            chain = Chain(options, self._take_and_answer, self._open_socket)
            self._serve_one, self._converse_one = chain.serve, chain.converse
        self._ids = RequestIds()
        self._root_path = options.root_path.rstrip("/")
        self._page_paths = pages.paths | {self._root_path + path for path in pages.paths}
        self.pages_address = options.pages_address
        # What a proxy in front of us was told to keep to itself it knows by the very bytes.
        self._raw_page_paths = {(self._root_path + path).encode() for path in pages.paths}
        self._body_limits = BodyLimits(options.max_body_bytes, options.body_timeout_s)
        self.header_timeout_s = options.header_timeout_s
        # Somewhat later than the router, which answers 408.
        self.opening_timeout_s = asker.opening_timeout_s + 5
        self.send_timeout_s = options.send_timeout_s
        self.max_message_bytes = options.max_websocket_message_bytes
        self.max_waiting_bytes = options.max_waiting_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope: a request, a websocket, or the worker's lifespan."""
        kind = scope["type"]
        if kind == "http":
            exchange = Exchange(scope, self._ids, self)
            exchange.send_by(send)
            await self._serve(exchange, receive)
        elif kind == "lifespan":
            await self._live(receive, send)
        else:
            await self._converse(scope, receive, send)

    def begin(self, turn: Turn) -> Callable[[], None] | None:
        """Answer a request that is here in whole; return what to call when its client leaves.

        None when it has to be served as an ASGI scope.
        """
        limit, path = self._body_limits.max_bytes, turn.scope["path"]
        if (
            self._has_chain
            or (limit is not None and len(turn.body) > limit)
            or path in self._page_paths
            or path[:1] != "/"
            or PAGES_KEY in turn.scope
        ):
            return None
        exchange = Exchange(turn.scope, self._ids, self)
        exchange.body = turn.body
        query = WholeQuery(self, turn, exchange)
        return query.leave if query.begin() else None

    async def _serve(self, exchange: Exchange, receive: Receive) -> None:
        self.in_flight += 1
        try:
            # Where only pages are, only who runs the system is: no middleware is for them.
            serve = self._take_and_answer if PAGES_KEY in exchange.scope else self._serve_one
            await self._guarded(exchange, serve(exchange, receive))
        finally:
            self.over(exchange)

    async def _guarded(self, exchange: Exchange, serving: Awaitable[None]) -> None:
        try:
            await serving
        except asyncio.CancelledError:
            exchange.status = CLIENT_LEFT
            raise
        except StreamFailedError as error:
            _logger.warning("request %s was cut off: %s", exchange.request_id, error)
            raise  # the server cuts the connection, so that the client knows
        except Exception as error:
            reply = unexpected(exchange, error)
            if exchange.status:
                raise  # the answer has begun: the server cuts the connection
            await exchange.reply(reply)

    def over(self, exchange: Exchange) -> None:
        """Count and log a request that was answered, or whose client has left."""
        self.in_flight -= 1
        self._log(exchange)

    def sending(self, exchange: Exchange, answer: Stream | Reply) -> App:
        """Return the ASGI app that sends a stream as the answer, or a reply."""

        async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
            exchange.send_by(send)
            if isinstance(answer, Stream):
                await self._guarded(exchange, send_stream(answer, exchange))
            else:
                await self._guarded(exchange, exchange.reply(answer))

        return app

    async def _take_and_answer(self, exchange: Exchange, receive: Receive) -> None:
        reply = await self._take(exchange, receive)
        try:
            if reply is not None:
                await exchange.reply(reply)
                return
            self.resolve(exchange)
            is_page = exchange.raw_path in self._raw_page_paths
            if not self._is_here(exchange, is_page=is_page):
                await exchange.reply(failed_reply(_NOT_FOUND, exchange))
            elif is_page:
                await self._pages.app(self._scope_for_page(exchange), _no_body, exchange.send)
            else:
                await self._answer(exchange)
        finally:
            if exchange.upload is not None:
                await exchange.upload.end()

    async def _answer(self, exchange: Exchange) -> None:
        """Ask the router; cancelled when the client leaves, which cancels the query."""
        upload = exchange.upload
        try:
            if upload is None:
                asking = self.asker.ask(exchange)
                exchange.body = b""  # the query has it
                answer = await asking
            else:
                answer = await self.asker.ask(exchange, BODY, upload.begin)
        except GreenroomError as error:
            answer = failure_of(error)
        if isinstance(answer, Stream):
            await send_stream(answer, exchange)
        else:
            await exchange.reply(reply_to(answer, exchange))

    async def _take(self, exchange: Exchange, receive: Receive) -> Reply | None:
        """Read the request; return the refusal if it is not to be answered by Falcon."""
        reply = self.refusal(exchange)
        if reply is not None:
            return reply
        declared = exchange.head.get(b"content-length")
        if declared is None and b"transfer-encoding" not in exchange.head:
            return None  # so there is no body
        body = Body(receive, declared, self._body_limits)
        try:
            exchange.body = await body.begin()
        except (BodyTooLargeError, BodyIncompleteError) as error:
            exchange.upload = Upload(body)
            kind = type(error).__name__
            return error_reply(error.http_status, kind, str(error), exchange, [CLOSE])
        if not body.is_complete:
            exchange.upload = Upload(body)
        return None

    def refusal(self, exchange: Exchange) -> Reply | None:
        """Return the answer to a request that goes no further."""
        if self.draining:
            text = "this server is stopping"
            return error_reply(503, "NotRunningError", text, exchange, [retry_after(1), CLOSE])
        return reply_at_once(exchange)

    def resolve(self, exchange: Exchange) -> None:
        """Find the path to route by."""
        if self._root_path or exchange.path[:1] != "/":
            exchange.resolve_target(self._root_path)

    def _is_here(self, exchange: Exchange, *, is_page: bool) -> bool:
        """Return whether it may be asked for where it was: pages may have a place of their own."""
        if PAGES_KEY in exchange.scope:
            return is_page
        return not is_page or self.pages_address is None or exchange.path in HEALTH

    def _scope_for_page(self, exchange: Exchange) -> Scope:
        # Falcon would fail to decode a query that is not ASCII, and no page has one.
        scope = {**exchange.scope, "path": exchange.path, "query_string": b""}
        scope[SCOPE_KEY] = exchange
        return scope

    def _log(self, exchange: Exchange) -> None:
        scope = exchange.scope
        self.access_log.add(
            Entry(
                time(),
                exchange.request_id,
                exchange.method,
                scope["path"],
                exchange.status,
                perf_counter() - exchange.started_at,
                exchange.bytes_out,
                scope["client"],
            )
        )

    async def _converse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket from its opening to its end."""
        exchange = SocketExchange({**scope, "method": "GET"}, self._ids, self)
        exchange.send_by(send)
        self.in_flight += 1
        try:
            await self._converse_one(exchange, receive)
        except asyncio.CancelledError:
            exchange.status = exchange.status or CLIENT_LEFT
            raise
        except Exception:
            _logger.exception("WebSocket %s failed", exchange.request_id)
            raise  # the server refuses or closes it
        finally:
            self.in_flight -= 1
            self._log(exchange)

    async def _open_socket(self, exchange: Exchange, receive: Receive) -> None:
        await receive()  # websocket.connect
        reply = self.refusal(exchange)
        if reply is None and PAGES_KEY in exchange.scope:
            reply = failed_reply(_NOT_FOUND, exchange)
        if reply is not None:
            await refuse(exchange, reply)
            return
        self.resolve(exchange)
        await self._sockets.serve(exchange, receive)

    def close_sockets(self) -> None:
        """Close all WebSockets with 1012, and those that are being opened."""
        self._sockets.close_all()

    async def start(self) -> None:
        """Begin; never raises, for a worker that cannot start would end all others too."""
        try:
            await self._dispatcher.start()
        except Exception:
            _logger.exception("the link to the router did not start; health answers 503")

    async def stop(self) -> None:
        """End; never raises."""
        try:
            await self._dispatcher.stop()
        except Exception:
            _logger.exception("the link to the router did not stop cleanly")
        self.access_log.close()

    async def _live(self, receive: Receive, send: Send) -> None:
        """Follow the lifespan protocol, under a server that has it."""
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})
