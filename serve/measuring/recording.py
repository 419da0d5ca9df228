"""Recording: real queries and answers of an endpoint, in a file.

Theory of operation. The recorder is a shadow of the endpoint. So queries reach it as copies, after
they have left for their own replica, and only where there is room: none waits for it or fails with
it. It answers each with a number. Its answers are "compared" with those that clients got, by a
function of ours, which finds the query by that number, and so has both. The program that records
takes them from there by a handle and writes the file.

All that is kept in the recorder is bounded; what is beyond it, or not taken, counts as dropped.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from greenroom.actors.replica import context as user_context
from greenroom.core.comparing.comparing import Response
from greenroom.core.errors import GreenroomError, InvalidRequestError
from greenroom.core.records import RECORDER
from greenroom.serve.admin.client import Client

FORMAT = 1
REDACTED = "REDACTED"
SECRET_HEADERS = ("authorization", "cookie", "proxy-authorization", "set-cookie", "x-api-key")
MAX_WAITING_BYTES = 16 * 1024**2  # of queries without their answer yet
MAX_READY_BYTES = 16 * 1024**2  # of pairs that were not taken yet
MAX_TAKEN = 500
TAKE_EVERY_S = 0.2
TIMEOUT_S = 30.0

Row = dict[str, Any]


class Recorder:
    """What a recorder's replica runs; it compares on a thread of its own."""

    def __init__(self, redacted: tuple[str, ...]) -> None:
        self._redacted = frozenset(redacted)
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: OrderedDict[int, Row] = OrderedDict()
        self._waiting_bytes = 0
        self._ready: deque[Row] = deque()
        self._ready_bytes = 0
        self._dropped = 0

    async def __call__(self, request: Request) -> PlainTextResponse:
        """Keep a query, and answer with its number."""
        scope = request.scope
        row = {
            "at": time.time(),
            "method": request.method,
            "path": scope["path"],
            "raw_path": _text(scope["raw_path"]),
            "query": _text(scope["query_string"]),
            "root_path": scope["root_path"],
            "headers": self._shown((_text(n), _text(v)) for n, v in scope["headers"]),
            "body": base64.b64encode(await request.body()).decode(),
        }
        with self._lock:
            self._number += 1
            self._waiting[self._number] = row
            self._waiting_bytes += _size(row)
            while self._waiting_bytes > MAX_WAITING_BYTES:
                self._waiting_bytes -= _size(self._waiting.popitem(last=False)[1])
                self._dropped += 1
            return PlainTextResponse(str(self._number))

    def answered(self, primary: Response, shadow: Response) -> None:
        """Keep an answer with its query."""
        if not shadow.body.isdigit():
            return
        with self._lock:
            row = self._waiting.pop(int(shadow.body), None)
            if row is None:
                return
            self._waiting_bytes -= _size(row)
            row |= {
                "status": primary.status,
                "answer_headers": self._shown(primary.headers),
                "answer": base64.b64encode(primary.body).decode(),
            }
            if self._ready_bytes + _size(row) > MAX_READY_BYTES:
                self._dropped += 1
                return
            self._ready.append(row)
            self._ready_bytes += _size(row)

    def take(self) -> tuple[list[Row], int]:
        """Return some of the pairs, each once, and how many were dropped."""
        with self._lock:
            rows = [self._ready.popleft() for _ in range(min(len(self._ready), MAX_TAKEN))]
            self._ready_bytes -= sum(map(_size, rows))
            return rows, self._dropped

    def _shown(self, headers: Any) -> list[tuple[str, str]]:
        return [(n, REDACTED if n in self._redacted else value) for n, value in headers]


def answered(primary: Response, shadow: Response) -> None:
    """Give both answers to the recorder of this process, as its compare function."""
    replica = user_context.replica_context()
    if replica is not None and isinstance(replica.servable_object, Recorder):
        replica.servable_object.answered(primary, shadow)


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _size(row: Row) -> int:
    return 500 + len(row["body"]) + len(row.get("answer", ""))


# --- Recording into a file ------------------------------------------------------------------------


class Recorded(NamedTuple):
    """How a recording went."""

    queries: int
    size: int  # bytes of the file
    dropped: int
    reason: str  # why it ended


def recorder_of(endpoint: str) -> str:
    """Return the name of an endpoint's recorder: a backend, and an endpoint without a route."""
    return f"{RECORDER}{sha256(endpoint.encode()).hexdigest()[:12]}"


