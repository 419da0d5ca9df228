"""One HTTP worker's application: Falcon, and around it what holds for every request.

From the outside in, a request passes :class:`Front`, which gives it an id, logs it and answers what
nothing inside has answered; the middlewares, where the settings name any (:mod:`.middlewares`); and
one Falcon app, which has our own pages under ``/-/`` and a sink that asks the router for all else.
The admin API is another Falcon app (:mod:`.admin`), made when the first request to it comes.
WebSockets leave this way before Falcon (:mod:`.websocket`), because Falcon would read ahead of user
code. Plain requests go past all of it, with the same bytes as the result (:mod:`.short_way`).

A worker serves, and then drains, from SIGTERM on: what is in flight goes on, everything new is
answered 503. A worker whose master has died leaves without draining: it serves the connections that
it has, and asks each client to come back on a new one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import parse_qs

import falcon.asgi

from greenroom.actors.caller.streams import StreamFailedError
from greenroom.actors.runtime import tracing
from greenroom.actors.runtime.logs import ACCESS_LOG
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.runtime.shared_metrics import SharedMetrics
from greenroom.core.errors import (
    BodyIncompleteError,
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
from greenroom.http_front.bodies import EARLY, WHOLE, Body
from greenroom.http_front.connections import ClientCounts
from greenroom.http_front.exchange import (
    CLIENT_LEFT,
    CLOSE,
    EXCHANGE_KEY,
    PAGES_KEY,
    VISIT_KEY,
    App,
    Event,
    Exchange,
    Exchanges,
    Headers,
    Receive,
    Reply,
    Scope,
    Send,
    query_for,
)
from greenroom.http_front.link import Link
from greenroom.http_front.responses import (
    end_body,
    error_reply,
    error_reply_for,
    reply_to,
    unexpected,
)

_logger = logging.getLogger(__name__)

RESERVED = "/-/"  # below it is nothing of users'
DASHBOARD = "/-/dashboard"
ADMIN = "/-/api/"  # where the admin API is beside requests
OWN_ADMIN = "/api/"  # and at a place of its own, as Ray Serve has it
HEALTH = ("/-/healthz", "/-/readyz")  # answered wherever requests are, and past the middlewares
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
        self.access_log = AccessLog(
            settings.logs_dir / ACCESS_LOG,
            max_bytes=settings.log_max_bytes,
            files=settings.log_files,
        )
        root_path = options.root_path.rstrip("/")
        self.exchanges = Exchanges(root_path, self.access_log)
        self.conversations = websocket.Conversations(link, options.request_timeout_s)
        self._shown = SharedMetrics(self.exchanges.metrics)
        self._is_draining = False
        self._shares_origin = options.has_admin and options.pages_address is None
        self._early_bodies = ClientCounts(EARLY)
        pages = _pages(link)
        self._falcon = self._falcon_app(pages)
        self._admin: falcon.asgi.App[Any, Any] | None = None  # until it is asked for
        self._admin_prefix = (root_path + ADMIN).encode()
        self._dashboard = (root_path + DASHBOARD).encode()
        self._own_admin_prefix = (root_path + OWN_ADMIN).encode()
        # A page has one spelling, below the root path: a proxy in front of us that was told to keep
        # it to itself knows it by these bytes.
        self._pages = {(root_path + path).encode(): path for path in pages}
        self._health = {raw: path for raw, path in self._pages.items() if path in HEALTH}
        self._long_ways = ((root_path + RESERVED).encode(), RESERVED.encode())
        self._app: App = self._answer
        self.add_cors: Callable[[Scope, Headers], Headers] | None = None  # on the short way
        if options.middlewares or options.cors:
            from greenroom.http_front import middlewares  # noqa: PLC0415  # few need it

            self._app = middlewares.around(self._answer, options)
            if options.cors is not None:
                self.add_cors = middlewares.CorsHeaders(options.cors).added

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or a WebSocket from its opening to its end."""
        exchange: Exchange = scope.get(EXCHANGE_KEY) or self.exchanges.begin(scope)
        scope[EXCHANGE_KEY] = exchange
        try:
            # No middleware stands before pages at a place of their own, which is for operators
            # alone, nor before health: one that wants a password would keep the system from
            # starting.
            is_inside = PAGES_KEY in scope or exchange.raw_path in self._health
            app = self._answer if is_inside else self._app
            if scope["type"] == "websocket":
                await websocket.guarded(app, exchange, receive, send)
            else:
                await guarded(exchange, send, partial(app, scope, receive))
        finally:
            exchange.end()

    def is_plain(self, scope: Scope, body: bytes) -> bool:
        """Return whether a request whose body is here needs nothing but the router's answer."""
        limit = self.options.max_body_bytes
        raw_path = scope["raw_path"]
        is_small = limit is None or len(body) <= limit
        if self.options.cors is not None and scope["method"] == "OPTIONS":
            return False  # it may be a preflight
        return is_small and raw_path[:1] == b"/" and not raw_path.startswith(self._long_ways)

    def admit(self, exchange: Exchange) -> None:
        """Raise a GreenroomError for a request that goes no further."""
        if self._is_draining:
            raise NotRunningError("this server is stopping")
        if self._shares_origin and exchange.head.get(b"service-worker") == b"script":
            raise ForbiddenError(_NO_SERVICE_WORKER)
        check_target(exchange, empty_segments=self.options.empty_path_segments)

    def drain(self) -> None:
        """Take no new requests from now on."""
        self._is_draining = True
        self.leave()

    def leave(self) -> None:
        """Ask clients to close their connections from now on."""
        self.exchanges.is_leaving = True

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
        exchange = scope[EXCHANGE_KEY].passed_on(scope)
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
            try:
                self.admit(exchange)
                if PAGES_KEY in scope:
                    raise RouteNotFoundError
                await self.conversations.serve(exchange, receive, send)
            except GreenroomError as error:
                await websocket.refuse(error_reply_for(error, exchange), exchange, send)
            return
        are_pages_here = PAGES_KEY in scope or self.options.pages_address is None
        visit = Visit(exchange, receive, send, self.options.max_body_bytes, self._early_bodies)
        try:
            # Falcon reads that of a page, and would fail to decode one that is not ASCII.
            query = scope["query_string"]
            falcon_app, path = self._app_for(exchange, are_pages_here=are_pages_here)
            has_query = path != "/" and query.isascii()
            inner = {**scope, "path": path, VISIT_KEY: visit}
            inner["query_string"] = query if has_query else b""
            await falcon_app(inner, _no_body, visit.send)
        finally:
            end_body(visit.reply)
            await visit.end()

    def _app_for(
        self, exchange: Exchange, *, are_pages_here: bool
    ) -> tuple[falcon.asgi.App[Any, Any], str]:
        """Return the Falcon app that a request is for, and the path that it knows it by."""
        raw_path = exchange.raw_path
        if are_pages_here and self.options.has_admin:
            if raw_path == self._dashboard or raw_path.startswith(self._admin_prefix):
                return self._admin_app(), exchange.path.removeprefix("/-")
            if PAGES_KEY in exchange.scope and raw_path.startswith(self._own_admin_prefix):
                return self._admin_app(), exchange.path
        pages = self._pages if are_pages_here else self._health
        return self._falcon, pages.get(raw_path, "/")

    def _admin_app(self) -> falcon.asgi.App[Any, Any]:
        if self._admin is None:
            from greenroom.http_front.admin.api import admin_app  # noqa: PLC0415  # few need it

            self._admin = admin_app(self.settings, self.link)
            self._admin.add_middleware(self)
        return self._admin

    def _falcon_app(self, pages: Mapping[str, object]) -> falcon.asgi.App[Any, Any]:
        app: falcon.asgi.App[Any, Any] = falcon.asgi.App(middleware=[self])
        app.resp_options.default_media_type = None  # type: ignore[assignment]  # add no header
        for path, page in pages.items():
            app.add_route(path, page)
        app.add_sink(self._ask_router, "/")  # type: ignore[arg-type]  # resp may be None, it says
        app.set_error_serializer(_serialize)
        app.add_error_handler(GreenroomError, _answer_our_error)
        app.add_error_handler(Exception, _answer_unexpected)
        return app

    async def process_request(self, req: falcon.asgi.Request, _: falcon.asgi.Response) -> None:
        """Refuse what goes no further; Falcon calls this first."""
        self.admit(_visit(req).exchange)

    async def _ask_router(
        self, req: falcon.asgi.Request, resp: falcon.asgi.Response, **_: Any
    ) -> None:
        """Send the query to a replica; cancelling this cancels the query."""
        visit = _visit(req)
        exchange = visit.exchange
        if PAGES_KEY in exchange.scope or exchange.raw_path in self._pages:
            raise RouteNotFoundError  # pages and requests have places of their own
        if exchange.path == "*":  # OPTIONS, to see whether the server is there
            visit.respond(resp, Reply(204, [], b""))
            return
        follows: str = ""
        on_fed: Callable[[Any], None] | None = None
        if visit.has_body:
            exchange.body = await visit.begin_body()
            body = visit.body
            if body is not None and not body.is_complete:
                follows, on_fed = BODY, body.send_to
        number, most_s = self.link.next_id(), self.options.request_timeout_s
        query = query_for(exchange, number, most_s, follows=follows)
        exchange.body = b""  # the query has it
        answer = await self.link.ask(query, on_fed)
        visit.respond(resp, reply_to(answer, exchange))


