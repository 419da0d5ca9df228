"""A dispatcher without a router behind it, for tests of the front and for measuring it."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import pickle
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from greenroom.actors.messages.queries import (
    MORE,
    FailedAnswer,
    HttpAnswer,
    HttpCall,
    Query,
    content_of,
)
from greenroom.core.routing.tickets import BODY
from greenroom.http_front.dispatcher import OnFed, Outcome


class Asked(NamedTuple):
    """One call of :meth:`FakeDispatcher.ask`, with the HttpCall unpickled."""

    path: str
    http_method: str
    call_method: str
    call: HttpCall
    request_id: str
    timeout_s: float | None
    shard_key: str | None
    multiplexed_model_id: str


Handler = Callable[[Asked], Outcome | Awaitable[Outcome]]


def ok(asked: Asked) -> Outcome:
    """Answer 200 ``ok``."""
    return HttpAnswer(0, 200, ((b"content-type", b"text/plain"),), b"ok")


class FakeFeed:
    """Gathers what follows a query; ``all`` is it, or the failure in its place."""

    def __init__(self) -> None:
        self.all: asyncio.Future[bytes | FailedAnswer] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """See Feed."""
        self._parts.append(data)

    def end(self, data: bytes = b"") -> None:
        """See Feed."""
        self.all.set_result(b"".join([*self._parts, data]))

    def fail(self, kind: str, text: str) -> None:
        """See Feed."""
        self.all.set_result(FailedAnswer(0, kind, text))

    def leave(self, data: bytes) -> None:
        """See Feed."""
        self.end(data)


class FakeDispatcher:
    """Answers every query by ``handler`` and remembers what it was asked."""

    def __init__(self, handler: Handler = ok, *, ready: bool = True) -> None:
        self.ready = ready
        self.handler = handler
        self.asked: list[Asked] = []
        self.cancelled = 0
        self.started = self.stopped = False
        self.next_id = itertools.count(1).__next__
        self.route_table = {"/": "echo"}
        self.missed: dict[str, tuple[str, ...]] | None = {}

    async def start(self) -> None:
        """Note the start."""
        self.started = True

    async def stop(self) -> None:
        """Note the stop."""
        self.stopped = True

    async def ask(self, query: Query, on_fed: OnFed | None = None) -> Outcome:
        """Answer by the handler, once all is here; counts the awaits that were cancelled."""
        body = b""
        if query.follows == BODY and on_fed is not None:
            fed = FakeFeed()
            on_fed(fed)
            rest = await fed.all
            if isinstance(rest, FailedAnswer):
                return rest
            body = rest
        outcome = self._handled(query, body)
        return await self._counted(outcome) if inspect.isawaitable(outcome) else outcome

    def submit(self, query: Query, on_answer: Callable[[Any], None]) -> Callable[[], object] | None:
        """Answer by the handler, at once unless it is a coroutine."""
        outcome = self._handled(query, b"")
        if not inspect.isawaitable(outcome):
            on_answer(outcome)
            return lambda: None
        counting = asyncio.ensure_future(self._counted(outcome))

        def answered(task: asyncio.Task[Outcome]) -> None:
            if not task.cancelled():
                on_answer(task.result())

        counting.add_done_callback(answered)
        return counting.cancel

    def _handled(self, query: Query, body: bytes) -> Outcome | Awaitable[Outcome]:
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

    async def _counted(self, outcome: Awaitable[Outcome]) -> Outcome:
        finished = False
        try:
            answer = await outcome
            finished = True
        finally:
            self.cancelled += not finished
        return answer

    async def routes(self) -> dict[str, str]:
        """Return ``route_table``."""
        return self.route_table

    async def unready(self) -> dict[str, tuple[str, ...]] | None:
        """Return ``missed``."""
        return self.missed

    async def metrics(self) -> bytes:
        """Return one metric."""
        return b"# TYPE greenroom_fake gauge\ngreenroom_fake 1\n"
