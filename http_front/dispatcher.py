"""What the HTTP front needs of whatever carries its queries to the router.

The front knows nothing else of the actors. :class:`greenroom.http_front.link.Link` is the real
one, :class:`greenroom.http_front.fake.FakeDispatcher` the one for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from greenroom.actors.caller.streams import Stream
from greenroom.actors.messages.queries import MORE, FailedAnswer, HttpAnswer, Query

Outcome = HttpAnswer | FailedAnswer | Stream


class Feed(Protocol):
    """What follows a query is sent to; see :class:`greenroom.actors.caller.uploads.Feed`."""

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """Send the next bytes; NobodyListensError once the query is over."""

    def end(self, data: bytes = b"") -> None:
        """Send the end, at once and last of all."""

    def fail(self, kind: str, text: str) -> None:
        """Answer the query with an error, and end it wherever it is."""

    def leave(self, data: bytes) -> None:
        """Send the end, and want no answer any more; the query may go on to its end."""


OnFed = Callable[[Feed], None]


class Dispatcher(Protocol):
    """Carries queries to the router and brings back the answers; lives in one worker's loop."""

    ready: bool
    """False until the router has its first route table, and while it cannot be reached."""

    async def start(self) -> None:
        """Begin to connect in the background; must not fail when the router is absent."""

    async def stop(self) -> None:
        """Let go of the router; called once nothing is in flight."""

    def next_id(self) -> int:
        """Return an id for a query."""
        ...

    async def ask(self, query: Query, on_fed: OnFed | None = None) -> Outcome:
        """Run one query and return its answer; never raises for what went wrong with it.

        Its path is what routes are matched against, its call a pickled HttpCall. Cancelling the
        await cancels the query. The deadline is kept here: past it, FailedAnswer
        QueryTimeoutError. ``on_fed`` gets where to send what follows, once a replica wants it.
        """
        ...

    def submit(self, query: Query, on_answer: Callable[[Any], None]) -> Callable[[], None] | None:
        """Run one query that nothing follows, as :meth:`ask` does; return what cancels it.

        ``on_answer`` gets the Outcome, on the loop. None while there is no router to ask.
        """
        ...

    async def routes(self) -> dict[str, str]:
        """Return route prefix -> endpoint."""
        ...

    async def unready(self) -> dict[str, tuple[str, ...]] | None:
        """Return endpoint -> backends without a replica, of those that have been in full service.

        An endpoint whose own record is lost has an empty tuple. None where the router does not
        answer.
        """
        ...

    async def metrics(self) -> bytes:
        """Return the metrics as Prometheus text."""
        ...