async def _no_body() -> Event:
    return _EMPTY_BODY


@dataclass(slots=True)
class Visit:
    """A request while it is in Falcon, which reads its body by ``receive``."""

    exchange: Exchange
    receive: Receive
    send_on: Send
    max_body_bytes: int | None
    early_bodies: ClientCounts
    is_early: bool = False  # it is among early_bodies
    body: Body | None = None
    reply: Reply | None = None  # that Falcon sends

    @property
    def has_body(self) -> bool:
        """Whether the client has announced a body."""
        head = self.exchange.head
        return b"content-length" in head or b"transfer-encoding" in head

    @property
    def _host(self) -> str | None:
        peer = self.exchange.scope["client"]
        return peer[0] if peer else None

    async def begin_body(self) -> bytes:
        """Return the body, or what of it goes with the query; see :meth:`Body.begin`."""
        head = self.exchange.head
        declared = head.get(b"content-length")
        self.body = Body(self.receive, declared, self.max_body_bytes)
        waits = head.get(b"expect", b"").lower() == b"100-continue"
        if (waits or declared is None) and self.early_bodies.has_room_for(self._host):
            self.is_early = True
            self.early_bodies.add(self._host)
        begun = await self.body.begin(waits=waits, early=self.is_early)
        if self.body.is_complete or len(begun) >= WHOLE:
            self._leave_early()
        return begun

    def _leave_early(self) -> None:
        if self.is_early:
            self.is_early = False
            self.early_bodies.remove(self._host)

    async def end(self) -> None:
        """Want no more of the body."""
        self._leave_early()
        if self.body is not None:
            await self.body.end()

    async def whole_body(self, max_bytes: int) -> bytes:
        """Return all of the body, for a resource of ours that takes ``max_bytes``."""
        if not self.has_body:
            return b""
        if self.max_body_bytes is None or self.max_body_bytes > max_bytes:
            self.max_body_bytes = max_bytes
        begun = await self.begin_body()
        return begun + await self.body.rest() if self.body is not None else begun

    def respond(self, resp: falcon.asgi.Response, reply: Reply) -> None:
        """Make ``reply`` the response."""
        self.reply = reply
        resp.status = reply.status
        if isinstance(reply.body, bytes):
            resp.data = reply.body
        else:
            resp.stream = reply.body  # type: ignore[assignment]  # Falcon only passes parts on

    async def send(self, event: Event) -> None:
        """Send an event of Falcon's; a reply's headers go past it, for it would merge some."""
        if self.reply is not None and event["type"] == "http.response.start":
            headers = self.reply.headers
            if self.body is not None and not self.body.is_complete:
                headers.append(CLOSE)  # the client would have to send the rest first
            event = {**event, "headers": headers}
        await self.send_on(event)


