"""The admin API: every operation of the table over HTTP, and Ray Serve's REST resource.

Theory of operation. ``/api/v1/OPERATION`` is one resource for the whole table
(:mod:`greenroom.core.operations`): the body is the operation's fields as JSON, bytes in base64;
one that only reads takes them from the query, too. In this order: is the request from a page of
another site, whose token is it, what may that ask for; only then is the body read. The controller
gets the same request as from a Python client, with the token's name as its author.

Errors are problem documents of RFC 9457, with the texts that a Python client gets.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import falcon
import falcon.asgi
from pydantic import ValidationError
from pydantic_core import to_json

from greenroom.actors.messages.admin import Request
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.config import is_loopback
from greenroom.core.errors import (
    GreenroomError,
    InvalidRequestError,
    NotRunningError,
    UnauthorizedError,
)
from greenroom.core.operations import OPERATIONS, Operation, WaitForGoal
from greenroom.core.validation import problems_in
from greenroom.http_front.admin.access import Access, check_origin
from greenroom.http_front.admin.openapi import openapi
from greenroom.http_front.exchange import VISIT_KEY
from greenroom.http_front.link import Link

ANSWER_S = 30.0  # how long an operation may take that does not wait for a goal
GOAL_S = 0.5  # how long to wait for a goal's state without ?wait=
MAX_WAIT_S = 300.0
RETRY_AFTER_S = 5
PROBLEM = "application/problem+json"
_IDEMPOTENCY_KEY = b"idempotency-key"


class AdminRequest:
    """What the resources need of a request: its head, its query and its body.

    Falcon's own would log and decode what is not ours to decode.
    """

    def __init__(self, visit: Any) -> None:
        self._visit = visit
        self.head: Mapping[bytes, bytes] = visit.exchange.head

    def query(self) -> dict[str, str]:
        """Return the query's fields; InvalidRequestError where one comes twice."""
        text = self._visit.exchange.scope["query_string"].decode("latin-1")
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=50)
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise InvalidRequestError(f"query {text[:200]!r}: give each field once")
        return fields

    async def body(self) -> bytes:
        """Return the body."""
        body: bytes = await self._visit.whole_body()
        return body


