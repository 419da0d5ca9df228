"""One HTTP worker's application: Falcon, and around it what holds for every request.

From the outside in, a request passes :class:`Front`, which gives it an id, logs it and answers what
nothing inside has answered; the middlewares, where the settings name any (:mod:`.middlewares`); and
one Falcon app, which has our own pages under ``/-/`` (:mod:`.pages`; :mod:`.admin`, added when the
first request to it comes) and makes a query of all else, for the router.
WebSockets leave this way before Falcon (:mod:`.websocket`), because Falcon would read ahead of user
code.

Plain requests take the short way, from the parser to the router and back, past ASGI and Falcon:
ASGI takes a request through a task, and Falcon through a request and a response object more. One
whose body is here, and whose response is whole, needs none of that: its query leaves, and a
callback writes the answer. docs/performance.md says what this brings. The bytes are the same. With
the option ``short_way`` off, Falcon makes the query; since nothing waits for that, it takes no task
either.

A worker serves, and then drains, from SIGTERM on: what is in flight goes on, everything new is
answered 503. A worker whose master has died leaves without draining: it serves the connections that
it has, and asks each client to come back on a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import falcon.asgi
from falcon.routing import CompiledRouter

from greenroom.actors.caller.streams import StreamFailedError
from greenroom.actors.messages.queries import Query
from greenroom.actors.runtime import tracing
from greenroom.actors.runtime.logs import ACCESS_LOG
from greenroom.actors.runtime.loop import nothing
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.runtime.shared_metrics import SharedMetrics
from greenroom.core.errors import (
    ForbiddenError,
    GreenroomError,
    InvalidRequestError,
    NotRunningError,
    RouteNotFoundError,
)
from greenroom.core.routing.tickets import BODY
from greenroom.http_front import websocket
from greenroom.http_front.access_log import AccessLog
from greenroom.http_front.asgi import App, Event, Headers, Receive, Scope, Send
from greenroom.http_front.bodies import EARLY, Body
from greenroom.http_front.clients import ClientCounts
from greenroom.http_front.heads import Head, split
from greenroom.http_front.link import Link
from greenroom.http_front.pages import HEALTH, pages
from greenroom.http_front.protocol import Begin, Cycle
from greenroom.http_front.request import (
    ASGI,
    CLIENT_LEFT,
    CLOSE,
    REQUEST_KEY,
    Reply,
    Request,
    Requests,
    asked,
    query_for,
)
from greenroom.http_front.responses import Answer, end_body, reply_for, reply_to, send_reply

_logger = logging.getLogger(__name__)

ADMIN = ("/-/api/", "/-/dashboard")
_EMPTY_BODY: Event = {"type": "http.request", "body": b"", "more_body": False}
_NO_SERVICE_WORKER = (
    "service workers are refused beside the dashboard, whose page they could replace; give the "
    "pages a place of their own (--http-pages-port)"
)


class Front:
    """The ASGI application of one worker; make it after the fork."""

    def __init__(self, settings: HostSettings, link: Link) -> None:
        self.settings = settings
        self.options = options = settings.http
        self.link = link
        self.access_log = AccessLog(settings.logs_dir / ACCESS_LOG)
        self.requests = Requests(self.access_log)
        self.conversations = websocket.Conversations(link, options.request_timeout_s)
        self._shown = SharedMetrics(self.requests.metrics)
        self._is_draining = False
        self._shares_origin = options.has_admin and options.pages_address is None
        self._early_bodies = ClientCounts(EARLY)
        self._falcon: falcon.asgi.App[Any, Any] = falcon.asgi.App(router=Router(self))
        self._falcon.resp_options.default_media_type = None  # type: ignore[assignment]
        for path, page in pages(link).items():
            self._falcon.add_route(path, page)
        self._falcon.add_error_handler(falcon.HTTPError, _refuse)
        self._falcon.add_error_handler(Exception, _raise)
        self._guard: Callable[[Request], None] | None = None  # until the admin API is asked for
        self._app: App = self._answer
        self._add_cors: Callable[[Scope, Headers], Headers] | None = None  # on the short way
        if options.middlewares or options.cors:
            from greenroom.http_front import middlewares  # noqa: PLC0415  # few need it

            self._app = middlewares.around(self._answer, options)
            if options.cors is not None:
                self._add_cors = middlewares.CorsHeaders(options.cors).added

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or a WebSocket from its opening to its end.

        What fails before the response has begun is answered with 500. Later it is raised, and the
        protocol cuts the connection, so that the client knows.
        """
        request: Request = scope[REQUEST_KEY]
        if request.requests is None:
            request.begin(self.requests)
        # No middleware stands before pages at a place of their own, which is for operators alone,
        # nor before health: one that wants a password would keep the system from starting.
        is_inside = request.head.for_pages or request.head.page in HEALTH
        app = self._answer if is_inside else self._app
        try:
            if request.reply is not None:
                await send_reply(request.reply, request, send)
            else:
                await app(scope, receive, send)
        except asyncio.CancelledError:
            if not (request.head.is_socket and request.status):
                request.status = CLIENT_LEFT
            raise
        except Exception as error:
            if isinstance(error, StreamFailedError) and request.status:
                _logger.warning("request %s was cut off: %s", request.id, error)
                raise
            reply = reply_for(error, request)  # one of ours: a middleware has read a body, slowly
            if request.status:
                raise
            request.broken_by = None  # another layer has kept what was begun of it
            await send_reply(reply, request, send)
        finally:
            request.end()

    @property
    def begin(self) -> Begin | None:
        """The short way: begins a request whose body is here; None where middlewares want all.

        It returns False for a request that goes the long way: it is not plain, or there is no
        router to ask yet.
        """
        return None if self.options.middlewares else self._begin

    def _begin(self, cycle: Cycle, body: bytes) -> bool:
        request, head = cycle.request, cycle.request.head
        if head.query is None and not self._is_plain(head, body):
            return False
        request.begin(self.requests)
        try:
            if self.options.short_way:
                self.admit(head)
                most_s = self.options.request_timeout_s
                query = query_for(request, self.link.next_id(), most_s, body)
            else:
                query = self._query_by_falcon(request, body)
            cancel = self.link.submit(query, partial(self._answered, cycle))
        except Exception as error:
            self._send(cycle, reply_for(error, request))
        else:
            if cancel is None:
                return False
            if cycle.leave is nothing:  # else parts of the answer are being sent
                cycle.leave = partial(_leave, request, cancel)
        return True

    def _is_plain(self, head: Head, body: bytes) -> bool:
        """Return whether a request whose body is here needs nothing but the router's answer."""
        limit = self.options.max_body_bytes
        if limit is not None and len(body) > limit:
            return False
        if self.options.cors is not None and head.method == "OPTIONS":
            return False  # it may be a preflight
        return head.path[:1] == "/" and not head.page

    def _answered(self, cycle: Cycle, answer: Answer) -> None:
        request = cycle.request
        if request.requests is None:
            return
        try:
            reply = reply_to(answer, request)
        except Exception as error:
            reply = reply_for(error, request)
        self._send(cycle, reply)

    def _send(self, cycle: Cycle, reply: Reply) -> None:
        request = cycle.request
        if self._add_cors is not None:
            reply = reply._replace(headers=self._add_cors(request.scope, reply.headers))
        if isinstance(reply.body, bytes):
            cycle.reply(reply)
            request.end()
        else:
            request.reply = reply
            cycle.go_on(self).add_done_callback(partial(_sent, request))

    def admit(self, head: Head) -> None:
        """Raise a GreenroomError for a request that goes no further."""
        if self._is_draining:
            raise NotRunningError("this server is stopping")
        if head.query is not None:
            return  # it was admitted before
        if self._shares_origin and head.named.get(b"service-worker") == b"script":
            raise ForbiddenError(_NO_SERVICE_WORKER)
        check_target(head, empty_segments=self.options.empty_path_segments)

    def drain(self) -> None:
        """Take no new requests from now on."""
        self._is_draining = True
        self.leave()

    def leave(self) -> None:
        """Ask clients to close their connections from now on."""
        self.requests.are_last = True

    async def start(self) -> None:
        """Begin; never raises, for a worker that cannot start would end all others too."""
        tracing.start("greenroom", {"host.name": self.settings.host_name})
        self._shown.keep_showing(asyncio.get_running_loop().call_later)
        try:
            await self.link.start()
        except Exception:
            _logger.exception("the link to the router did not start; health answers 503")

    async def stop(self) -> None:
        """End; never raises."""
        self._shown.close()
        await asyncio.to_thread(tracing.flush)
        try:
            await self.link.stop()
        except Exception:
            _logger.exception("the link to the router did not stop cleanly")
        self.access_log.flush()

    # --- Inside the middlewares -----------------------------------------------------------------

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: Request = scope[REQUEST_KEY]
        if scope is not request.scope:
            request = Request.of(scope, request)
        if request.head.is_socket:
            await self._converse(request, receive, send)
            return
        if request.head.has_body:
            request.body = Body(
                receive,
                request.head.length,
                waits=request.expects_continue,
                host=None if request.head.client is None else request.head.client[0],
                max_bytes=self.options.max_body_bytes,
                early=self._early_bodies,
            )

        try:
            request.reply = await self._reply(request)
            body = request.body
            if body is not None and body.is_begun and not body.is_complete:
                request.reply.headers.append(CLOSE)  # else the client had to send the rest
            await send_reply(request.reply, request, send)
        finally:
            # A connection keeps its last request until the next one comes.
            reply, request.reply = request.reply, None
            body, request.body = request.body, None
            end_body(reply)
            if body is not None:
                await body.end()

    async def _reply(self, request: Request) -> Reply:
        async def take(event: Event) -> None:
            if request.reply is None and "status" in event:  # to OPTIONS, by Falcon itself
                request.reply = Reply(event["status"], event["headers"], b"")

        try:
            await self._falcon(_for_falcon(request), _no_body, take)
            body, query, request.query = request.body, request.query, None
            if query is None:
                assert request.reply is not None
                return request.reply
            on_upload = None if body is None or body.is_complete else body.send_to
            return reply_to(await self.link.ask(query, on_upload), request)
        except Exception as error:
            return reply_for(error, request)

    def _query_by_falcon(self, request: Request, body: bytes) -> Query:
        """Return the query for a plain request; raises for one that goes no further.

        Nothing of that waits, so it takes no task.
        """
        request.content = body
        with contextlib.suppress(StopIteration):
            self._falcon(_for_falcon(request), _no_body, _drop).send(None)
        query, request.query, request.content = request.query, None, b""
        assert query is not None
        return query

    async def _converse(self, request: Request, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        try:
            self.admit(request.head)
            if request.head.for_pages:
                raise RouteNotFoundError
            await self.conversations.serve(request, receive, send)
        except GreenroomError as error:
            await send_reply(reply_for(error, request), request, send)

    def guard(self, request: Request) -> None:
        """Check who asks the admin API."""
        if self._guard is None:
            from greenroom.http_front.admin.api import add_to  # noqa: PLC0415  # few need it

            self._guard = add_to(self._falcon, self.settings, self.link)
        self._guard(request)

    async def on_request(self, req: falcon.asgi.Request, _resp: object) -> None:
        """Make the query, once as much of the body is here as goes with it."""
        request = asked(req)
        if request.head.path == "*":  # OPTIONS, to see whether the server is there
            request.reply = Reply(204, [], b"")
            return
        body, begun, follows = request.body, request.content, ""
        if body is not None:
            begun = await body.begin()
            follows = "" if body.is_complete else BODY
        number, most_s = self.link.next_id(), self.options.request_timeout_s
        request.query = query_for(request, number, most_s, begun, follows=follows)


def _leave(request: Request, cancel: Callable[[], object]) -> None:
    cancel()
    request.status = CLIENT_LEFT
    request.end()


def _sent(request: Request, _task: object) -> None:
    """Release what a task holds that may have been cancelled before its first step."""
    reply, request.reply = request.reply, None
    end_body(reply)
    request.status = request.status or CLIENT_LEFT
    request.end()


class Router(CompiledRouter):
    """Falcon's router: our own pages by their paths, and :meth:`Front.on_request` for all else."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self._front = front
        self._else: Any = front, defaultdict(lambda: front.on_request), {}, None

    def find(self, uri: str, req: Any = None) -> Any:
        """Return what answers a request; raises for one that goes no further."""
        request = asked(req)
        head, options = request.head, self._front.options
        self._front.admit(head)
        if head.query is not None:  # of the same head, which came before
            return self._else
        page = head.page
        if not (page or head.for_pages):
            return self._else
        is_here = head.for_pages or options.pages_address is None
        if page.startswith(ADMIN) and is_here and options.has_admin:
            request.is_admin = True
            self._front.guard(request)
        elif page.startswith(ADMIN) or not (is_here or page in HEALTH):
            raise RouteNotFoundError
        found = super().find(page, req)
        if found is None:
            raise RouteNotFoundError
        return found


def _for_falcon(request: Request) -> Scope:
    """Return what Falcon needs of a request to find who answers it; that one gets the request."""
    return {
        "type": "http",
        "asgi": ASGI,
        "http_version": request.head.http_version,
        "method": request.head.method,
        "path": request.head.path,
        "query_string": b"",
        "headers": (),
        REQUEST_KEY: request,
    }


async def _no_body() -> Event:
    return _EMPTY_BODY


async def _drop(_event: Event) -> None:
    pass


async def _refuse(req: Any, _resp: object, error: falcon.HTTPError, _: dict[str, Any]) -> None:
    asked(req).reply = reply_for(error, asked(req))


async def _raise(_req: object, _resp: object, error: Exception, _: dict[str, Any]) -> None:
    raise error


# --- Requests that HTTP wants refused -------------------------------------------------------------
#
# The protocol refuses what it cannot frame: two lengths, a length beside Transfer-Encoding, a
# folded header, a lone line feed, a NUL. What is checked here is framed, so the connection can go
# on, but another server in front of us may read it otherwise, and route by it.

# RFC 3986's host and port: a name or address, an IPv6 address in brackets; empty is allowed.
_is_authority = re.compile(
    rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~!$&'()*+,;=%]*)(:[0-9]{0,5})?"
).fullmatch
_absolute = re.compile(r"(https?)://([^/?#]*)", re.IGNORECASE).match
# Where a reverse proxy applies its rules to the path that is left when these are resolved, and we
# would route by the one that was sent, a client could pass the rules.
_dot_segment = re.compile(r"/\.\.?(?:/|\Z)").search
_DEFAULT_PORTS = {"http": b":80", "https": b":443"}


def check_target(head: Head, *, empty_segments: bool) -> None:
    """Raise InvalidRequestError for a Host or target that servers may read in several ways."""
    host = head.named.get(b"host")
    if host is None:
        if head.http_version == "1.1":
            raise InvalidRequestError("the Host header is missing, which HTTP/1.1 requires")
    elif not _is_host(host):
        shown = host[:100].decode("latin-1")
        raise InvalidRequestError(f"the Host header {shown!r} is no name or address with a port")
    if head.sent_path[:1] != "/":
        _check_odd_target(head, host)
    path = head.full_path
    if "/." in path and _dot_segment(path):
        text = f"the path {path[:100]!r} has a segment . or .., which servers resolve differently"
        raise InvalidRequestError(text)
    if "//" in path and not empty_segments:
        text = f"the path {path[:100]!r} has an empty segment (//), which some servers leave out"
        raise InvalidRequestError(text)


@lru_cache(maxsize=1024)
def _is_host(host: bytes) -> bool:
    return _is_authority(host) is not None


def _check_odd_target(head: Head, host: bytes | None) -> None:
    target = split(head.target)[0].decode("latin-1")
    if target == "*" and head.method == "OPTIONS":
        return
    absolute = _absolute(target)
    if absolute is None:
        text = f"the request target {target[:100]!r} is neither a path nor an http URL"
        raise InvalidRequestError(text)
    scheme, authority = absolute.groups()
    default_port = _DEFAULT_PORTS[scheme.lower()]
    named = authority.encode("latin-1", "replace").lower().removesuffix(default_port)
    if host is not None and named != host.lower().removesuffix(default_port):
        text = f"the request target {target[:100]!r} is for another host than the Host header"
        raise InvalidRequestError(text)
