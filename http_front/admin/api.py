"""The admin API over HTTP: every operation of the table, the logs, and the dashboard.

Theory of operation. ``/api/v1/OPERATION`` is one resource for the whole table
(:mod:`greenroom.core.operations`): the body is the operation's fields as JSON, bytes in base64;
one that only reads takes them from the query, too. In this order: is the request from a page of
another site, whose token is it, what may that ask for; only then is the body read. The controller
gets the same request as from a Python client, with the token's name as its author. Ray Serve's REST
resource is apart, in :mod:`.applications`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import falcon.asgi
from pydantic_core import from_json, to_json

from greenroom.actors.runtime.logs import end_of_log
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.errors import InvalidRequestError, NotRunningError, UnknownNameError
from greenroom.core.operations import OPERATIONS, GetStatus, Operation, WaitForGoal, read_given
from greenroom.core.validation import unknown_name
from greenroom.http_front.admin.access import DASHBOARD, Controller, check_source
from greenroom.http_front.admin.applications import ApplicationsResource
from greenroom.http_front.admin.openapi import openapi
from greenroom.http_front.link import Link
from greenroom.http_front.request import Request, asked
from greenroom.http_front.responses import JSON, json_reply, own_reply

GOAL_S = 0.5  # how long to wait for a goal's state without ?wait=
MAX_WAIT_S = 300.0
READ_BYTES = 64 * 1024  # of a body of an operation that reads, which any viewer may send
CHANGE_BYTES = 100_000_000  # of one that changes something: code is in it
SMALL_BYTES = 256 * 1024  # larger bodies are parsed in a thread, and hold up no requests
_PAGE = Path(__file__).with_name("dashboard.html")
_IDEMPOTENCY_KEY = b"idempotency-key"


class OperationResource:
    """``/api/v1/OPERATION``, for all of them."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def on_get(self, req: Any, _resp: object, operation: str) -> None:
        """Answer one that only reads; its fields are in the query."""
        kind = _known(operation)
        if not kind.is_read:
            raise falcon.HTTPMethodNotAllowed(["POST"])
        await self._answer(asked(req), kind)

    async def on_post(self, req: Any, _resp: object, operation: str) -> None:
        """Carry one out; its fields are in the body."""
        await self._answer(asked(req), _known(operation))

    async def _answer(self, request: Request, kind: type[Operation]) -> None:
        author = (await self._controller.holder(request.head.named, kind.role)).name
        query = request.fields()
        wait_s = _wait(query.pop("wait", None))
        if request.head.method == "GET":
            operation = read_given(kind, query)
            request_id = ""
        else:
            if query:
                raise InvalidRequestError(
                    f"query {', '.join(query)}: the fields of {kind.key} go into the body, as JSON"
                )
            body = await request.whole_body(READ_BYTES if kind.is_read else CHANGE_BYTES)
            if len(body) <= SMALL_BYTES:
                operation = read_given(kind, body)
            else:
                operation = await asyncio.to_thread(read_given, kind, body)
            request_id = _request_id(request.head.named, author, kind, body)
        if isinstance(operation, WaitForGoal):
            goal = operation.goal_id
            is_reached = await self._controller.reached([goal], author, wait_s or GOAL_S)
            answer = {"goal": goal, "reached": is_reached}
            request.reply = json_reply(request, answer, is_accepted=not is_reached)
            return
        answer = await self._controller.request(operation, author, request_id=request_id)
        goals = goals_in(kind, answer)
        is_reached = not goals
        if goals and wait_s:
            is_reached = await self._controller.reached(goals, author, wait_s)
        if kind.answers_goal:
            answer = {"goal": answer, "reached": is_reached}
        request.reply = json_reply(request, answer, is_accepted=not is_reached)


def _known(key: str) -> type[Operation]:
    kind = OPERATIONS.get(key)
    if kind is None or kind.role is None:
        raise falcon.HTTPNotFound(
            description=f"no operation is named {key[:100]!r}; GET /-/api/v1 has all of them"
        )
    return kind


def _wait(text: str | None) -> float:
    try:
        seconds = 0.0 if text is None else float(text)
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


# --- Tokens, logs and the document ----------------------------------------------------------------


