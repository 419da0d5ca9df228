"""A request as a query: what the router and the replica are told of it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from greenroom.actors.messages.queries import Query, beside
from greenroom.core.errors import InvalidRequestError
from greenroom.core.routing.tickets import SOCKET
from greenroom.core.validation import HOOKS
from greenroom.http_front.dispatcher import Dispatcher, Feed, Outcome
from greenroom.http_front.exchange import Exchange

OPENING_TIMEOUT_S = 60.0  # of a WebSocket, where requests have no limit
MODEL_HEADER = b"serve_multiplexed_model_id"  # Ray Serve's name
CALL_METHOD_HEADER = b"x-serve-call-method"


class Ask(Protocol):
    """What has a request answered; see :meth:`Asker.ask`."""

    def __call__(
        self,
        exchange: Exchange,
        follows: str = "",
        on_fed: Callable[[Feed], None] | None = None,
    ) -> Awaitable[Outcome]:
        """Have it answered."""


class Asker:
    """Has requests answered by the router's replicas, within ``timeout_s`` at most."""

    def __init__(self, timeout_s: float | None, dispatcher: Dispatcher) -> None:
        self._timeout_s = timeout_s
        self.opening_timeout_s = OPENING_TIMEOUT_S if timeout_s is None else timeout_s
        self._dispatcher = dispatcher

    def ask(
        self,
        exchange: Exchange,
        follows: str = "",
        on_fed: Callable[[Feed], None] | None = None,
    ) -> Awaitable[Outcome]:
        """Have a request answered; raises InvalidRequestError for a bad header."""
        return self._dispatcher.ask(self._query(exchange, follows), on_fed)

    def submit(
        self, exchange: Exchange, on_answer: Callable[[Any], None]
    ) -> Callable[[], None] | None:
        """Have a request answered, see :meth:`Dispatcher.submit`; InvalidRequestError likewise."""
        return self._dispatcher.submit(self._query(exchange, ""), on_answer)

    def _query(self, exchange: Exchange, follows: str) -> Query:
        head = exchange.head
        timeout = head.get(b"x-request-timeout-seconds")
        shard_key = head.get(b"x-serve-shard-key")
        model_id = head.get(MODEL_HEADER)
        return Query(
            self._dispatcher.next_id(),
            None,
            exchange.path,
            exchange.method,
            parse_call_method(exchange) if CALL_METHOD_HEADER in head else "",
            beside(pickle.dumps(plain_call(exchange), 5)),
            exchange.request_id,
            self._limit(timeout, self.opening_timeout_s if follows == SOCKET else self._timeout_s),
            None,
            None if shard_key is None else parse_text(shard_key),
            multiplexed_model_id="" if model_id is None else parse_text(model_id),
            follows=follows,
        )

    @staticmethod
    def _limit(header: bytes | None, most_s: float | None) -> float | None:
        """Return how long an answer may take."""
        if header is None:
            return most_s
        timeout_s = parse_timeout(header)
        return timeout_s if most_s is None else min(timeout_s, most_s)


def plain_call(exchange: Exchange) -> tuple[Any, ...]:
    """Return the fields of an HttpCall, the request as user code will see it.

    Its path includes the root path, as in ASGI.

    Headers with underscores are left out: where CGI's names are in use, in a WSGI app of the user's
    for one, X_Forwarded_For would pass for X-Forwarded-For.
    """
    scope = exchange.scope
    full_path = exchange.full_path
    return (
        exchange.method,
        full_path,
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
        full_path[: len(full_path) - len(exchange.path)] if full_path != exchange.path else "",
    )


def parse_timeout(value: bytes) -> float:
    """Read X-Request-Timeout-Seconds; raises InvalidRequestError naming header and value."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise _bad_header("X-Request-Timeout-Seconds", value, "a positive number of seconds")
    return seconds


def parse_call_method(exchange: Exchange) -> str:
    """Read X-Serve-Call-Method; raises InvalidRequestError naming header and value."""
    values = [value for name, value in exchange.scope["headers"] if name == CALL_METHOD_HEADER]
    if len(values) > 1:  # whoever checks it in front of us may have looked at another one
        raise InvalidRequestError(
            f"header X-Serve-Call-Method: given {len(values)} times; name one method, once"
        )
    value = values[0]
    name = parse_text(value)
    if name == "__call__":
        return name
    # A client must not reach what a class keeps to itself, its __init__ above all, nor what it has
    # for the controller.
    if not name.isidentifier() or name.startswith("_") or name in HOOKS:
        raise _bad_header("X-Serve-Call-Method", value, "the name of a public method")
    return name


def parse_text(value: bytes) -> str:
    """Read a shard key or model id: UTF-8, so that it is the same as a handle's, else Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _bad_header(name: str, value: bytes, expected: str) -> InvalidRequestError:
    shown = value[:100].decode("latin-1")
    return InvalidRequestError(f"header {name}: {shown!r} is not {expected}")
