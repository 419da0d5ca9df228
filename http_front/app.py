"""One HTTP worker's application: Falcon, and around it what holds for every request.

From the outside in, a request passes :class:`Front`, which gives it an id, logs it and answers what
nothing inside has answered; the middlewares, where the settings name any (:mod:`.middlewares`); and
one Falcon app, which has our own pages under ``/-/`` and makes a query of all else, for the router.
The admin API is another Falcon app (:mod:`.admin`), made when the first request to it comes.
WebSockets leave this way before Falcon (:mod:`.websocket`), because Falcon would read ahead of user
code. Plain requests go past all of it, with the same bytes as the result (:mod:`.short_way`).

A worker serves, and then drains, from SIGTERM on: what is in flight goes on, everything new is
answered 503. A worker whose master has died leaves without draining: it serves the connections that
it has, and asks each client to come back on a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import falcon.asgi
from falcon.routing import CompiledRouter

from greenroom.actors.caller.streams import StreamFailedError
from greenroom.actors.messages.queries import Query
from greenroom.actors.runtime import tracing
from greenroom.actors.runtime.logs import ACCESS_LOG
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.runtime.shared_metrics import SharedMetrics
from greenroom.core.errors import (
    ForbiddenError,
    GreenroomError,
    InvalidRequestError,
    NotRunningError,
    RouteNotFoundError,
)
from greenroom.core.metrics import CONTENT_TYPE
from greenroom.core.routing.tickets import BODY
from greenroom.http_front import websocket
from greenroom.http_front.access_log import AccessLog
from greenroom.http_front.asgi import App, Event, Headers, Receive, Scope, Send
from greenroom.http_front.bodies import EARLY, Body
from greenroom.http_front.clients import ClientCounts
from greenroom.http_front.heads import Head, split
from greenroom.http_front.link import Kept, Link
from greenroom.http_front.request import (
    ASGI,
    CLIENT_LEFT,
    CLOSE,
    REQUEST_KEY,
    Reply,
    Request,
    Requests,
    query_for,
)
from greenroom.http_front.responses import end_body, error_reply, reply_for, reply_to, send_reply

_logger = logging.getLogger(__name__)

RESERVED = b"/-/"  # below it is nothing of users'
DASHBOARD = b"/-/dashboard"
ADMIN = b"/-/api/"  # where the admin API is beside requests
OWN_ADMIN = b"/api/"  # and at a place of its own, as Ray Serve has it
HEALTH = (b"/-/healthz", b"/-/readyz")  # answered wherever requests are, past the middlewares
PAGE_TIMEOUT_S = 5.0
KEPT_S = 1.0  # how long the text of the metrics is kept
_EMPTY_BODY: Event = {"type": "http.request", "body": b"", "more_body": False}
_NO_SERVICE_WORKER = (
    "service workers are refused beside the dashboard, whose page they could replace; give the "
    "pages a place of their own (--http-pages-port)"
)
_UNHEALTHY = "this server has no route table yet, or cannot reach its router"

T = TypeVar("T")


class Front:
    """The ASGI application of one worker; make it after the fork."""

    def __init__(self, settings: HostSettings, link: Link) -> None:
        self.settings = settings
        self.options = options = settings.http
        self._host_name = settings.host_name
        self.link = link
        self.access_log = AccessLog(settings.logs_dir / ACCESS_LOG)
        self._root_path = options.root_path.rstrip("/")
        self._raw_root = self._root_path.encode()
        self.requests = Requests(self.access_log)
        self.conversations = websocket.Conversations(link, options.request_timeout_s)
        self._shown = SharedMetrics(self.requests.metrics)
        self._is_draining = False
        self._shares_origin = options.has_admin and options.pages_address is None
        self._early_bodies = ClientCounts(EARLY)
        pages = _pages(link)
        self._pages = {path.encode() for path in pages}
        self._falcon = _falcon_app(self, pages)
        self._admin: falcon.asgi.App[Any, Any] | None = None  # until it is asked for
        self._app: App = self._answer
        self.add_cors: Callable[[Scope, Headers], Headers] | None = None  # on the short way
        if options.middlewares or options.cors:
            from greenroom.http_front import middlewares  # noqa: PLC0415  # few need it

            self._app = middlewares.around(self._answer, options)
            if options.cors is not None:
                self.add_cors = middlewares.CorsHeaders(options.cors).added

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or a WebSocket from its opening to its end.

        What fails before the response has begun is answered with 500. Later it is raised, and the
        protocol cuts the connection, so that the client knows.
        """
        request: Request = scope.get(REQUEST_KEY) or Request.of(scope, self._root_path)
        scope[REQUEST_KEY] = request
        if request.requests is None:
            request.begin(self.requests)
        # No middleware stands before pages at a place of their own, which is for operators alone,
        # nor before health: one that wants a password would keep the system from starting.
        is_inside = request.head.for_pages or self._below(request.head) in HEALTH
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
        except StreamFailedError as error:
            _logger.warning("request %s was cut off: %s", request.id, error)
            raise
        except Exception as error:
            reply = reply_for(error, request)  # one of ours: a middleware has read a body, slowly
            if request.status:
                raise
            request.broken_by = None  # another layer has kept what was begun of it
            await send_reply(reply, request, send)
        finally:
            request.end()

    def is_plain(self, head: Head, body: bytes) -> bool:
        """Return whether a request whose body is here needs nothing but the router's answer."""
        limit = self.options.max_body_bytes
        if limit is not None and len(body) > limit:
            return False
        if self.options.cors is not None and head.method == "OPTIONS":
            return False  # it may be a preflight
        return head.path[:1] == "/" and not self._below(head).startswith(RESERVED)

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
        tracing.start("greenroom", {"host.name": self._host_name})
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
        self.access_log.close()

    # --- Inside the middlewares -----------------------------------------------------------------

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: Request = scope[REQUEST_KEY]
        if scope is not request.scope:
            request = Request.of(scope, self._root_path, request)
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
            await self._reply(request, send)
            if request.reply is not None:  # past Falcon, which would merge headers
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

    async def _reply(self, request: Request, send: Send) -> None:
        """Send the page that is asked for, or set the reply to what is asked of the router."""

        async def send_page(event: Event) -> None:
            if request.query is None and request.reply is None:
                await send(event)

        try:
            await self._app_for(request)(_for_falcon(request), _no_body, send_page)
            body, query, request.query = request.body, request.query, None
            if query is not None:
                on_upload = None if body is None or body.is_complete else body.send_to
                request.reply = reply_to(await self.link.ask(query, on_upload), request)
        except Exception as error:
            if request.status:
                raise
            request.reply = reply_for(error, request)

    def query_by_falcon(self, request: Request, body: bytes) -> Query:
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

    def _below(self, head: Head) -> bytes:
        """Return the path below the root path, as it was sent.

        A page has one spelling: a proxy in front of us that was told to keep it to itself knows it
        by these bytes.
        """
        return head.raw_path.removeprefix(self._raw_root)

    def _app_for(self, request: Request) -> falcon.asgi.App[Any, Any]:
        """Return the Falcon app that a request is for."""
        path = self._below(request.head)
        is_admin = path == DASHBOARD or path.startswith(ADMIN)
        is_admin |= request.head.for_pages and path.startswith(OWN_ADMIN)
        if not (is_admin and self.options.has_admin and self._has_pages(request)):
            return self._falcon
        if self._admin is None:
            from greenroom.http_front.admin.api import admin_app  # noqa: PLC0415  # few need it

            self._admin = admin_app(self.settings, self.link, self.admit)
        return self._admin

    def _has_pages(self, request: Request) -> bool:
        return request.head.for_pages or self.options.pages_address is None

    def page_for(self, request: Request) -> str | None:
        """Return the path of the page that is asked for; None for what the router is asked."""
        path = self._below(request.head)
        pages = self._pages if self._has_pages(request) else HEALTH
        return path.decode() if path in pages else None

    async def on_request(self, req: falcon.asgi.Request, _resp: object) -> None:
        """Make the query, once as much of the body is here as goes with it."""
        request: Request = req.scope[REQUEST_KEY]
        if request.head.for_pages or self._below(request.head) in self._pages:
            raise RouteNotFoundError  # pages and requests have places of their own
        if request.head.path == "*":  # OPTIONS, to see whether the server is there
            request.reply = Reply(204, [], b"")
            return
        body, begun, follows = request.body, request.content, ""
        if body is not None:
            begun = await body.begin()
            follows = "" if body.is_complete else BODY
        number, most_s = self.link.next_id(), self.options.request_timeout_s
        request.query = query_for(request, number, most_s, begun, follows=follows)


