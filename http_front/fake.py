"""A dispatcher without a router behind it, for tests of the front and for measuring it."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from understudy.actors.messages import MORE, FailedAnswer, HttpAnswer, HttpCall
from understudy.actors.streams import Stream
from understudy.core.tickets import BODY
from understudy.http_front.dispatcher import Feed

HttpOutcome = HttpAnswer | FailedAnswer | Stream


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


Handler = Callable[[Asked], HttpOutcome | Awaitable[HttpOutcome]]


def ok(asked: Asked) -> HttpOutcome:
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
        self.route_table = {"/": "echo"}

    async def start(self) -> None:
        """Note the start."""
        self.started = True

    async def stop(self) -> None:
        """Note the stop."""
        self.stopped = True

    async def ask(
        self,
        *,
        path: str,
        http_method: str,
        call_method: str,
        call: bytes,
        request_id: str,
        timeout_s: float | None,
        shard_key: str | None,
        multiplexed_model_id: str,
        follows: str = "",
        on_fed: Callable[[Feed], None] | None = None,
    ) -> HttpOutcome:
        """Answer by the handler, once all is here; counts the awaits that were cancelled."""
        http_call: HttpCall = pickle.loads(call)
        if follows == BODY and on_fed is not None:
            fed = FakeFeed()
            on_fed(fed)
            rest = await fed.all
            if isinstance(rest, FailedAnswer):
                return rest
            http_call = http_call._replace(body=http_call.body + rest)
        asked = Asked(
            path,
            http_method,
            call_method,
            http_call,
            request_id,
            timeout_s,
            shard_key,
            multiplexed_model_id,
        )
        self.asked.append(asked)
        outcome = self.handler(asked)
        if not inspect.isawaitable(outcome):
            return outcome
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

    async def metrics(self) -> bytes:
        """Return one metric."""
        return b"# TYPE understudy_fake gauge\nunderstudy_fake 1\n"