def _visit(req: falcon.Request | falcon.asgi.Request) -> Visit:
    visit: Visit = req.scope[VISIT_KEY]  # type: ignore[union-attr]  # it is the asgi one
    return visit


async def _answer_our_error(
    req: falcon.asgi.Request, resp: falcon.asgi.Response, error: GreenroomError, _: dict[str, Any]
) -> None:
    visit = _visit(req)
    visit.respond(resp, error_reply_for(error, visit.exchange))


async def _answer_unexpected(
    req: falcon.asgi.Request, resp: falcon.asgi.Response, error: Exception, _: dict[str, Any]
) -> None:
    visit = _visit(req)
    visit.respond(resp, unexpected(error, visit.exchange))


def _serialize(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError) -> None:
    """Give Falcon's own errors, such as 405 on a page, the form of ours."""
    text = error.description or error.title or str(error.status)
    exchange = _visit(req).exchange
    reply = error_reply(error.status_code, "InvalidRequestError", text, exchange)
    assert isinstance(reply.body, bytes)
    resp.data = reply.body
    resp.content_type = reply.headers[0][1].decode()


# --- Responses as ASGI events ---------------------------------------------------------------------


async def guarded(exchange: Exchange, send: Send, serve: Callable[[Send], Awaitable[None]]) -> None:
    """Call ``serve``, and add to its events the headers of every response.

    What fails before the response has begun is answered with 500. Later it is raised, and the
    protocol cuts the connection, so that the client knows.
    """

    async def counted(event: Event) -> None:
        if event["type"] == "http.response.start":
            exchange.status = event["status"]
            event = {**event, "headers": exchange.completed(list(event["headers"]))}
        else:
            exchange.bytes_out += len(event.get("body", b""))
        await send(event)

    try:
        await serve(counted)
    except asyncio.CancelledError:
        exchange.status = CLIENT_LEFT
        raise
    except StreamFailedError as error:
        _logger.warning("request %s was cut off: %s", exchange.request_id, error)
        raise
    except Exception as error:
        if isinstance(error, BodyIncompleteError):  # a middleware has read a body, slowly
            reply = error_reply_for(error, exchange)
        else:
            reply = unexpected(error, exchange)
        if exchange.status:
            raise
        await send_reply(reply, counted)


