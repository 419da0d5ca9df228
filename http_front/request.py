"""One HTTP request on its way through a worker, from its head to its query.

The life of a request is the same on every way through the worker:

1. :mod:`.heads` reads it, and :meth:`Head.locate` finds the path to route by;
2. :meth:`Requests.begin` gives it an id and counts it;
3. ``Front.admit`` may refuse it (:mod:`.app`);
4. :func:`query_for` makes the query that the router gets, through :mod:`.link`;
5. ``reply_to`` turns the answer into a :class:`Reply` (:mod:`.responses`);
6. the protocol writes that, with the headers that every response has (:mod:`.protocol`);
7. :meth:`Request.end` counts it, and writes its line in the access log.

Callbacks take these steps for plain requests, Falcon and a task for the others (both in
:mod:`.app`), and :mod:`.websocket` for WebSockets.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from greenroom.actors.messages.queries import Query, packed
from greenroom.actors.runtime import tracing
from greenroom.core.errors import InvalidRequestError
from greenroom.core.metrics import Group, Registry
from greenroom.core.validation import HOOKS
from greenroom.http_front.access_log import AccessLog, Entry
from greenroom.http_front.asgi import Headers, Scope
from greenroom.http_front.bodies import Body
from greenroom.http_front.heads import Head, split

REQUEST_KEY = "greenroom.request"  # in a scope: its Request
CLOSE = (b"connection", b"close")
CLIENT_LEFT = 499
MAX_FIELDS = 50  # of a query to pages of ours, which know a few
MODEL_HEADER = b"serve_multiplexed_model_id"  # Ray Serve's name
CALL_METHOD_HEADER = b"x-serve-call-method"

ASGI = {"version": "3.0", "spec_version": "2.4"}
_is_acceptable_id = re.compile(rb"[\x20-\x7e]{1,200}").fullmatch


class Reply(NamedTuple):
    """A response that is ready to leave: its headers are checked and have the body's length.

    A body in parts is an async iterator; it may be sent once.
    """

    status: int
    headers: Headers
    body: bytes | AsyncIterator[bytes | memoryview]


@dataclass(slots=True, eq=False)
class Request:
    """One request: its head, and what became of it."""

    head: Head
    expects_continue: bool = False  # its client waits to be asked for the body
    requests: Requests | None = None  # while it is one of them
    id: str = ""  # until then
    started_at: float = field(init=False)
    span: tracing.Span | None = None  # where this worker traces
    body: Body | None = None  # while Falcon has the request
    content: bytes = b""  # the same, where all of it is here
    query: Query | None = None  # that Falcon has made of it
    reply: Reply | None = None  # that an app is to send
    is_admin: bool = False  # it is for the admin API
    broken_by: BaseException | None = None  # what has ended its response midway
    is_disconnected: bool = False  # its client has left before the response's end
    status: int = 0  # until the response has begun
    bytes_out: int = 0
    _scope: Scope | None = None

    @property
    def scope(self) -> Scope:
        """The request as ASGI has it, made when it is first asked for."""
        if self._scope is None:
            head = self.head
            self._scope = {
                "type": "websocket" if head.is_socket else "http",
                "asgi": ASGI,
                "http_version": head.http_version,
                "server": head.server,
                "client": head.client,
                "scheme": head.scheme,
                "root_path": "",
                "headers": head.headers,
                "path": head.sent_path,
                "raw_path": split(head.target)[0],
                "query_string": head.query_string,
                REQUEST_KEY: self,
            }
            if head.is_socket:
                self._scope["subprotocols"] = _subprotocols(head)
                self._scope["extensions"] = {"websocket.http.response": {}}
            else:
                self._scope["method"] = head.method
        return self._scope

    @classmethod
    def of(cls, scope: Scope, original: Request) -> Request:
        """Return a request as middlewares have passed it on."""
        head = Head(target=scope["raw_path"], for_pages=original.head.for_pages)
        head.is_socket = scope["type"] == "websocket"
        head.method = scope.get("method", "GET")  # a WebSocket's scope has none
        for name in ("http_version", "server", "client", "scheme", "headers", "query_string"):
            setattr(head, name, scope[name])
        head.named = named = dict(head.headers)
        head.is_chunked = b"transfer-encoding" in named
        if (length := named.get(b"content-length")) is not None:
            head.length = int(length)
        head.place(scope["path"], scope["raw_path"], original.head.root_path)
        request = cls(head, original.expects_continue, id=original.id, span=original.span)
        request._scope = scope
        return request

    async def whole_body(self, max_bytes: int) -> bytes:
        """Return the body; BodyTooLargeError where it has more than ``max_bytes``."""
        return b"" if self.body is None else await self.body.whole(max_bytes)

    def fields(self) -> dict[str, str]:
        """Return the fields of the query; InvalidRequestError for one twice, or too many."""
        text = self.head.query_string.decode("latin-1")
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
        except ValueError:
            message = f"query {text[:200]!r}: give at most {MAX_FIELDS} fields"
            raise InvalidRequestError(message) from None
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise InvalidRequestError(f"query {text[:200]!r}: give each field once")
        return fields

    def begin(self, requests: Requests) -> None:
        """Count it among those that are being answered, and give it its id."""
        self.requests = requests
        self.started_at = perf_counter()
        self.id = requests.new_id(self.head.named.get(b"x-request-id"))
        if tracing.active is not None and not self.head.path.startswith("/-/"):
            self.span = tracing.active.request(self.scope, self.id)
        requests.in_flight += 1

    def end(self) -> None:
        """Count and log it, once; it was answered, or its client has left."""
        requests, self.requests = self.requests, None
        if requests is None:
            return
        requests.in_flight -= 1
        requests.ended[self.status] += 1
        requests.access_log.add(
            Entry(
                time(),
                self.id,
                self.head.method,
                self.head.sent_path,
                self.status,
                perf_counter() - self.started_at,
                self.bytes_out,
                self.head.client,
                "" if self.span is None else self.span.trace_id,
            )
        )
        if self.span is not None:
            self.span.ended(self.status)
        self._scope = None  # which names this


def asked(req: Any) -> Request:
    """Return the request that Falcon's stands for, which would log and decode what is not ours."""
    request: Request = req.scope[REQUEST_KEY]
    return request


