"""Our own pages under ``/-/``, which tell what this worker and its router know."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from greenroom.core.errors import InvalidRequestError, NotRunningError
from greenroom.core.metrics import CONTENT_TYPE
from greenroom.http_front.link import Kept, Link
from greenroom.http_front.request import asked
from greenroom.http_front.responses import JSON, TEXT, own_reply

HEALTH = ("/-/healthz", "/-/readyz")  # answered wherever requests are, past the middlewares
PAGE_TIMEOUT_S = 5.0
KEPT_S = 1.0  # how long the text of the metrics is kept
_UNHEALTHY = "this server has no route table yet, or cannot reach its router"

T = TypeVar("T")


class Page:
    """A page under ``/-/``: its content type, and a function that makes its content.

    The function gets the value of ``field``, the only one that the query may have, or "".
    """

    def __init__(
        self, content_type: bytes, make: Callable[[str], Awaitable[bytes]], field: str = ""
    ) -> None:
        self._content_type = content_type
        self._make = make
        self._field = field

    async def on_get(self, req: Any, _resp: object) -> None:
        """Answer with the content."""
        request = asked(req)
        fields = request.fields()
        value = fields.pop(self._field, "")
        if self._field and fields:
            given = ", ".join(f"{name}={value!r}" for name, value in fields.items())[:200]
            raise InvalidRequestError(f"{given}: expected {self._field}=... alone, or nothing")
        request.reply = own_reply(request, await self._make(value), self._content_type)

    on_head = on_get


def pages(link: Link) -> dict[str, Page]:
    """Return the pages by their paths."""
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

    return {
        "/-/healthz": Page(TEXT, health),
        "/-/readyz": Page(TEXT, readiness, "application"),
        "/-/routes": Page(JSON, routes),
        "/-/metrics": Page(CONTENT_TYPE.encode(), metrics, "host"),
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