async def send_reply(reply: Reply, send: Send) -> None:
    """Send a response; each part leaves when the client has taken those before it."""
    start = {"type": "http.response.start", "status": reply.status, "headers": reply.headers}
    await send(start)
    if isinstance(reply.body, bytes):
        await send({"type": "http.response.body", "body": reply.body})
        return
    async for part in reply.body:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


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


def check_target(exchange: Exchange, *, empty_segments: bool) -> None:
    """Raise InvalidRequestError for a Host or target that servers may read in several ways."""
    scope, host = exchange.scope, exchange.head.get(b"host")
    if host is None:
        if scope["http_version"] == "1.1":
            raise InvalidRequestError("the Host header is missing, which HTTP/1.1 requires")
    elif not _is_host(host):
        shown = host[:100].decode("latin-1")
        raise InvalidRequestError(f"the Host header {shown!r} is no name or address with a port")
    if scope["path"][:1] != "/":
        _check_odd_target(scope["raw_path"].decode("latin-1"), exchange.method, host)
    path = exchange.full_path
    if "/." in path and _dot_segment(path):
        text = f"the path {path[:100]!r} has a segment . or .., which servers resolve differently"
        raise InvalidRequestError(text)
    if "//" in path and not empty_segments:
        text = f"the path {path[:100]!r} has an empty segment (//), which some servers leave out"
        raise InvalidRequestError(text)


@lru_cache(maxsize=1024)
def _is_host(host: bytes) -> bool:
    return _is_authority(host) is not None