class _TokenResource:
    """``/api/token``: what the token is that a request bears."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def on_get(self, req: Any, _resp: object) -> None:
        """Answer with its name, role and end."""
        request = asked(req)
        found = await self._controller.holder(request.head.named, "viewer")
        answer = {"name": found.name, "role": found.role, "expires_at": found.expires_at}
        request.reply = json_reply(request, answer)


class _LogsResource:
    """``/api/logs``: the log files of any host, as they grow.

    It answers their names, or with ``log=NAME`` its end, and with ``after=OFFSET`` what follows.
    Logs stay where they are written. Those of this host are read here, those of another by its
    proxy.
    """

    def __init__(self, settings: HostSettings, controller: Controller, link: Link) -> None:
        self._folder = settings.logs_dir
        self._own = settings.host_name
        self._controller = controller
        self._link = link

    async def on_get(self, req: Any, _resp: object) -> None:
        """Answer with the names of the logs, or with lines of one."""
        request = asked(req)
        holder = await self._controller.holder(request.head.named, "viewer")
        query = request.fields()
        host, log, after = (query.pop(name, None) for name in ("host", "log", "after"))
        if query:
            raise InvalidRequestError(f"query {', '.join(query)}: expected host, log and after")
        if after is not None and not (after.isascii() and after.isdecimal() and len(after) < 20):
            raise InvalidRequestError(f"after={after!r}: must be the next of an earlier answer")
        offset = None if after is None else int(after)
        if host in {None, self._own}:
            read = await asyncio.to_thread(end_of_log, self._folder, log, offset)
        else:
            address = await self._address(host, holder.name)
            read = await self._link.ask_host(address, "logs", log, offset)
            if read is None:
                raise NotRunningError(f"host {host!r} does not answer")
        if not read:
            raise UnknownNameError(f"no log is named {str(log)[:200]!r}")
        request.reply = json_reply(request, {"host": host or self._own, **read})

    async def _address(self, host: str, author: str) -> str:
        status = await self._controller.request(GetStatus(), author)
        addresses: dict[str, str] = {each["name"]: each["address"] for each in status["hosts"]}
        if host not in addresses:
            raise unknown_name("host", host[:200], addresses)
        return addresses[host]


class _Document:
    """``/api/openapi.json``; and by its paths alone ``/api/`` and ``/api/v1``, which users try.

    It says nothing of this system, so it takes no token.
    """

    async def on_get(self, req: Any, _resp: object) -> None:
        """Answer with the document."""
        asked(req).reply = own_reply(asked(req), self._document, JSON)

    async def on_get_index(self, req: Any, _resp: object) -> None:
        """Answer with the methods of each path."""
        asked(req).reply = own_reply(asked(req), self._index, JSON)

    @cached_property
    def _document(self) -> bytes:
        return to_json(openapi())

    @cached_property
    def _index(self) -> bytes:
        paths = {**from_json(self._document)["paths"], "/api/openapi.json": ["get"]}
        return to_json({f"/-{path}": sorted(map(str.upper, of)) for path, of in paths.items()})


# --- The dashboard --------------------------------------------------------------------------------


class _DashboardPage:
    """``/-/dashboard``: one file of HTML, CSS and JavaScript, which asks the API for all it shows.

    The page itself holds no data, so it takes no token. Its policy lets it run its own script and
    talk to its own origin, and nothing else: no other script, style, frame or form.
    """

    def __init__(self) -> None:
        self._content = _PAGE.read_bytes()
        self._policy = _policy_of(self._content.decode())

    async def on_get(self, req: Any, _resp: object) -> None:
        """Answer with the page."""
        asked(req).reply = own_reply(
            asked(req),
            self._content,
            b"text/html; charset=utf-8",
            (b"content-security-policy", self._policy.encode()),
            (b"referrer-policy", b"no-referrer"),
            (b"x-frame-options", b"DENY"),
            (b"cross-origin-opener-policy", b"same-origin"),
        )


def _policy_of(html: str) -> str:
    """Return the Content-Security-Policy that allows a page what is inside it."""
    (script,), (style,) = _all_in(html, "script"), _all_in(html, "style")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "img-src data:",  # its icon
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _all_in(html: str, tag: str) -> list[str]:
    return re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- The application ------------------------------------------------------------------------------


def add_to(
    app: falcon.asgi.App[Any, Any], settings: HostSettings, link: Link
) -> Callable[[Request], None]:
    """Add the dashboard and all below ``/-/api/``; return what refuses requests from elsewhere."""
    controller = Controller(link)
    app.add_route("/-/api/v1/{operation}", OperationResource(controller))
    applications = ApplicationsResource(settings, controller)
    app.add_route("/-/api/serve/applications", applications)
    app.add_route("/-/api/serve/applications/", applications)
    app.add_route(DASHBOARD, _DashboardPage())
    app.add_route("/-/api/token", _TokenResource(controller))
    app.add_route("/-/api/logs", _LogsResource(settings, controller, link))
    document = _Document()
    app.add_route("/-/api/openapi.json", document)
    for path in ("/-/api/", "/-/api/v1", "/-/api/v1/"):
        app.add_route(path, document, suffix="index")
    return partial(check_source, settings)
