"""Replay: run recorded queries at a backend that has no traffic yet, and compare.

Theory of operation. Each query of a recording is sent at its time, faster by ``speed``, whether or
not earlier ones are answered (an open loop): to the new backend, and to the one that serves now.
The new answer is compared with the recorded one. The two latencies are a pair: both have seen the
same load on the same hosts at the same moment, which a recorded latency has not. A backend gets its
queries by an endpoint of its own, without a route, that exists as long as the replay does.
"""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from greenroom.actors.caller.client import QueryClient
from greenroom.actors.messages.queries import (
    FailedAnswer,
    HttpAnswer,
    HttpCall,
    Query,
    packed,
    status_of,
)
from greenroom.core.comparing.comparing import Compare, Differences, Outcome, Response, compare
from greenroom.core.comparing.latencies import Interval, percentile, ratio, share
from greenroom.core.errors import ConflictError, InvalidRequestError
from greenroom.core.operations import HTTP_METHODS
from greenroom.core.records import REPLAY
from greenroom.core.validation import unknown_name
from greenroom.serve.admin.client import Client
from greenroom.serve.measuring.recording import REDACTED, Row, read

AT_ONCE = 256  # queries under way; more of them wait, and count as late
QUERY_TIMEOUT_S = 60.0
LATE_S = 0.05
PRESENT = "present backend"
_LEFT_OUT = {"x-request-id", "x-serve-shard-key", "traceparent"}


@dataclass(slots=True)
class Replayed:
    """What came of a replay."""

    queries: int = 0
    late: int = 0  # sent more than LATE_S after their time
    failed: int = 0  # that the new backend gave no answer to
    found: Differences = field(default_factory=Differences)
    old_s: list[float] = field(default_factory=list)  # of queries that both have answered
    new_s: list[float] = field(default_factory=list)

    @property
    def different(self) -> Interval:
        """The share of answers that differ, of those that were compared."""
        return share(self.found.different, self.found.compared)

    @property
    def ratio(self) -> Interval | None:
        """How many times as long the new backend takes."""
        return ratio(self.old_s, self.new_s)

    def problem(self, max_different: float) -> str:
        """Return why the new backend should not get traffic, "" for no reason."""
        if not self.found.compared:
            return "no answer could be compared"
        if self.different.value > max_different:
            return (
                f"{self.found.different} of {self.found.compared} answers differ, more than "
                f"{max_different:.4g} of them"
            )
        return ""

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        sides = {"old": self.old_s, "new": self.new_s}
        return {
            "queries": self.queries,
            "late": self.late,
            "failed": self.failed,
            **self.found.plain(),
            "different_share": self.different._asdict(),
            "latency_ratio": None if self.ratio is None else self.ratio._asdict(),
            "latency_s": {
                side: {f"p{part:g}": percentile(values, part / 100) for part in (50, 95, 99)}
                for side, values in sides.items()
                if values
            },
        }


def replay(
    client: Client,
    queries: QueryClient,
    file: Path,
    *,
    to: str,
    baseline: str | None = None,
    how: Compare,
    speed: float = 1.0,
) -> Replayed:
    """Run a recording at backend ``to``, and for latencies at ``baseline``, unless that is None.

    Blocks until all is answered. InvalidRequestError for what is no recording, or an empty one,
    UnknownNameError for a backend that is not there. KeyboardInterrupt ends it, and is raised.
    """
    rows = read(file)
    first = next(rows, None)  # read before anything is made
    if first is None:
        raise InvalidRequestError(f"{file} has no queries")
    known, endpoints = client.list_backends(), client.list_endpoints()
    names: dict[str, str] = {}
    made: list[str] = []
    for backend in (to, *([] if baseline is None else [baseline])):
        if backend not in known:
            raise unknown_name("backend", backend, known)
        # A backend of an application takes no other endpoint, and has one of its own name.
        is_own = endpoints.get(backend, {}).get("traffic") == {backend: 1.0}
        names[backend] = backend if is_own else f"{REPLAY}{secrets.token_hex(6)}"
    try:
        for backend, name in names.items():
            if name != backend:
                client.create_endpoint(name, backend=backend, methods=HTTP_METHODS)
                made.append(name)
        old = None if baseline is None else names[baseline]
        return _Run(queries, names[to], old, how).all(_timed(first, rows, speed))
    finally:
        for name in made:
            client.delete_endpoint(name)


def gate(
    client: Client,
    queries: QueryClient,
    file: Path,
    *,
    endpoint: str,
    to: str,
    how: Compare,
    max_different: float,
) -> Replayed:
    """Replay as a rollout's step 0; ConflictError where the new backend may not go on."""
    found = replay(client, queries, file, to=to, baseline=serving(client, endpoint, to), how=how)
    if problem := found.problem(max_different):
        raise ConflictError(f"{to!r} gets no traffic: replaying {file}, {problem}")
    return found