def _check_odd_target(target: str, method: str, host: bytes | None) -> None:
    if target == "*" and method == "OPTIONS":
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

    The function gets the query's parameters.
    """

    def __init__(
        self, content_type: str, make: Callable[[Mapping[str, object]], Awaitable[bytes]]
    ) -> None:
        self._content_type = content_type
        self._make = make

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        """Answer with the content."""
        resp.data = await self._make(req.params)
        resp.content_type = self._content_type

    on_head = on_get


class MetricsPage:
    """Prometheus' page: of all hosts, or of this one with ``?host=self``.

    Anybody may ask for it, and each scrape costs the router some milliseconds. So there is one at a
    time, and its text is kept for KEPT_S.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._kept: dict[bool, tuple[float, bytes]] = {}  # by whether it is of all hosts
        self._scraping: dict[bool, asyncio.Future[bytes]] = {}

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        """Answer with the metrics; HTTP 400 for another host's name."""
        query = _visit(req).exchange.scope["query_string"].decode("latin-1")
        hosts = parse_qs(query, keep_blank_values=True).get("host", [])
        if hosts not in ([], ["self"]):
            raise InvalidRequestError(f"host={hosts[-1]!r}: must be 'self', or left out for all")
        resp.data = await _within_patience(self._text(whole=not hosts))
        resp.content_type = CONTENT_TYPE

    async def _text(self, *, whole: bool) -> bytes:
        kept_at, text = self._kept.get(whole, (0.0, b""))
        if text and monotonic() - kept_at < KEPT_S:
            return text
        scraping = self._scraping.get(whole)
        if scraping is None:
            scraping = self._scraping[whole] = asyncio.ensure_future(self._scrape(whole=whole))
        return await asyncio.shield(scraping)  # another request may wait for it, too

    async def _scrape(self, *, whole: bool) -> bytes:
        try:
            text = await self._link.metrics(whole=whole)
            self._kept[whole] = monotonic(), text
            return text
        finally:
            del self._scraping[whole]

    on_head = on_get


def _pages(link: Link) -> dict[str, Page | MetricsPage]:
    async def health(_: object) -> bytes:
        """Say whether this worker can take queries."""
        if not link.ready:
            raise NotRunningError(_UNHEALTHY)
        return b"success"

    async def readiness(parameters: Mapping[str, object]) -> bytes:
        """Say whether every application that was RUNNING once can serve; or whether one can."""
        application = _application_in(parameters)
        asked = _lacking_of(link, application) if application else link.unready()
        unready = await _within_patience(asked)
        if unready is None or not link.ready:
            raise NotRunningError(_UNHEALTHY)
        if unready:
            raise NotRunningError(_missing(unready))
        return b"ready"

    async def routes(_: object) -> bytes:
        return json.dumps(await _within_patience(link.routes())).encode()

    text = "text/plain; charset=utf-8"
    return {
        "/-/healthz": Page(text, health),
        "/-/readyz": Page(text, readiness),
        "/-/routes": Page("application/json", routes),
        "/-/metrics": MetricsPage(link),
    }


def _application_in(parameters: Mapping[str, object]) -> str:
    """Return the application that is asked for, "" for all; InvalidRequestError for another key."""
    for name, value in parameters.items():
        if name != "application" or not isinstance(value, str):
            told = f"{name}={value!r}"[:200]
            raise InvalidRequestError(f"{told}: must be one application=NAME, or left out for all")
    return str(parameters.get("application", ""))


async def _lacking_of(link: Link, application: str) -> Mapping[str, Iterable[str]] | None:
    """Return what an application lacks, as :meth:`Link.unready` does, also where it is new."""
    lacking = await link.lacking()
    if lacking is None:
        return None
    found = {name: tags for name, tags in lacking.items() if name.partition("#")[0] == application}
    if not found:
        raise NotRunningError(f"there is no application {application!r}")
    return {name: why or () for name, why in found.items() if why is None or why}


async def _within_patience(question: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(question, PAGE_TIMEOUT_S)
    except TimeoutError:
        raise NotRunningError(f"the router did not answer within {PAGE_TIMEOUT_S:g} s") from None


def _missing(unready: Mapping[str, Iterable[str]]) -> str:
    """Name the applications, and the endpoints that belong to none, with what they lack.

    The backends are by endpoint, and may be told with the reason.
    """
    lacking: dict[str, list[str]] = {}
    for endpoint, backends in unready.items():
        application, has_one, _ = endpoint.partition("#")
        owner = f"application {application!r}" if has_one else f"endpoint {endpoint!r}"
        reasons = backends if isinstance(backends, Mapping) else dict.fromkeys(backends, "")
        names = [
            (tag.partition("#")[2].partition("#")[0] or tag) + (f": {reason}" if reason else "")
            for tag, reason in reasons.items()
        ]
        lacking.setdefault(owner, []).extend(names)
    each = [
        f"{owner} ({'no replica of ' + ', '.join(names) if names else 'its record is damaged'})"
        for owner, names in lacking.items()
    ]
    return f"cannot serve: {'; '.join(each)}"