def record(
    client: Client,
    endpoint: str,
    file: Path,
    *,
    sample: float,
    max_bytes: int,
    seconds: float | None = None,
    redact: tuple[str, ...] = (),
    on_begin: Callable[[], None] = lambda: None,
) -> Recorded:
    """Record a share of an endpoint's queries until the file is full or the time is over.

    ``on_begin`` is called when queries begin to be recorded. KeyboardInterrupt ends it, too, and is
    not raised. The history has nothing of a recorder, for nobody is to undo it. The file is new and
    this user's alone.
    InvalidRequestError where the file exists, UnknownNameError for an endpoint that does not.
    """
    client.get_handle(endpoint)  # which says what endpoints there are
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except FileExistsError:
        raise InvalidRequestError(f"{file} exists: name a new file, or remove it first") from None
    name = recorder_of(endpoint)
    redacted = tuple({*SECRET_HEADERS, *(each.lower() for each in redact)})
    with open(fd, "wb") as out:
        head = {"greenroom": "recording", "format": FORMAT, "endpoint": endpoint, "at": time.time()}
        out.write(json.dumps(head).encode() + b"\n")
        has_begun = False
        try:
            client.wait_for_goal(
                client.create_backend(
                    name, Recorder, redacted, config={"max_ongoing_requests": 32}
                ),
                TIMEOUT_S,
            )
            client.create_endpoint(name, backend=name)
            client.shadow_traffic(endpoint, name, sample, compare=answered)
            has_begun = True
            on_begin()
            return _take_all(client, name, out, max_bytes, seconds)
        finally:
            if not has_begun:
                file.unlink(missing_ok=True)  # which would be in the way of the next try
            stop(client, endpoint)


def _take_all(
    client: Client,
    name: str,
    out: Any,
    max_bytes: int,
    seconds: float | None,
) -> Recorded:
    take = client.get_handle(name).take
    ends_at = None if seconds is None else time.monotonic() + seconds
    queries = dropped = 0
    try:
        while True:
            rows, dropped = take.remote().result(timeout_s=TIMEOUT_S)
            for row in rows:
                line = json.dumps(row).encode() + b"\n"
                if out.tell() + len(line) > max_bytes:
                    return Recorded(queries, out.tell(), dropped, "the file is full")
                out.write(line)
                queries += 1
            out.flush()
            if len(rows) == MAX_TAKEN:
                continue  # there may be more
            if ends_at is not None and time.monotonic() >= ends_at:
                return Recorded(queries, out.tell(), dropped, "the time is over")
            time.sleep(TAKE_EVERY_S)
    except KeyboardInterrupt:
        return Recorded(queries, out.tell(), dropped, "it was interrupted")


def stop(client: Client, endpoint: str) -> None:
    """Remove an endpoint's recorder, also one whose program was killed; harmless without any."""
    name = recorder_of(endpoint)
    endpoints = client.list_endpoints()
    if name in endpoints.get(endpoint, {}).get("shadows", {}):
        client.shadow_traffic(endpoint, name, 0)
    if name in endpoints:
        client.delete_endpoint(name)
    if name in client.list_backends():
        client.wait_for_goal(client.delete_backend(name, force=True), TIMEOUT_S)


def endpoint_of(file: Path) -> str:
    """Return the endpoint that was recorded; InvalidRequestError where it is no recording."""
    with file.open("rb") as lines:
        return str(_head(file, lines)["endpoint"])


def _head(file: Path, lines: BinaryIO) -> dict[str, Any]:
    try:
        head: dict[str, Any] = json.loads(lines.readline(10_000))
        is_ours = head["greenroom"] == "recording"
    except (ValueError, KeyError, TypeError):
        is_ours = False
    if not is_ours:
        raise InvalidRequestError(f"{file} is no recording; make one by `greenroom record`")
    if head["format"] != FORMAT:
        raise InvalidRequestError(f"{file} has format {head['format']!r}; this reads {FORMAT}")
    return head


def read(file: Path) -> Iterator[Row]:
    """Return the rows of a recording, in their order; a torn last line is left out.

    InvalidRequestError where it is no recording, or one of another format.
    """
    with file.open("rb") as lines:
        _head(file, lines)
        for number, line in enumerate(lines, 2):
            try:
                yield json.loads(line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise GreenroomError(f"{file}, line {number}: is damaged") from None