def serving(client: Client, endpoint: str, but: str) -> str | None:
    """Return the backend with most of an endpoint's traffic, other than ``but``."""
    endpoints = client.list_endpoints()
    if endpoint not in endpoints:
        raise unknown_name("endpoint", endpoint, endpoints)
    traffic: dict[str, float] = endpoints[endpoint]["traffic"]
    return max((tag for tag in traffic if tag != but), key=lambda tag: traffic[tag], default=None)


def _timed(first: Row, rows: Iterator[Row], speed: float) -> Iterator[tuple[float, Row]]:
    yield 0.0, first
    for row in rows:
        yield max(row["at"] - first["at"], 0.0) / speed, row


class _Run:
    """One replay; answers come on the connection's thread."""

    def __init__(self, queries: QueryClient, new: str, old: str | None, how: Compare) -> None:
        self._queries = queries
        self._new, self._old, self._how = new, old, how
        self._room = threading.Semaphore(AT_ONCE)
        self._replayed = Replayed()

    def all(self, timed: Iterator[tuple[float, Row]]) -> Replayed:
        """Send all, and wait for the answers."""
        began_at, found = time.monotonic(), self._replayed
        under_way: list[tuple[Row, dict[str, Future[tuple[Any, float]]]]] = []
        for at, row in timed:
            due_at = began_at + at
            while (left_s := due_at - time.monotonic()) > 0:
                under_way = self._count(under_way, wait=False)
                time.sleep(min(left_s, 0.02))
            sides = [self._new] if self._old is None else [self._old, self._new]
            if found.queries % 2:  # neither is always first
                sides.reverse()
            for _ in sides:
                self._room.acquire()
            found.late += time.monotonic() - due_at > LATE_S
            found.queries += 1
            under_way.append((row, {side: self._send(side, row) for side in sides}))
            if len(under_way) >= AT_ONCE:
                under_way = self._count(under_way, wait=False)
        self._count(under_way, wait=True)
        return found

    def _count(self, under_way: list[Any], *, wait: bool) -> list[Any]:
        """Count what is answered; return the rest."""
        rest = []
        for row, futures in under_way:
            if wait or all(future.done() for future in futures.values()):
                self._compare(row, {side: future.result() for side, future in futures.items()})
            else:
                rest.append((row, futures))
        return rest

    def _compare(self, row: Row, answers: dict[str, tuple[Any, float]]) -> None:
        found = self._replayed
        answer, seconds = answers[self._new]
        recorded = _response(row["status"], row["answer_headers"], row["answer"])
        response = _response_of(answer)
        found.failed += isinstance(answer, FailedAnswer)
        outcome: Outcome = compare(self._how, recorded, response)
        example = {
            "at": row["at"],
            "request_id": f"{row['method']} {row['path']}",
            "detail": outcome.detail,
            "primary": recorded.shown,
            "shadow": response.shown,
        }
        found.found.count(outcome, example if outcome.cause else {})
        if self._old is not None:
            old, old_s = answers[self._old]
            if isinstance(old, HttpAnswer) and isinstance(answer, HttpAnswer):
                found.old_s.append(old_s)
                found.new_s.append(seconds)

    def _send(self, endpoint: str, row: Row) -> Future[tuple[Any, float]]:
        """Send a query as an HTTP worker does; the future gets the answer, and seconds."""
        pending = self._queries.pending(secrets.token_hex(16))
        query = Query(
            pending.id,
            call=packed(tuple(_call_of(row))),
            request_id=pending.request_id,
            endpoint=endpoint,
            path=row["path"],
            http_method=row["method"],
            call_method="",
            timeout_s=QUERY_TIMEOUT_S,
            retryable=None,
            shard_key=None,
        )
        answered: Future[tuple[Any, float]] = Future()
        sent_at = time.monotonic()
        pending.future.add_done_callback(partial(self._answered, answered, sent_at))
        self._queries.send(query, pending)
        return answered

    def _answered(
        self, answered: Future[tuple[Any, float]], sent_at: float, future: Future[Any]
    ) -> None:
        answer = future.result()
        if not isinstance(answer, HttpAnswer | FailedAnswer):
            answer.close()  # of a stream, which is not compared
        self._room.release()
        answered.set_result((answer, time.monotonic() - sent_at))


def _call_of(row: Row) -> HttpCall:
    headers = tuple(
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in row["headers"]
        if name not in _LEFT_OUT and value != REDACTED
    )
    return HttpCall(
        method=row["method"],
        path=row["path"],
        raw_path=row["raw_path"].encode("latin-1"),
        query_string=row["query"].encode("latin-1"),
        headers=headers,
        body=base64.b64decode(row["body"]),
        scheme="http",
        http_version="1.1",
        client=None,
        server=None,
        root_path=row["root_path"],
    )


def _response(status: int, headers: Any, body: str) -> Response:
    return Response(status, tuple(map(tuple, headers)), base64.b64decode(body))


def _response_of(answer: Any) -> Response:
    if isinstance(answer, HttpAnswer):
        return Response(answer.status, (), bytes(answer.body))
    if isinstance(answer, FailedAnswer):
        return Response(status_of(answer), missing=f"failed with {answer.kind}")
    return Response(200, missing="came in parts")