class Requests:
    """The requests that one worker is answering; make it after the fork."""

    def __init__(self, access_log: AccessLog) -> None:
        self.access_log = access_log
        self.in_flight = 0
        self.ended: Counter[int] = Counter()  # requests by the status of their response
        self.are_last = False  # responses ask clients to close their connections
        # A random prefix and a count: a uuid4 would cost more than reading the headers.
        self._prefix = os.urandom(8).hex()
        self._counter = itertools.count(1)

    def new_id(self, offered: bytes | None) -> str:
        """Return ``offered`` if it is printable ASCII of at most 200 characters, else a new id."""
        if offered is not None and _is_acceptable_id(offered):
            return offered.decode("ascii")
        return f"{self._prefix}{next(self._counter):08x}"

    def metrics(self) -> list[Group]:
        """Return what was counted, for a scrape of this host."""
        registry = Registry()
        ended = registry.counter(
            "greenroom_http_responses_total",
            "Requests that ended, by the response's status; 499 where the client left before it",
            "status",
        )
        for status, count in self.ended.items():
            ended.add(count, str(status))
        ongoing = "greenroom_http_ongoing_requests"
        registry.gauge(ongoing, "Requests that are being answered").set(self.in_flight)
        return [({"pid": str(os.getpid())}, registry.families())]


# --- The query ------------------------------------------------------------------------------------


def query_for(
    request: Request, number: int, most_s: float | None, body: bytes = b"", *, follows: str = ""
) -> Query:
    """Return the query for a request, which takes ``most_s`` at most.

    InvalidRequestError names a header that cannot be read, and its value.
    """
    head, named = request.head, request.head.named
    if head.query is not None and not follows:
        call = packed(_http_call(request, body)) if body else head.query.call
        return head.query._replace(id=number, request_id=request.id, call=call)
    timeout = named.get(b"x-request-timeout-seconds")
    shard_key = named.get(b"x-serve-shard-key")
    model_id = named.get(MODEL_HEADER)
    query = Query(
        number,
        call=packed(_http_call(request, body)),
        request_id=request.id,
        endpoint=None,
        path=head.path,
        http_method=head.method,
        call_method=_call_method(head) if CALL_METHOD_HEADER in named else "",
        timeout_s=most_s if timeout is None else _timeout(timeout, most_s),
        retryable=None,
        shard_key=None if shard_key is None else _text(shard_key),
        multiplexed_model_id="" if model_id is None else _text(model_id),
        follows=follows,
    )
    if not follows and request.span is None and not head.is_chunked:  # the head alone decides
        head.query = query._replace(call=b"") if body else query
    return query


def _http_call(request: Request, body: bytes) -> tuple[Any, ...]:
    """Return the fields of an HttpCall, the request as user code will see it.

    Headers with underscores are left out: where CGI's names are in use, in a WSGI app of the user's
    for one, X_Forwarded_For would pass for X-Forwarded-For.
    """
    head = request.head
    return (
        head.method,
        head.full_path,
        head.raw_path,
        head.query_string,
        tuple([each for each in head.headers if b"_" not in each[0] or each[0] == MODEL_HEADER]),
        body,
        head.scheme,
        head.http_version,
        head.client,
        head.server,
        head.root_path,
        None if request.span is None else request.span.carried(),
    )


def _subprotocols(head: Head) -> list[str]:
    values = [value for name, value in head.headers if name == b"sec-websocket-protocol"]
    names = b",".join(values).decode("latin-1").split(",")
    return [name.strip() for name in names if name.strip()]


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


def _call_method(head: Head) -> str:
    values = [value for name, value in head.headers if name == CALL_METHOD_HEADER]
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
