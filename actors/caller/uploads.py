"""Uploads from a caller to a replica: a large body, or a WebSocket's messages.

Theory of operation. The query is sent without its upload. The replica that runs the query asks for
it with a FeedWanted. The caller then sends parts straight to that replica, at most a window ahead
of what user code has taken. The caller keeps what it has sent, up to ``KEPT`` bytes: until then,
another replica can run the query from the beginning if the first one dies. After that, the query
belongs to its replica for good.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from greenroom.actors.caller.streams import BODY_WINDOW, MAX_BODY_PART, Window, cost, pieces
from greenroom.actors.messages.queries import (
    END,
    MORE,
    Address,
    FeedQueries,
    FeedTaken,
    FeedWanted,
    Process,
    StreamPart,
    part_travelling,
)
from greenroom.actors.runtime.loop import Callback, Loop, Outbox, Outboxes
from greenroom.actors.runtime.processes import is_alive
from greenroom.core.errors import ReplicaUnavailableError

KEPT = BODY_WINDOW + MAX_BODY_PART  # more than can be sent to a replica that takes nothing
DEATH_S = 1.0  # by when a process whose connection has broken is known to be dead


class Outlets:
    """A caller's outboxes to the replicas that it sends uploads to."""

    def __init__(self, loop: Loop, process: Process) -> None:
        self._loop = loop
        self._process = process
        self._outboxes = Outboxes[Outbox]()  # by the replica's incarnation

    def put(self, replica: str, address: Address, part: StreamPart, upload: Upload) -> None:
        """Send a part."""
        self._outbox(replica, address).put((upload, part))

    def stop(self, wanted: FeedWanted, address: Address) -> None:
        """Make a replica end the query of an upload."""
        self._outbox(wanted.process.incarnation, address).put((None, wanted.number))

    def _outbox(self, replica: str, address: Address) -> Outbox:
        outbox = self._outboxes.get(replica)
        if outbox is None:
            outbox = self._outboxes[replica] = Outbox(
                self._loop,
                address,
                partial(self._pack, replica),
                on_failed=partial(self._undelivered, replica),
                weigh=lambda item: 0 if item[0] is None else len(item[1].data),
            )
        return outbox

    def _pack(self, replica: str, items: list[tuple[Upload | None, Any]]) -> FeedQueries:
        return FeedQueries(
            incarnation=replica,
            process=self._process,
            parts=tuple(part_travelling(item) for upload, item in items if upload is not None),
            stopped=tuple(item for upload, item in items if upload is None),
        )

    def _undelivered(self, replica: str, items: list[tuple[Upload | None, Any]]) -> None:
        """Fail what lost a part on its way, unless the router finds it another replica."""
        for upload in dict.fromkeys(upload for upload, _ in items if upload is not None):
            if upload.may_begin_anew:
                self._loop.call_later(DEATH_S, partial(upload.undelivered, replica))
            else:
                upload.undelivered(replica)


class Upload:
    """The caller's end, on its loop: what is sent here reaches whichever replica runs the query.

    ``fail(kind, text)`` answers the query with an error and ends it wherever it is; ``let_go``
    forgets the query, which may go on to its end.
    """

    def __init__(
        self,
        outlets: Outlets,
        fail: Callable[[str, str], None],
        let_go: Callback,
        follows: str = "",
    ) -> None:
        self._outlets = outlets
        self.fail = fail
        self._let_go = let_go
        self._wanted: tuple[FeedWanted, Address] | None = None
        self._window = Window(follows)
        self._kept: list[StreamPart] | None = []
        self._kept_size = 0
        self._is_over = False

    @property
    def may_begin_anew(self) -> bool:
        """Return whether another replica can be sent all that was sent."""
        return self._kept is not None

    def begin(self, wanted: FeedWanted, address: Address) -> bool:
        """Send to a replica from the beginning, in place of an earlier one; False if it cannot."""
        if self._kept is None:
            return False
        self.stop()
        self._wanted = wanted, address
        self._window.reset()
        kept, self._kept, self._kept_size = self._kept, [], 0
        for part in kept:
            self._put(part)
        return True

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """Send the next bytes; return when more may be sent. NobodyListensError once it is over."""
        for part in pieces(0, data, ends, MAX_BODY_PART):
            await self._window.room()
            self._put(part)

    def hurry(self) -> None:
        """Send whether or not there is room from now on: there is little more, and then the end."""
        self._window.lift()

    def end(self, data: bytes = b"") -> None:
        """Send the end after all that was sent, whether or not there is room."""
        if self._wanted is not None and not self._is_over:
            self._put(StreamPart(0, data, END))
        self.close()

    def leave(self, data: bytes) -> None:
        """Send the end, and want no answer any more; the query may go on to its end."""
        self.end(data)
        self._let_go()

    def taken(self, taken: FeedTaken) -> None:
        """Count what the replica has taken."""
        if self._wanted is not None and taken.number == self._wanted[0].number:
            self._window.taken(taken.size)

    def stop(self) -> None:
        """Make the replica end the query: its answer is not wanted, or the rest will not come."""
        if self._wanted is not None:
            self._outlets.stop(*self._wanted)

    def close(self) -> None:
        """Send no more: the query is over, or wants no more."""
        self._is_over = True
        self._window.close()

    def undelivered(self, replica: str) -> None:
        """Fail the query if this replica lacks a part; the router acts for one that is dead."""
        if self._wanted is None or self._wanted[0].process.incarnation != replica:
            return
        if not self.may_begin_anew or is_alive(self._wanted[0].process):
            text = "its replica died, or did not take what followed the query"
            self.fail(ReplicaUnavailableError.__name__, text)

    def _put(self, part: StreamPart) -> None:
        assert self._wanted is not None, "begin() comes first"
        wanted, address = self._wanted
        self._window.sent(cost(part))
        if self._kept is not None:
            self._kept.append(part)
            self._kept_size += cost(part)
            if self._kept_size > KEPT:
                self._kept = None
        numbered = part._replace(query_id=wanted.number)
        self._outlets.put(wanted.process.incarnation, address, numbered, self)
