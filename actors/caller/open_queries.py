"""One query of a caller, from its submission until it is answered and its slot is free.

Theory of operation. A caller has one table of its queries, and each knows where it is:

    nowhere yet     it waits for a proxy
    at the proxy    ``is_sent``, and the router decides
    under a lease   it has a slot of ``share``, at a replica
    answering       ``replica`` has begun its answer, or takes what follows it, and nobody else
                    can answer it any more

One that is no longer ``is_wanted`` stays in the table only while it has a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from greenroom.actors.caller.streams import Stream
from greenroom.actors.caller.uploads import Upload
from greenroom.actors.messages.queries import (
    Address,
    Answer,
    AnswerPart,
    ControlStreams,
    FeedTaken,
    LargeBytes,
    Process,
    Query,
    StillRuns,
    StreamBegun,
    StreamPart,
    part_arrived,
    status_of,
)
from greenroom.actors.runtime.loop import Callback, Loop, Timer, nothing
from greenroom.core.routing.leases import HeldShare
from greenroom.core.routing.outliers import has_failed

OnAnswer = Callable[[Answer | Stream], None]
OnUpload = Callable[[Upload], None]


@dataclass(slots=True, eq=False)
class OpenQuery:
    """See the module."""

    query: Query
    on_answer: OnAnswer
    on_upload: OnUpload | None
    submitted_at: float
    share: HeldShare | None = None
    is_sent: bool = False  # by the proxy's outbox, or by the lane of its share
    is_wanted: bool = True
    timer: Timer | None = None  # of its time limit
    exchange: Exchange | None = None  # from the first piece on
    # What the router is told of it.
    is_resent: bool = False  # it was sent before, and may have run
    is_refused: bool = False  # by a replica that had no room, under a lease
    died: str = ""  # the replica that has died with it under a lease
    failed_at: str = ""  # the replica that failed, and another is to run it instead

    @property
    def replica(self) -> Process | None:
        """The only replica that can still answer it, if that is certain."""
        return None if self.exchange is None else self.exchange.replica

    def end(self) -> Callable[[Any], None]:
        """Want no answer any more; return what gets one that has come."""
        self.is_wanted = False
        if self.timer is not None:
            self.timer.cancel()
        if self.exchange is None:
            return self.on_answer
        self.exchange.close()
        stream = self.exchange.stream
        return self.on_answer if stream is None else stream.ended


class Exchange:
    """What a query has with replicas besides one answer; the Source of its stream.

    ``cancel`` cancels the query.
    """

    def __init__(self, loop: Loop, incarnation: str, cancel: Callback) -> None:
        self.replica: Process | None = None
        self.at: Address | None = None
        self.stream: Stream | None = None
        self.upload: Upload | None = None
        self.parts: dict[int, list[LargeBytes]] = {}  # of large answers, by their numbers
        self.failing_at = ""  # the replica whose failure comes next, for another one to mend
        self._loop = loop
        self._incarnation = incarnation
        self._cancel = cancel
        self._stream_id = 0
        self._unwatch: Callback = nothing
        # Replicas that run it for a router that is dead, and as which query.
        self._orphans: list[tuple[Address, int]] = []

    def take(self, item: AnswerPart | FeedTaken | StillRuns | StreamPart, sender: Address) -> None:
        """Take a part of the answer, or record what a replica says of itself."""
        if isinstance(item, StreamPart):
            if self.stream is not None:
                self.stream.arrived(part_arrived(item))
        elif isinstance(item, FeedTaken):
            if self.upload is not None:
                self.upload.taken(item)
        elif isinstance(item, AnswerPart):
            self.parts.setdefault(item.number, []).append(item.content)
        elif self.replica is None and (sender, item.query_id) not in self._orphans:
            self._orphans.append((sender, item.query_id))

    def fails_with(self, answer: Answer) -> bool:
        """Return whether this is the failure that was announced, for another replica to mend.

        Else that replica has died before its failure came, and another one or the router answers,
        or the answer of another one has begun.
        """
        return bool(self.failing_at) and self.stream is None and has_failed(status_of(answer))

    def begin(self, begun: StreamBegun, sender: Address) -> Stream:
        """Return the stream that has begun."""
        self.replica, self.at = begun.process, sender
        self._stream_id = begun.query_id
        self.stream = Stream(begun, self)
        return self.stream

    def taken(self, size: int) -> None:
        """Tell the stream's replica that so much was taken."""
        taken = ((self._stream_id, size),)
        message = ControlStreams(incarnation=self._incarnation, taken=taken)
        self._loop.run(partial(_tell, self._loop, self.at, message))

    def stop(self) -> None:
        """Cancel the query. Posted: a finalizer may be anywhere in the caller."""
        self._loop.post(self._cancel)

    def stop_stream(self) -> None:
        """Have the replica end its answer in parts; it may have outlived the proxy."""
        if self.stream is not None:
            stop_at(self._loop, self._incarnation, self.at, self._stream_id)

    def end_at_replica(self) -> None:
        """Have the replica that answers end the query."""
        if self.upload is not None:
            self.upload.stop()
        self.stop_stream()

    def watch(self, on_death: Callback) -> None:
        """Notice the end of the replica that answers."""
        assert self.replica is not None, "nobody answers yet"
        self._unwatch()
        self._unwatch = self._loop.watch_process(self.replica, on_death, self.at)

    def begin_anew(self) -> None:
        """Forget what was heard: another replica is to run the query from the beginning."""
        self.failing_at = ""
        self.parts.clear()
        self._stop_orphans()

    def close(self) -> None:
        """Want nothing more: no answer is waited for."""
        self._unwatch()
        self._unwatch = self._cancel = nothing  # these hold the query, as does the upload
        if self.upload is not None:
            self.upload.close()
            self.upload = None
        self._stop_orphans()

    def _stop_orphans(self) -> None:
        for replica, query_id in self._orphans:
            stop_at(self._loop, self._incarnation, replica, query_id)
        self._orphans.clear()


def stop_at(loop: Loop, incarnation: str, replica: Address, query_id: int) -> None:
    """End a caller's query at a replica when its answer is not wanted; it might go on for ever."""
    _tell(loop, replica, ControlStreams(incarnation=incarnation, stopped=(query_id,)))


def _tell(loop: Loop, replica: Address, message: ControlStreams) -> None:
    """Send so that it comes on another link if the present one breaks: it is not repeated."""
    loop.send(replica, message, nothing)


def weigh(item: OpenQuery | int) -> int:
    """Return the bytes of what a lane has: a query, or the number of one to cancel."""
    return 0 if isinstance(item, int) else len(item.query.call)