class Controller:
    """Asks the controller in the name of a token's holder."""

    def __init__(self, link: Link, access: Access) -> None:
        self._link = link
        self.access = access

    async def request(
        self,
        operation: Operation,
        author: str,
        *,
        request_id: str = "",
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """Return the operation's answer, or raise its error."""
        return await self._link.request(
            Request(
                request_id=request_id or secrets.token_hex(16),
                operation=operation.key,
                fields=operation.fields,
                user=f"token {author}",
            ),
            timeout_s,
        )

    async def reached(self, goals: list[str], author: str, within_s: float) -> bool:
        """Return whether all goals are reached; raise why one has failed."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + within_s
        for goal in goals:
            left_s = max(0.0, ends_at - loop.time())
            try:
                await self.request(WaitForGoal(goal_id=goal), author, timeout_s=left_s)
            except TimeoutError:
                return False
        return True


class OperationResource:
    """``/api/v1/OPERATION``, for all of them."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._readers: dict[str, type[Operation]] = {}  # those that were asked for

    async def on_get(self, req: Any, resp: falcon.asgi.Response, operation: str) -> None:
        """Answer one that only reads; its fields are in the query."""
        kind = _known(operation)
        if not kind.is_read:
            raise falcon.HTTPMethodNotAllowed(["POST"])
        await self._answer(req, resp, kind)

    async def on_post(self, req: Any, resp: falcon.asgi.Response, operation: str) -> None:
        """Carry one out; its fields are in the body."""
        await self._answer(req, resp, _known(operation))

    async def _answer(self, req: Any, resp: falcon.asgi.Response, kind: type[Operation]) -> None:
        request = asked(req)
        author = await self._controller.access.holder(request.head, kind.role)
        query = request.query()
        wait_s = _wait(query.pop("wait", None))
        if req.method == "GET":
            operation = self._read(kind, query)
            request_id = ""
        else:
            if query:
                raise InvalidRequestError(
                    f"query {', '.join(query)}: the fields of {kind.key} go into the body, as JSON"
                )
            body = await request.body()
            operation = self._read(kind, body)
            request_id = _request_id(request.head, author, kind, body)
        if isinstance(operation, WaitForGoal):
            goal = operation.goal_id
            is_reached = await self._controller.reached([goal], author, wait_s or GOAL_S)
            write(resp, {"goal": goal, "reached": is_reached}, is_accepted=not is_reached)
            return
        answer = await self._controller.request(operation, author, request_id=request_id)
        goals = goals_in(kind, answer)
        is_reached = not goals
        if goals and wait_s:
            is_reached = await self._controller.reached(goals, author, wait_s)
        if kind.answers_goal:
            answer = {"goal": answer, "reached": is_reached}
        write(resp, answer, is_accepted=not is_reached)

    def _read(self, kind: type[Operation], given: bytes | dict[str, str]) -> Operation:
        reader = self._readers.get(kind.key) or self._readers.setdefault(kind.key, kind.from_json())
        try:
            if isinstance(given, dict):
                return reader.model_validate_strings(given, strict=False)
            return reader.model_validate_json(given or b"{}")
        except ValidationError as error:
            raise InvalidRequestError(f"{kind.key}: {'; '.join(problems_in(error))}") from None


def _known(key: str) -> type[Operation]:
    kind = OPERATIONS.get(key)
    if kind is None or kind.role is None:
        raise falcon.HTTPNotFound(
            description=f"no operation is named {key[:100]!r}; see /api/openapi.json"
        )
    return kind


def _wait(text: str | None) -> float:
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_S:
        raise InvalidRequestError(f"wait={text!r}: must be seconds, {MAX_WAIT_S:g} at most")
    return seconds


def _request_id(
    head: Mapping[bytes, bytes], author: str, kind: type[Operation], body: bytes
) -> str:
    """Return the same id for the same request with the same Idempotency-Key."""
    key = head.get(_IDEMPOTENCY_KEY)
    if key is None:
        return ""
    parts = (author.encode(), kind.key.encode(), key, body)
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(digests).hexdigest()[:32]


def goals_in(kind: type[Operation], answer: Any) -> list[str]:
    """Return the goals that an answer names."""
    if kind.answers_goal:
        named = [answer]
    elif isinstance(answer, dict) and not kind.is_read:
        named = [answer.get("goal"), *(answer.get("goals") or {}).values()]
    else:
        named = []
    return [goal for goal in named if goal is not None]


def asked(req: Any) -> AdminRequest:
    """Return the request that Falcon's stands for."""
    return AdminRequest(req.scope[VISIT_KEY])


def write(resp: falcon.asgi.Response, answer: Any, *, is_accepted: bool = False) -> None:
    """Answer with JSON; ``is_accepted``: goals are still to be waited for."""
    resp.status = falcon.HTTP_202 if is_accepted else falcon.HTTP_200
    resp.content_type = "application/json"
    resp.data = to_json(answer, inf_nan_mode="null", bytes_mode="base64", fallback=str)


class _Document:
    """``/api/openapi.json``."""

    def __init__(self) -> None:
        self._document: bytes | None = None

    async def on_get(self, _req: Any, resp: falcon.asgi.Response) -> None:
        """Answer with the document; it says nothing of this system, so it takes no token."""
        if self._document is None:
            self._document = to_json(openapi())
        resp.content_type = "application/json"
        resp.data = self._document


class _Guard:
    """Falcon's middleware: what holds for every request and response of the API."""

    def __init__(self, settings: HostSettings) -> None:
        host, _ = settings.http.pages_address or (settings.http.host, settings.http.port)
        self._is_local = is_loopback(host)
        self._own_names = (settings.host_name.lower(), host.lower())

    async def process_request(self, req: Any, _: falcon.asgi.Response) -> None:
        """Refuse what comes from other sites."""
        check_origin(asked(req).head, self._own_names, is_local=self._is_local)

    async def process_response(
        self, _req: Any, resp: falcon.asgi.Response, _resource: Any, _succeeded: bool
    ) -> None:
        """Let no one keep or guess at a response."""
        resp.set_header("cache-control", "no-store")
        resp.set_header("x-content-type-options", "nosniff")


def admin_app(settings: HostSettings, link: Link) -> falcon.asgi.App[Any, Any]:
    """Return the Falcon app of all that is below ``/api/``; one in each worker."""
    app: falcon.asgi.App[Any, Any] = falcon.asgi.App(middleware=[_Guard(settings)])
    controller = Controller(link, Access(link))
    app.add_route("/api/v1/{operation}", OperationResource(controller))
    app.add_route("/api/openapi.json", _Document())
    app.set_error_serializer(_serialize)
    app.add_error_handler(GreenroomError, _answer_our_error)
    app.add_error_handler(TimeoutError, _answer_timeout)
    return app


# --- Problems (RFC 9457) --------------------------------------------------------------------------


def _write_problem(resp: falcon.asgi.Response, status: int, kind: str, detail: str) -> None:
    resp.status = status
    resp.content_type = PROBLEM
    fields = {
        "type": f"urn:greenroom:problem:{kind}",
        "title": kind,
        "status": status,
        "detail": detail.partition("Traceback (most recent call last)")[0].strip() or kind,
    }
    resp.data = to_json(fields)


async def _answer_our_error(
    _req: Any, resp: falcon.asgi.Response, error: GreenroomError, _: dict[str, Any]
) -> None:
    _write_problem(resp, error.http_status, type(error).__name__, str(error))
    if isinstance(error, UnauthorizedError):
        resp.set_header("www-authenticate", 'Bearer realm="greenroom"')
    if isinstance(error, NotRunningError):
        resp.set_header("retry-after", str(RETRY_AFTER_S))


async def _answer_timeout(
    _req: Any, resp: falcon.asgi.Response, error: TimeoutError, _: dict[str, Any]
) -> None:
    detail = f"{error}; it may have been carried out: send it again, which changes nothing then"
    _write_problem(resp, 504, "TimeoutError", detail)


def _serialize(_req: Any, resp: Any, error: falcon.HTTPError) -> None:
    """Give Falcon's own errors, 404 and 405, the same form."""
    text = error.description or error.title or str(error.status)
    _write_problem(resp, error.status_code, type(error).__name__.removeprefix("HTTP"), text)
