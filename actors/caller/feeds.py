"""What follows a query, from its caller to its replica: a large body, or a WebSocket's messages.

Theory of operation. The query goes its way without it. The replica that runs it tells the caller,
by a FeedWanted, which then sends parts straight to that replica, at most a window ahead of what
user code has taken. What has been sent is kept while it is at most KEPT bytes: so long the query
can still run from the beginning at another replica, when the first has died. With more gone, it
belongs to its replica for good.

:class:`Feed` and :class:`Outlets` are the caller's, :class:`Inflows` the replica's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from greenroom.actors.messages.queries import (
    END,
    MORE,
    Address,
    FeedQueries,
    FeedTaken,
    FeedWanted,
    Process,
    Query,
    StreamPart,
    part_arrived,
    part_travelling,
)
from greenroom.actors.runtime.loop import Callback, Loop, Outbox, Outboxes
from greenroom.actors.runtime.processes import is_alive
from greenroom.actors.runtime.streams import BODY_WINDOW, MAX_BODY_PART, Parts, Window, cost, pieces
from greenroom.core.errors import ReplicaUnavailableError

KEPT = BODY_WINDOW + MAX_BODY_PART  # more than can be sent to a replica that takes nothing
DEATH_S = 1.0  # by when a process whose connection has broken is known to be dead


class Outlets:
    """A caller's way to the replicas that it feeds: what goes to one travels together."""

    def __init__(self, loop: Loop, process: Process) -> None:
        self._loop = loop
        self._process = process
        self._outboxes = Outboxes()  # by the replica's incarnation

    def put(
        self, replica: str, address: Address, item: tuple[Feed | None, StreamPart | int]
    ) -> None:
        """Send a part, or the number of what is to be stopped."""
        outbox = self._outboxes.get(replica)
        if outbox is None:
            outbox = self._outboxes[replica] = self._make(replica, address)
        outbox.put(item)

    def _make(self, replica: str, address: Address) -> Outbox:
        return Outbox(
            self._loop,
            address,
            partial(self._pack, replica),
            on_failed=partial(self._undelivered, replica),
            weigh=lambda item: 0 if isinstance(item[1], int) else len(item[1].data),
        )

    def _pack(self, replica: str, items: list[tuple[Feed | None, Any]]) -> FeedQueries:
        return FeedQueries(
            incarnation=replica,
            process=self._process,
            parts=tuple(part_travelling(item) for _, item in items if isinstance(item, StreamPart)),
            stopped=tuple(item for _, item in items if isinstance(item, int)),
        )

    def _undelivered(self, replica: str, items: list[tuple[Feed | None, Any]]) -> None:
        """End what has lost a part on its way, unless the router finds it another replica."""
        for feed in dict.fromkeys(feed for feed, _ in items if feed is not None):
            if feed.may_begin_anew:
                self._loop.call_later(DEATH_S, partial(feed.undelivered, replica))
            else:
                feed.undelivered(replica)


