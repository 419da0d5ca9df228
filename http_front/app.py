"""The HTTP front's own pages under ``/-/``, which Falcon serves.

:func:`make_app` is the factory that a worker calls; it works under any ASGI server. Queries do not
go through Falcon: it added a tenth to what a request costs the worker, for a route that matches
everything (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import falcon
import falcon.asgi

from greenroom.actors.messages.queries import FailedAnswer
from greenroom.actors.runtime.logs import ACCESS_LOG
from greenroom.core.errors import GreenroomError, NotRunningError
from greenroom.http_front.access_log import AccessLog
from greenroom.http_front.answers import error_reply, failed_reply, failure_of, unexpected
from greenroom.http_front.asking import Asker
from greenroom.http_front.dispatcher import Dispatcher
from greenroom.http_front.exchange import SCOPE_KEY, Exchange, Reply
from greenroom.http_front.front import Front, Pages

if TYPE_CHECKING:
    from greenroom.actors.runtime.settings import HostSettings

PAGE_TIMEOUT_S = 5.0
_UNHEALTHY = "this server has no route table yet, or cannot reach its router"

T = TypeVar("T")


def make_app(settings: HostSettings, dispatcher: Dispatcher) -> Front:
    """Make one worker's ASGI app; its lifespan starts and stops ``dispatcher``."""
    return Front(
        settings.http,
        dispatcher,
        Asker(settings.http.request_timeout_s, dispatcher),
        make_pages(dispatcher),
        AccessLog(
            settings.logs_dir / ACCESS_LOG,
            max_bytes=settings.log_max_bytes,
            files=settings.log_files,
        ),
    )


def make_pages(dispatcher: Dispatcher) -> Pages:
    """Make the Falcon app, which expects an Exchange in each scope."""
    app: falcon.asgi.App[Any, Any] = falcon.asgi.App()
    app.resp_options.default_media_type = None  # type: ignore[assignment]  # None: add no header
    pages = {
        "/-/healthz": HealthPage(dispatcher),
        "/-/readyz": ReadyPage(dispatcher),
        "/-/routes": RoutesPage(dispatcher),
        "/-/metrics": MetricsPage(dispatcher),
    }
    for path, page in pages.items():
        app.add_route(path, page)
    app.set_error_serializer(_serialize)
    app.add_error_handler(GreenroomError, _answer_our_error)
    app.add_error_handler(Exception, _answer_unexpected)
    return Pages(frozenset(pages), app)


def exchange_of(req: falcon.asgi.Request) -> Exchange:
    """Return the exchange that the front put into the scope."""
    exchange: Exchange = req.scope[SCOPE_KEY]
    return exchange


def answer_with(reply: Reply, resp: falcon.asgi.Response, exchange: Exchange) -> None:
    """Make ``reply`` the response; its headers go past Falcon, which would merge some."""
    resp.status = reply.status
    resp.data = bytes(reply.body)
    exchange.reply_headers = reply.headers


class HealthPage:
    """``/-/healthz``: whether this worker can take queries; the front answers while draining."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        """Answer 200 ``success`` or 503."""
        if not self._dispatcher.ready:
            exchange = exchange_of(req)
            failure = FailedAnswer(0, "NotRunningError", _UNHEALTHY, retry_after_s=1)
            answer_with(failed_reply(failure, exchange), resp, exchange)
            return
        resp.content_type = "text/plain; charset=utf-8"
        resp.data = b"success"

    on_head = on_get


class ReadyPage:
    """``/-/readyz``: whether all that was RUNNING once can serve; the front answers if draining."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        """Answer 200 ``ready``, or 503 naming the applications that cannot serve."""
        unready = await _within_patience(self._dispatcher.unready())
        if unready is None or not self._dispatcher.ready:
            raise NotRunningError(_UNHEALTHY)
        if unready:
            raise NotRunningError(_missed(unready))
        resp.content_type = "text/plain; charset=utf-8"
        resp.data = b"ready"

    on_head = on_get


def _missed(unready: Mapping[str, Iterable[str]]) -> str:
    """Name the applications, and those endpoints that belong to none, with what they lack."""
    lacking: dict[str, list[str]] = {}
    for endpoint, backends in unready.items():
        application, has_one, _ = endpoint.partition("#")
        whose = f"application {application!r}" if has_one else f"endpoint {endpoint!r}"
        names = [tag.partition("#")[2].partition("#")[0] or tag for tag in backends]
        lacking.setdefault(whose, []).extend(names)
    each = [
        f"{whose} ({'no replica of ' + ', '.join(names) if names else 'its record is damaged'})"
        for whose, names in lacking.items()
    ]
    return f"cannot serve: {'; '.join(each)}"


class RoutesPage:
    """``/-/routes``: JSON, route prefix -> endpoint."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        """Answer with the router's table."""
        routes = await _within_patience(self._dispatcher.routes())
        resp.content_type = "application/json"
        resp.data = json.dumps(routes).encode()

    on_head = on_get


class MetricsPage:
    """``/-/metrics``: Prometheus text."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def on_get(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        """Answer with the router's metrics."""
        metrics = await _within_patience(self._dispatcher.metrics())
        resp.content_type = "text/plain; version=0.0.4; charset=utf-8"
        resp.data = metrics

    on_head = on_get


async def _within_patience(question: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(question, PAGE_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise NotRunningError(f"the router did not answer within {PAGE_TIMEOUT_S:g} s") from None


async def _answer_our_error(
    req: falcon.asgi.Request, resp: falcon.asgi.Response, error: GreenroomError, _: dict[str, Any]
) -> None:
    exchange = exchange_of(req)
    answer_with(failed_reply(failure_of(error), exchange), resp, exchange)


async def _answer_unexpected(
    req: falcon.asgi.Request, resp: falcon.asgi.Response, error: Exception, _: dict[str, Any]
) -> None:
    exchange = exchange_of(req)
    answer_with(unexpected(exchange, error), resp, exchange)


def _serialize(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError) -> None:
    """Give Falcon's own errors, such as 405 on a page, the form of ours."""
    exchange: Exchange = req.scope[SCOPE_KEY]  # type: ignore[attr-defined]  # it is the asgi one
    text = error.description or error.title or str(error.status)
    reply = error_reply(error.status_code, "InvalidRequestError", text, exchange)
    resp.data = bytes(reply.body)
    resp.content_type = reply.headers[0][1].decode()
