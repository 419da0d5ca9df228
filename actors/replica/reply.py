"""What user code is given to answer a query with, whoever asked and however it came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from greenroom.actors.messages.queries import (
    MORE,
    Answer,
)
from greenroom.actors.replica.context import RunningQuery

if TYPE_CHECKING:
    from greenroom.actors.caller.streams import Parts


class Reply(RunningQuery):
    """One query, and what user code makes of it. A query that is not answered was cancelled."""

    __slots__ = ()

    feed: Parts | None = None  # what follows it
    status: int = 0  # of its answer; 0 before that

    @property
    def key(self) -> Any:
        """What to cancel it by."""
        raise NotImplementedError

    def begin(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """Begin an answer in parts; it is ended like any other, with a StreamEnded when well."""
        raise NotImplementedError

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """Send the next part; returns when more may be made."""
        raise NotImplementedError

    def answer(self, answer: Answer) -> None:
        """Answer; user code may go on."""
        raise NotImplementedError

    def end(self) -> None:
        """Note that user code has returned."""
        raise NotImplementedError
