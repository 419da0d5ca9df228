"""What the HTTP front needs of whatever carries its queries to the router.

The front knows nothing else of the actors. :class:`understudy.http_front.link.Link` is the real
one, :class:`understudy.http_front.fake.FakeDispatcher` the one for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from understudy.actors.messages import MORE, FailedAnswer, HttpAnswer
from understudy.actors.streams import Stream


class Feed(Protocol):
    """What follows a query is sent to; see :class:`understudy.actors.feeds.Feed`."""

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """Send the next bytes; NobodyListensError once the query is over."""

    def end(self, data: bytes = b"") -> None:
        """Send the end, at once and last of all."""

    def fail(self, kind: str, text: str) -> None:
        """Answer the query with an error, and end it wherever it is."""

    def leave(self, data: bytes) -> None:
        """Send the end, and want no answer any more; the query may go on to its end."""


class Dispatcher(Protocol):
    """Carries queries to the router and brings back the answers; lives in one worker's loop."""

    ready: bool
    """False until the router has its first route table, and while it cannot be reached."""

    async def start(self) -> None:
        """Begin to connect in the background; must not fail when the router is absent."""

    async def stop(self) -> None:
        """Let go of the router; called once nothing is in flight."""

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
    ) -> HttpAnswer | FailedAnswer | Stream:
        """Run one query and return its answer; never raises for what went wrong with it.

        ``path`` is what routes are matched against; ``call`` is a pickled HttpCall. Cancelling the
        await cancels the query. The deadline is kept here: past it, FailedAnswer QueryTimeoutError.
        ``follows`` says what the client sends on; ``on_fed`` gets where to, once a replica wants
        it.
        """
        ...

    async def routes(self) -> dict[str, str]:
        """Return route prefix -> endpoint."""
        ...

    async def metrics(self) -> bytes:
        """Return the metrics as Prometheus text."""
        ...
