"""A link without a router behind it, for tests of the front."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import pickle
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from greenroom.actors.messages.queries import MORE, FailedAnswer, HttpAnswer, HttpCall, content_of
from greenroom.core.routing.tickets import BODY


class Asked(NamedTuple):
    """One query, with the HttpCall unpickled."""

    path: str
    http_method: str
    call_method: str
    call: HttpCall
    request_id: str
    timeout_s: float | None
    shard_key: str | None
    multiplexed_model_id: str


Handler = Callable[[Asked], Any]


def ok(asked: Asked) -> HttpAnswer:
    return HttpAnswer(0, 200, ((b"content-type", b"text/plain"),), b"ok")


class FakeUpload:
    """Gathers what follows a query; ``all`` is it, or the failure in its place."""

    def __init__(self) -> None:
        self.all: asyncio.Future[bytes | FailedAnswer] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []

    async def send(self, data: bytes, ends: int = MORE) -> None:
        self._parts.append(data)

    def end(self, data: bytes = b"") -> None:
        self.all.set_result(b"".join([*self._parts, data]))

    def fail(self, kind: str, text: str) -> None:
        self.all.set_result(FailedAnswer(0, kind, text))


class FakeLink:
    """Answers every query by ``handler`` and remembers what it was asked."""

    def __init__(self, handler: Handler = ok) -> None:
        self.ready = True
        self.handler = handler
        self.asked: list[Asked] = []
        self.cancelled = 0
        self.cancelled_at = 0.0  # the last of them
        self.started = self.stopped = False
        self.next_id = itertools.count(1).__next__
        self.route_table = {"/": "echo"}
        self.lacks: dict[str, dict[str, tuple[str, bool]] | None] | None = {}
        self.of_hosts: dict[tuple[Any, ...], Any] = {}  # answers by what they are asked

    async def start(self) -> None:
        self.started = True

    async def stop(self) -> None:
        self.stopped = True

    async def ask(self, query: Any, on_upload: Any = None) -> Any:
        body = b""
        if query.follows == BODY:
            upload = FakeUpload()
            on_upload(upload)
            rest = await upload.all
            if isinstance(rest, FailedAnswer):
                return rest
            body = rest
        outcome = self._handled(query, body)
        return await self._counted(outcome) if inspect.isawaitable(outcome) else outcome

    def submit(self, query: Any, on_answer: Callable[[Any], None]) -> Callable[[], object] | None:
        """Answer at once, unless the handler is a coroutine function."""
        outcome = self._handled(query, b"")
        if not inspect.isawaitable(outcome):
            on_answer(outcome)
            return lambda: None
        counting = asyncio.ensure_future(self._counted(outcome))

        def answered(task: asyncio.Task[Any]) -> None:
            if not task.cancelled():
                on_answer(task.result())

        counting.add_done_callback(answered)
        return counting.cancel

    def _handled(self, query: Any, body: bytes) -> Any:
        call = HttpCall(*pickle.loads(content_of(query.call)))
        asked = Asked(
            query.path,
            query.http_method,
            query.call_method,
            call._replace(body=call.body + body),
            query.request_id,
            query.timeout_s,
            query.shard_key,
            query.multiplexed_model_id,
        )
        self.asked.append(asked)
        return self.handler(asked)

    async def _counted(self, outcome: Awaitable[Any]) -> Any:
        finished = False
        try:
            answer = await outcome
            finished = True
        finally:
            if not finished:
                self.cancelled += 1
                self.cancelled_at = time.monotonic()
        return answer

    async def routes(self) -> dict[str, str]:
        return self.route_table

    async def lacking(self) -> dict[str, dict[str, tuple[str, bool]] | None] | None:
        return self.lacks

    async def ask_host(self, address: str, what: str, *arguments: Any) -> Any:
        return self.of_hosts.get((address, what, *arguments))

    async def metrics(self, *, whole: bool) -> bytes:
        return f"# TYPE greenroom_fake gauge\ngreenroom_fake {1 + whole}\n".encode()
