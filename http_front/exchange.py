"""One HTTP request on its way through a worker: what is known of it, and the query made of it.

The life of a request is the same on every way through the worker:

1. :meth:`Exchanges.begin` gives it an id and counts it;
2. ``admission.refusal`` may refuse it (:mod:`.app`);
3. :func:`query_for` makes the query that the router gets, through :mod:`.link`;
4. ``reply_to`` turns the answer into a :class:`Reply` (:mod:`.responses`);
5. :meth:`Exchange.completed` adds the headers that every response has;
6. :meth:`Exchange.end` releases what it holds and writes its line in the access log.

Falcon takes these steps for most requests (:mod:`.app`), callbacks for the plain ones
(:mod:`.short_way`), and :mod:`.websocket` for WebSockets.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter, time
from typing import Any, NamedTuple
from urllib.parse import unquote

from greenroom.actors.messages.queries import Query, beside
from greenroom.actors.runtime import tracing
from greenroom.core.errors import InvalidRequestError
from greenroom.core.metrics import Family, Group
from greenroom.core.validation import HOOKS
from greenroom.http_front.access_log import AccessLog, Entry

Scope = dict[str, Any]
Event = dict[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

EXCHANGE_KEY = "greenroom.exchange"  # in a scope: its Exchange
PAGES_KEY = "greenroom.pages"  # in the scope of what came in where only our own pages are
VISIT_KEY = "greenroom.visit"  # in the scope of what is in Falcon: its Visit
CLOSE = (b"connection", b"close")
CLIENT_LEFT = 499
MODEL_HEADER = b"serve_multiplexed_model_id"  # Ray Serve's name
CALL_METHOD_HEADER = b"x-serve-call-method"

_is_acceptable_id = re.compile(rb"[\x20-\x7e]{1,200}").fullmatch


class Reply(NamedTuple):
    """A response that is ready to leave: its headers are checked and have the body's length.

    A body in parts is an async iterator; it may be sent once.
    """

    status: int
    headers: Headers
    body: bytes | AsyncIterator[bytes | memoryview]


class Exchanges:
    """The requests that one worker is answering; make it after the fork."""

    def __init__(self, root_path: str, access_log: AccessLog) -> None:
        self.root_path = root_path
        self.access_log = access_log
        self.in_flight = 0
        self.ended: Counter[int] = Counter()  # requests by the status of their response
        self.is_leaving = False  # responses ask clients to close their connections
        # A random prefix and a count: a uuid4 would cost more than reading the headers.
        self._prefix = os.urandom(8).hex()
        self._counter = itertools.count(1)

    def begin(self, scope: Scope) -> Exchange:
        """Return the exchange of a new request."""
        exchange = Exchange(self, scope)
        if tracing.active is not None and not exchange.path.startswith("/-/"):
            exchange.span = tracing.active.request(scope, exchange.request_id)
        self.in_flight += 1
        return exchange

    def metrics(self) -> list[Group]:
        """Return what was counted, for a scrape of this host."""
        ended = Family(
            "greenroom_http_responses_total",
            "counter",
            "Requests that ended, by the response's status; 499 where the client left before it",
            ("status",),
            (),
            {(str(status),): count for status, count in self.ended.items()},
        )
        ongoing = Family(
            "greenroom_http_ongoing_requests",
            "gauge",
            "Requests that are being answered",
            (),
            (),
            {(): self.in_flight},
        )
        return [({"pid": str(os.getpid())}, [ended, ongoing])]

    def request_id(self, offered: bytes | None) -> str:
        """Return ``offered`` if it is printable ASCII of at most 200 characters, else a new id."""
        if offered is not None and _is_acceptable_id(offered):
            return offered.decode("ascii")
        return f"{self._prefix}{next(self._counter):08x}"


class Exchange:
    """One request, and the state of its response.

    ``path`` is the one to route by. ``full_path`` and ``raw_path`` include the root path, whether
    or not the proxy in front of us took it off. The target's absolute form is reduced to its path.
    """

    __slots__ = (
        "_exchanges",
        "body",
        "bytes_out",
        "full_path",
        "head",
        "method",
        "path",
        "raw_path",
        "request_id",
        "scope",
        "span",
        "started_at",
        "status",
    )

    def __init__(self, exchanges: Exchanges, scope: Scope, request_id: str | None = None) -> None:
        self.started_at = perf_counter()
        self.span: tracing.Span | None = None  # where this worker traces
        self._exchanges = exchanges
        self.scope = scope
        self.head: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = request_id or exchanges.request_id(self.head.get(b"x-request-id"))
        self.method: str = scope.get("method", "GET")  # a WebSocket's scope has none
        self.path = self.full_path = scope["path"]
        self.raw_path: bytes = scope["raw_path"]
        if exchanges.root_path or self.path[:1] != "/":
            self._resolve_target(exchanges.root_path)
        self.body = b""  # what goes with the query
        self.status = 0  # until the response has begun
        self.bytes_out = 0

    def _resolve_target(self, root_path: str) -> None:
        path, raw_path = self.path, self.raw_path
        if path[:1] != "/" and "://" in path:
            raw_path = b"/" + raw_path.partition(b"://")[2].partition(b"/")[2]
            path = unquote(raw_path.decode("latin-1"))
        self.full_path, self.path, self.raw_path = path, path, raw_path
        if not root_path:
            return
        if path == root_path or path.startswith(root_path + "/"):
            self.path = path[len(root_path) :] or "/"
        else:
            self.full_path = root_path + path
            self.raw_path = root_path.encode() + raw_path

    @property
    def root_path(self) -> str:
        """The prefix of ``full_path`` that is not routed by."""
        return self._exchanges.root_path

    def passed_on(self, scope: Scope) -> Exchange:
        """Return the exchange of this request as middlewares have passed it on."""
        if scope is self.scope:
            return self
        passed_on = Exchange(self._exchanges, scope, self.request_id)
        passed_on.span = self.span
        return passed_on

    def identified(self, headers: Headers) -> Headers:
        """Add the request id."""
        headers.append((b"x-request-id", self.request_id.encode("ascii")))
        return headers

    def completed(self, headers: Headers) -> Headers:
        """Add the headers that every response has."""
        self.identified(headers)
        if self._exchanges.is_leaving and CLOSE not in headers:
            headers.append(CLOSE)
        return headers

    def end(self) -> None:
        """Count and log the request, which was answered or whose client has left."""
        self._exchanges.in_flight -= 1
        self._exchanges.ended[self.status] += 1
        self._exchanges.access_log.add(
            Entry(
                time(),
                self.request_id,
                self.method,
                self.scope["path"],
                self.status,
                perf_counter() - self.started_at,
                self.bytes_out,
                self.scope["client"],
                "" if self.span is None else self.span.trace_id,
            )
        )
        if self.span is not None:
            self.span.ended(self.status)


# --- The query ------------------------------------------------------------------------------------


def query_for(exchange: Exchange, number: int, most_s: float | None, *, follows: str = "") -> Query:
    """Return the query for a request, which takes ``most_s`` at most.

    InvalidRequestError names a header that cannot be read, and its value.
    """
    head = exchange.head
    timeout = head.get(b"x-request-timeout-seconds")
    shard_key = head.get(b"x-serve-shard-key")
    model_id = head.get(MODEL_HEADER)
    return Query(
        number,
        None,
        exchange.path,
        exchange.method,
        _call_method(exchange) if CALL_METHOD_HEADER in head else "",
        beside(pickle.dumps(_http_call(exchange), 5)),
        exchange.request_id,
        most_s if timeout is None else _timeout(timeout, most_s),
        None,
        None if shard_key is None else _text(shard_key),
        multiplexed_model_id="" if model_id is None else _text(model_id),
        follows=follows,
    )


def _http_call(exchange: Exchange) -> tuple[Any, ...]:
    """Return the fields of an HttpCall, the request as user code will see it.

    Headers with underscores are left out: where CGI's names are in use, in a WSGI app of the user's
    for one, X_Forwarded_For would pass for X-Forwarded-For.
    """
    scope, trace = exchange.scope, None
    if exchange.span is not None:
        trace = exchange.span.carried()
    return (
        exchange.method,
        exchange.full_path,
        exchange.raw_path,
        scope["query_string"],
        tuple(
            [each for each in scope["headers"] if b"_" not in each[0] or each[0] == MODEL_HEADER]
        ),
        exchange.body,
        scope["scheme"],
        scope["http_version"],
        scope["client"],
        scope["server"],
        exchange.root_path,
        trace,
    )


def _timeout(value: bytes, most_s: float | None) -> float | None:
    """Return the time limit of a request: its own, within ours; ours for 0 and for nonsense.

    As with Ray Serve, 0 asks for no limit; but what the operator allows at most, no client raises.
    """
    try:
        seconds = float(value)
    except ValueError:
        return most_s
    if not 0 < seconds < math.inf:
        return most_s
    return seconds if most_s is None else min(seconds, most_s)


def _call_method(exchange: Exchange) -> str:
    values = [value for name, value in exchange.scope["headers"] if name == CALL_METHOD_HEADER]
    if len(values) > 1:  # a proxy in front of us may have checked another one of them
        raise InvalidRequestError(
            f"header X-Serve-Call-Method: given {len(values)} times; name one method, once"
        )
    name = _text(values[0])
    if name == "__call__":
        return name
    # A client must not reach what a class keeps to itself, __init__ above all, nor the hooks that
    # the controller calls.
    if not name.isidentifier() or name.startswith("_") or name in HOOKS:
        raise _bad_header("X-Serve-Call-Method", values[0], "the name of a public method")
    return name


def _text(value: bytes) -> str:
    """Decode UTF-8, so that a key equals the one that a handle gives, else Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _bad_header(name: str, value: bytes, expected: str) -> InvalidRequestError:
    shown = value[:100].decode("latin-1")
    return InvalidRequestError(f"header {name}: {shown!r} is not {expected}")