class Router(CompiledRouter):
    """Falcon's router: our own pages by their paths, and :meth:`Front.on_request` for all else."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self._front = front
        self._else: Any = front, defaultdict(lambda: front.on_request), {}, None

    def find(self, uri: str, req: Any = None) -> Any:
        """Return what answers a request; raises for one that goes no further."""
        request: Request = req.scope[REQUEST_KEY]
        self._front.admit(request.head)
        page = self._front.page_for(request)
        return self._else if page is None else super().find(page, req)


def _falcon_app(front: Front, pages: Mapping[str, object]) -> falcon.asgi.App[Any, Any]:
    app: falcon.asgi.App[Any, Any] = falcon.asgi.App(router=Router(front))
    app.resp_options.default_media_type = None  # type: ignore[assignment]  # add no header
    for path, page in pages.items():
        app.add_route(path, page)
    app.set_error_serializer(_serialize)
    app.add_error_handler(Exception, _raise)
    return app


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


async def _raise(_req: object, _resp: object, error: Exception, _: dict[str, Any]) -> None:
    raise error


def _serialize(req: Any, resp: falcon.Response, error: falcon.HTTPError) -> None:
    """Give Falcon's own errors, such as 405 on a page, the form of ours."""
    text = error.description or error.title or str(error.status)
    request: Request = req.scope[REQUEST_KEY]
    reply = error_reply(error.status_code, "InvalidRequestError", text, request)
    assert isinstance(reply.body, bytes)
    resp.data = reply.body
    resp.content_type = reply.headers[0][1].decode()


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