class Feed:
    """The caller's end, on its loop: what is sent here reaches whichever replica runs the query.

    ``fail(kind, text)`` answers the query with an error, and ends it wherever it is; ``let_go``
    wants no answer any more.
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
    def process(self) -> Process | None:
        """Return the process that is fed."""
        return None if self._wanted is None else self._wanted[0].process

    @property
    def may_begin_anew(self) -> bool:
        """Return whether another replica can be sent all that was sent."""
        return self._kept is not None

    def begin(self, wanted: FeedWanted, address: Address) -> bool:
        """Feed a replica from the beginning, in place of any earlier one; False if it cannot."""
        if self._kept is None:
            return False
        self.stop()
        self._wanted = wanted, address
        self._window.reset()
        kept, self._kept, self._kept_size = self._kept, [], 0
        for part in kept:
            self._put(part._replace(query_id=wanted.number))
        return True

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """Send the next bytes, once a replica wants any; returns when more may be sent.

        NobodyListensError once the query is over.
        """
        assert self._wanted is not None, "begin() comes first"
        for part in pieces(0, data, ends, MAX_BODY_PART):
            await self._window.room()
            self._put(part._replace(query_id=self._wanted[0].number))

    def end(self, data: bytes = b"") -> None:
        """Send the end, after all that was sent, and whether or not there is room."""
        if self._wanted is not None and not self._is_over:
            self._put(StreamPart(self._wanted[0].number, data, END))
        self.close()

    def leave(self, data: bytes) -> None:
        """Send the end, and want no answer any more; the query may go on to its end."""
        self.end(data)
        self._let_go()

    def taken(self, taken: FeedTaken) -> None:
        """Count what was taken."""
        if self._wanted is not None and taken.number == self._wanted[0].number:
            self._window.taken(taken.size)

    def stop(self) -> None:
        """Have the replica end the query, for nobody wants it, or what follows it will not come."""
        if self._wanted is not None:
            wanted, address = self._wanted
            self._outlets.put(wanted.process.incarnation, address, (None, wanted.number))

    def close(self) -> None:
        """Send no more: the query is over, or wants no more."""
        self._is_over = True
        self._window.close()

    def undelivered(self, replica: str) -> None:
        """Give up a query whose replica lacks a part; one that is dead is the router's matter."""
        process = self.process
        if process is None or process.incarnation != replica:
            return
        if not self.may_begin_anew or is_alive(process):
            text = "its replica died, or did not take what followed the query"
            self.fail(ReplicaUnavailableError.__name__, text)

    def _put(self, part: StreamPart) -> None:
        assert self._wanted is not None
        wanted, address = self._wanted
        self._window.sent(cost(part))
        if self._kept is not None:
            self._kept.append(part)
            self._kept_size += cost(part)
            if self._kept_size > KEPT:
                self._kept = None
        self._outlets.put(wanted.process.incarnation, address, (self, part))


class Fed(Protocol):
    """A query that runs, and is fed."""

    feed: Parts | None

    @property
    def caller(self) -> str:
        """The incarnation of who sends."""

    def ended_by_caller(self) -> None:
        """Note that the last part is here; nobody listens any more, if it is a WebSocket."""

    def cancel(self) -> None:
        """Have user code end it."""


class Inflows:
    """What a replica is fed, on user code's loop; ``put`` sends an item to a query's caller."""

    def __init__(
        self,
        loop: Loop,
        process: Process,
        put: Callable[[FeedWanted | FeedTaken, Any], None],
    ) -> None:
        self._loop = loop
        self._process = process
        self._put = put
        self._numbers = itertools.count(1)
        self._fed: dict[int, Fed] = {}
        self._callers: dict[str, Callback] = {}  # by incarnation: what unwatches it

    def want(self, run: Fed, query: Query) -> int:
        """Ask for what follows a query; returns the number to end it by."""
        number, query_id = next(self._numbers), query.id
        run.feed = Parts(
            lambda size: self._put(FeedTaken(query_id, number, size), run),
            query.follows,
        )
        self._fed[number] = run
        self._put(FeedWanted(query_id, number, self._process), run)
        return number

    def all(self) -> list[Fed]:
        """Return what is fed now."""
        return list(self._fed.values())

    def arrived(self, message: FeedQueries, sender: Address) -> None:
        """Take what a caller sends; of its end the proxy may know nothing, if it is a later one."""
        for part in message.parts:
            run = self._fed.get(part.query_id)
            if run is None or run.feed is None:
                continue
            self._watch(message.process, sender)
            run.feed.arrived(part_arrived(part))
            if part.ends == END:
                run.ended_by_caller()
        for number in message.stopped:
            if number in self._fed:
                self._fed[number].cancel()

    def ended(self, number: int) -> None:
        """Forget what has ended, and its caller with the last of its."""
        caller = self._fed.pop(number).caller
        if caller in self._callers and all(run.caller != caller for run in self._fed.values()):
            self._callers.pop(caller)()

    def _watch(self, caller: Process, at: Address) -> None:
        incarnation = caller.incarnation
        if incarnation not in self._callers:
            lost = partial(self._caller_lost, incarnation)
            self._callers[incarnation] = self._loop.watch_process(caller, lost, at)

    def _caller_lost(self, caller: str) -> None:
        for run in self.all():
            if run.caller == caller:
                run.cancel()