# --- Our own pages --------------------------------------------------------------------------------


class Page:
    """A page under ``/-/``: its content type, and a function that makes its content.

    The function gets the value of ``field``, the only one that the query may have, or "".
    """

    def __init__(
        self, content_type: str, make: Callable[[str], Awaitable[bytes]], field: str = ""
    ) -> None:
        self._content_type = content_type
        self._make = make
        self._field = field

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        """Answer with the content."""
        fields = req.scope[REQUEST_KEY].fields()
        value = fields.pop(self._field, "")
        if self._field and fields:
            given = ", ".join(f"{name}={value!r}" for name, value in fields.items())[:200]
            raise InvalidRequestError(f"{given}: expected {self._field}=... alone, or nothing")
        resp.data = await self._make(value)
        resp.content_type = self._content_type

    on_head = on_get


def _pages(link: Link) -> dict[str, Page]:
    # Anybody may ask for the metrics, and each scrape costs the router some milliseconds. So there
    # is one at a time, and its text is kept for KEPT_S.
    own = Kept(lambda: link.metrics(whole=False))
    whole = Kept(lambda: link.metrics(whole=True))

    async def health(_: str) -> bytes:
        """Say whether this worker can take queries."""
        if not link.ready:
            raise NotRunningError(_UNHEALTHY)
        return b"success"

    async def readiness(application: str) -> bytes:
        """Say whether every application that was RUNNING once can serve; or whether one can."""
        lacking = await _within_patience(link.lacking())
        if lacking is None or not link.ready:
            raise NotRunningError(_UNHEALTHY)
        if missing := _missing(lacking, application):
            raise NotRunningError(f"cannot serve: {missing}")
        return b"ready"

    async def routes(_: str) -> bytes:
        return json.dumps(await _within_patience(link.routes())).encode()

    async def metrics(host: str) -> bytes:
        """Return Prometheus' text: of all hosts, or of this one with ``?host=self``."""
        if host not in {"", "self"}:
            raise InvalidRequestError(f"host={host!r}: must be 'self', or left out for all")
        return await _within_patience((own if host else whole).get(KEPT_S))

    text = "text/plain; charset=utf-8"
    return {
        "/-/healthz": Page(text, health),
        "/-/readyz": Page(text, readiness, "application"),
        "/-/routes": Page("application/json", routes),
        "/-/metrics": Page(CONTENT_TYPE, metrics, "host"),
    }


async def _within_patience(question: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(question, PAGE_TIMEOUT_S)
    except TimeoutError:
        raise NotRunningError(f"the router did not answer within {PAGE_TIMEOUT_S:g} s") from None


def _missing(lacking: Mapping[str, Mapping[str, tuple[str, bool]] | None], application: str) -> str:
    """Name the applications, and the endpoints that belong to none, with what they lack, and why.

    "" for nothing. What has never run counts only where one application is asked for.
    """
    if application:
        lacking = {n: of for n, of in lacking.items() if n.partition("#")[0] == application}
        if not lacking:
            raise NotRunningError(f"there is no application {application!r}")
    owners: dict[str, list[str]] = {}
    for endpoint, backends in lacking.items():
        names = [
            (tag.partition("#")[2].partition("#")[0] or tag) + (f": {reason}" if reason else "")
            for tag, (reason, has_run) in (backends or {}).items()
            if application or has_run
        ]
        if names or backends is None:
            of, has_one, _ = endpoint.partition("#")
            owner = f"application {of!r}" if has_one else f"endpoint {endpoint!r}"
            owners.setdefault(owner, []).extend(names)
    return "; ".join(
        f"{owner} ({'no replica of ' + ', '.join(names) if names else 'its record is damaged'})"
        for owner, names in owners.items()
    )
