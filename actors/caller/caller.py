"""The caller: queries on their way to this host's proxy, until they are answered.

Theory of operation. A caller (an HTTP worker, a script with handles, a replica whose code calls
handles) keeps every query until its first answer, and ignores later answers to it. Queries go to
the proxy in batches; answers come straight from replicas. When the proxy dies, all queries wait for
the next proxy, or for their answers. A query that was already sent may have run, so it goes to the
next proxy with a mark that says so: whether it may run again depends on its endpoint and
deployment, which proxies know. Only a query whose own caller forbids retries fails at once. Retries
after the deaths of proxies have a budget, like retries after the deaths of replicas in the router.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from greenroom.actors.caller.held_leases import CallerLeases
from greenroom.actors.caller.streams import Stream
from greenroom.actors.caller.uploads import Outlets, Upload
from greenroom.actors.messages.queries import (
    Address,
    Answer,
    AnswerPart,
    AnswerQueries,
    AttachCaller,
    AttachCallerReply,
    ControlStreams,
    DetachCaller,
    FailedAnswer,
    FeedTaken,
    FeedWanted,
    LargeBytes,
    LeaseGranted,
    MayTryAgain,
    NotRun,
    PartedAnswer,
    Piece,
    Process,
    Query,
    RevokeLeases,
    RunEnded,
    StillRuns,
    StreamBegun,
    StreamEnded,
    StreamPart,
    SubmitQueries,
    part_arrived,
    put_together,
    status_of,
)
from greenroom.actors.runtime.loop import Callback, Loop, Outbox, Timer, nothing
from greenroom.core.errors import DeploymentUnavailableError, ReplicaUnavailableError, error_status
from greenroom.core.routing.retries import RetryBudget
from greenroom.core.routing.tickets import CANCELLED_STATUS, SOCKET

logger = logging.getLogger(__name__)
RESEND_S = 0.1
NO_PROXY_S = 30.0  # longer than any restart; a query waits no longer for a proxy with tables
# For queries that were with a proxy that died. It is larger than the router's budget: a query
# hardly ever kills a proxy, and one that takes long may see several die.
FIRST_REPEATS, MOST_REPEATS = 100, 1_000
CLOSED = "the connection to the system was closed"  # by this process, and for good


OnAnswer = Callable[[Answer | Stream], None]
OnUpload = Callable[[Upload], None]
_NO_PARTS: dict[int, list[LargeBytes]] = {}


class _Cancel(NamedTuple):
    query_id: int


def _weigh(item: _Entry | _Cancel) -> int:
    return 0 if isinstance(item, _Cancel) else len(item.query.call)


class _Incoming:
    """A stream that comes in: the stream's Source, which reports to the replica what was taken."""

    def __init__(self, caller: Caller, begun: StreamBegun, sender: Address) -> None:
        self.stream = Stream(begun, self)
        self._caller = caller
        self._query_id = begun.query_id
        pack = partial(_pack_control, caller.process.incarnation, begun.query_id)
        self._outbox = Outbox(caller.loop, sender, pack)

    def taken(self, size: int) -> None:
        """Tell the replica that so much was taken."""
        self._caller.loop.run(partial(self._outbox.put, size))

    def stop(self) -> None:
        """Cancel the query."""
        self._caller.loop.run(partial(self._caller.cancel, self._query_id))

    def report_stopped(self) -> None:
        """Tell the replica, which may have outlived the proxy that knew of the query."""
        self._outbox.put(None)


def _pack_control(incarnation: str, query_id: int, sizes: list[int | None]) -> ControlStreams:
    taken = sum(size for size in sizes if size is not None)
    return ControlStreams(
        incarnation=incarnation,
        taken=((query_id, taken),) if taken else (),
        stopped=(query_id,) if None in sizes else (),
    )


class _Entry:
    """A query that is not answered yet."""

    __slots__ = (
        "attempts",
        "died",
        "failed_at",
        "first",
        "incoming",
        "is_refused",
        "on_answer",
        "on_upload",
        "parts",
        "patience",
        "process",
        "process_at",
        "query",
        "resent",
        "runs_at",
        "sent",
        "submitted_at",
        "timer",
        "unwatch",
        "upload",
    )

    def __init__(self, query: Query, on_answer: OnAnswer, on_upload: OnUpload | None) -> None:
        self.query = query
        self.on_answer = on_answer
        self.on_upload = on_upload
        self.parts: dict[int, list[LargeBytes]] = _NO_PARTS  # of large answers, by their numbers
        self.sent = False
        self.resent = False  # it was sent before, and may have run
        self.attempts = 0  # replicas that have died with it under leases
        self.died = ""  # the last of them
        self.is_refused = False  # by a replica that had no room, under a lease
        self.failed_at = ""  # the replica that failed, and another may run it instead
        self.first: Answer | None = None  # that failure, while another runs it
        self.submitted_at = time.monotonic()
        self.incoming: _Incoming | None = None  # once its answer has begun to come in parts
        self.upload: Upload | None = None  # what follows it, once a replica wanted that
        self.process: Process | None = None  # the only replica that can still answer it
        self.process_at: Address | None = None
        self.patience: Timer | None = None  # runs while there is no proxy with tables
        self.runs_at: list[Address] = []  # replicas that run it for a router that is dead
        self.unwatch: Callback = nothing
        self.timer: Timer | None = None

    def take(self, item: AnswerPart | FeedTaken | StreamPart) -> None:
        """Take a part of the answer, or record what was taken of what follows the query."""
        if isinstance(item, StreamPart):
            if self.incoming is not None:
                self.incoming.stream.arrived(part_arrived(item))
        elif isinstance(item, FeedTaken):
            if self.upload is not None:
                self.upload.taken(item)
        else:
            if self.parts is _NO_PARTS:
                self.parts = {}
            self.parts.setdefault(item.number, []).append(item.content)

    def stop(self) -> None:
        """Tell its replica to stop; the replica may have outlived the proxy."""
        if self.upload is not None:
            self.upload.stop()
        if self.incoming is not None:
            self.incoming.report_stopped()

    def be_patient(self) -> None:
        """Stop the timer: a proxy with tables has the query, or soon will."""
        if self.patience is not None:
            self.patience.cancel()
            self.patience = None


class Caller:
    """A caller's queries and its proxy. All methods run on the loop's thread."""

    def __init__(self, loop: Loop, process: Process) -> None:
        self.loop = loop
        self.process = process
        self.ready = False
        self.left = False  # for good; may be read from any thread
        self.on_ready: Callable[[], None] = nothing
        self._ids = itertools.count(1)
        self._budget = RetryBudget(FIRST_REPEATS)
        self._entries: dict[int, _Entry] = {}
        self._outbox: Outbox | None = None
        self._proxy: Process | None = None
        self._proxy_address: Address | None = None
        self._outlets = Outlets(loop, process)
        self.leases = CallerLeases(loop, process, self._entries, self._ended_with_replica)

    def listen(self, on: Callable[[type, Callable[[Any, Address], None]], None]) -> None:
        """Take what comes for callers; ``on`` is a Port's."""
        on(AnswerQueries, self.answered)
        on(AttachCallerReply, lambda message, _: self.attached(message))
        on(LeaseGranted, lambda message, _: self.leases.granted(message))
        on(RevokeLeases, lambda message, _: self.leases.revoked(message))

    @property
    def is_idle(self) -> bool:
        """Return whether every query is answered."""
        return not self._entries

    def next_id(self) -> int:
        """Return an id for a query; callable from any thread."""
        return next(self._ids)

    # --- Queries ------------------------------------------------------------------------------

    def submit(self, query: Query, on_answer: OnAnswer, on_upload: OnUpload | None = None) -> None:
        """Send the query; ``on_answer`` gets one answer, or stream, unless it is cancelled.

        For a query that more follows, ``on_upload`` gets what to send that with, once a replica
        wants it.
        """
        entry = self._entries[query.id] = _Entry(query, on_answer, on_upload)
        self._budget.pay_in(max(MOST_REPEATS, len(self._entries)))
        if self.left:
            self._fail(entry, CLOSED)
            return
        if query.timeout_s is not None:
            if query.timeout_s <= 0:  # the query on whose behalf it is made has no time left
                self._time_out(query, "the time was up before it was sent")
                return
            entry.timer = self.loop.call_later(query.timeout_s, lambda: self._expired(query))
        sent = self.leases.send(query)
        if sent is None:
            self._submit(entry)
        elif sent is not query:
            self._limit(entry, sent)

    def _submit(self, entry: _Entry) -> None:
        """Send a query to the proxy."""
        if not self.ready:
            self._wait(entry)
        self._put(entry)

    def _limit(self, entry: _Entry, sent: Query) -> None:
        """Let a query take no longer than its backend lets it."""
        if entry.timer is not None:
            entry.timer.cancel()
        entry.query = sent
        entry.timer = self.loop.call_later(sent.timeout_s or 0.0, lambda: self._expired(sent))

    def cancel(self, query_id: int, status: int = CANCELLED_STATUS) -> None:
        """Forget a query and have it dropped wherever it is; harmless when it is answered."""
        query_id = self._present(query_id)
        entry = self._forget(query_id)
        if entry is None:
            return
        if not self.leases.cancel(query_id, status) and self._outbox is not None:
            self._outbox.put(_Cancel(query_id))
        entry.stop()

    def fail(self, query_id: int, answer: FailedAnswer) -> None:
        """Answer a query with this failure, and cancel it wherever it is."""
        query_id = self._present(query_id)
        entry = self._entries.get(query_id)
        if entry is not None:
            self.cancel(query_id, error_status(answer.kind))
            self._finish(entry, answer)

    def _present(self, query_id: int) -> int:
        """Return the id that a query has now."""
        return query_id if query_id in self._entries else -query_id

    def let_go(self, query_id: int) -> None:
        """Forget a query that may go on to its end."""
        self._forget(self._present(query_id))

    def leave(self, on_left: Callback) -> None:
        """Fail what is not answered, and have the proxy forget this caller; then ``on_left``."""
        self.left = True
        for entry in list(self._entries.values()):
            self._fail(entry, CLOSED)
        self.leases.leave()
        if self._proxy is None:
            on_left()
        else:
            detach = DetachCaller(incarnation=self.process.incarnation)
            self.loop.send(self._proxy_address, detach, on_left, on_left)

    # --- The proxy ----------------------------------------------------------------------------

    def met_proxy(self, address: Address, process: Process) -> None:
        """Use this proxy from now on, and send it everything that waits."""
        if process == self._proxy or self.left:
            return
        self.proxy_gone()
        self._proxy, self._proxy_address = process, address
        self.leases.follow(address, process)
        self._outbox = Outbox(
            self.loop, address, self._pack, on_failed=self._undelivered, weigh=_weigh
        )
        self.loop.send(address, AttachCaller(process=self.process, splits=True))
        for entry in list(self._entries.values()):
            if entry.process is None and entry.query.id not in self.leases:
                self._put(entry)

    def attached(self, message: AttachCallerReply) -> None:
        """Learn that the proxy has its route table, or that it does not know this caller."""
        if message.proxy != self._proxy:
            return
        if message.ready:
            self.ready = True
            for entry in self._entries.values():
                entry.be_patient()
            self.on_ready()
        else:
            address, process = self._proxy_address, message.proxy
            self.proxy_gone()
            self.met_proxy(address, process)

    def proxy_gone(self) -> None:
        """Keep what was with the proxy for the next one, unless it must not be sent again.

        A query that only one replica can answer needs no proxy any more.
        """
        self._proxy = self._outbox = None
        self.ready = False
        self.leases.orphaned()
        for entry in list(self._entries.values()):
            if entry.query.id in self.leases:
                continue
            if entry.process is not None:
                self._watch(entry, entry.process)
            elif entry.sent:
                self._send_again(entry)
            entry.sent = False
            if entry.patience is None:
                self._wait(entry)

    def _send_again(self, entry: _Entry) -> None:
        """Mark a query that may have run for its dead proxy, or fail it."""
        text = "the proxy died with the query under way"
        if entry.query.retryable is False:
            self._fail(entry, f"{text}; it may have run")
        elif not self._budget.take_out():
            self._fail(entry, f"{text}, and retries, limited to as many as queries, are used up")
        else:
            entry.resent = True

    def _ended_with_replica(self, query_id: int, replica: str) -> None:
        """Ask the proxy about a query whose replica died with it, under a lease."""
        entry = self._entries.get(query_id)
        if entry is None:
            return
        if entry.process is not None:  # an answer has begun: the proxy can only tell why it ends
            if not self.ready:
                self._fail(entry, "its replica died with the query under way")
                return
            entry.query = entry.query._replace(retryable=False)
        entry.attempts += bool(replica)
        entry.died = replica
        entry.parts = _NO_PARTS
        self._submit(entry)

    def _wait(self, entry: _Entry) -> None:
        """Let a query wait for a proxy with tables, for a limited time."""
        entry.be_patient()
        entry.patience = self.loop.call_later(NO_PROXY_S, partial(self._abandon, entry))

    def _abandon(self, entry: _Entry) -> None:
        if entry.process is None:  # else a replica has it, which needs no proxy any more
            error = DeploymentUnavailableError
            text = f"no proxy has had route tables for {NO_PROXY_S:g} s; see `greenroom status`"
            answer = FailedAnswer(entry.query.id, error.__name__, text, error.retry_after_s)
            self.fail(entry.query.id, answer)

    def _watch(self, entry: _Entry, replica: Process) -> None:
        """Notice the end of a query's replica: the proxy that would report it is dead."""
        entry.unwatch()
        entry.unwatch = self.loop.watch_process(
            replica,
            lambda: self._fail(entry, "its replica died with the query under way"),
            entry.process_at,
        )

    def _put(self, entry: _Entry) -> None:
        if self._outbox is not None:
            self._outbox.put(entry)

    def _pack(self, items: list[_Entry | _Cancel]) -> SubmitQueries:
        queries, cancelled, resent, lost, refused, failed = [], [], [], [], [], []
        died = []
        for item in items:
            if isinstance(item, _Cancel):
                cancelled.append(item.query_id)
            elif item.query.id in self._entries:
                item.sent = True
                queries.append(item.query)
                if item.resent:
                    resent.append(item.query.id)
                if item.attempts:
                    lost.append((item.query.id, item.attempts))
                    died.append((item.query.id, item.died))
                elif item.is_refused and not item.resent:
                    refused.append(item.query.id)
                if item.first is not None:
                    took_s = time.monotonic() - item.submitted_at
                    failed.append((item.query.id, item.failed_at, took_s))
        return SubmitQueries(
            incarnation=self.process.incarnation,
            queries=tuple(queries),
            cancelled=tuple(cancelled),
            resent=tuple(resent),
            lost=tuple(lost),
            refused=tuple(refused),
            failed=tuple(failed),
            died=tuple(died),
        )

    def _undelivered(self, items: list[_Entry | _Cancel]) -> None:
        """React to a failed delivery; the proxy may have processed it all the same."""
        for item in items:
            if isinstance(item, _Cancel) or item.query.id not in self._entries:
                continue
            if item.query.retryable is False:
                self._fail(
                    item, "the proxy did not take the query, or died with it; it may have run"
                )
            else:  # the budget pays once, at the proxy's death if that was the reason
                item.resent = True
                self.loop.call_later(RESEND_S, partial(self._resend, item))

    def _resend(self, entry: _Entry) -> None:
        if entry.query.id in self._entries:
            self._put(entry)

    # --- Answers, and what comes before them --------------------------------------------------

    def answered(self, message: AnswerQueries, sender: Address) -> None:
        """Pass on answers, except second ones and those to earlier processes of this address."""
        if message.incarnation != self.process.incarnation:
            return
        for sent in message.answers:
            if isinstance(sent, Piece):
                self.loop.guarded(self._piece_arrived, sent, sender)
                continue
            answer = self._joined(sent) if isinstance(sent, PartedAnswer) else sent
            entry = self._entries.get(answer.query_id)
            if entry is not None and entry.failed_at and entry.first is None:
                self._try_again(entry, answer)
                continue
            entry = self._forget(answer.query_id)
            if entry is not None:
                if entry.incoming is not None and not isinstance(answer, StreamEnded):
                    entry.incoming.report_stopped()  # another replica may have answered
                self._finish(entry, answer)
            self.leases.ended(answer.query_id, status_of(answer))  # when the client has it

    def _try_again(self, entry: _Entry, answer: Answer) -> None:
        """Have another replica run a query that has failed at one.

        It gets another id, the negative one: the router may not have heard yet that it has ended.
        """
        self.leases.ended(answer.query_id, status_of(answer))
        entry.first, entry.parts = answer, _NO_PARTS
        del self._entries[answer.query_id]
        entry.query = entry.query._replace(id=-answer.query_id)
        self._entries[entry.query.id] = entry
        self._submit(entry)

    def _finish(self, entry: _Entry, answer: Answer) -> None:
        """Pass on the answer; a callback that raises does not keep others from theirs.

        Of a query that was tried again in vain the first failure says more.
        """
        if entry.first is not None and status_of(answer) >= 500:
            answer = entry.first
        finish = entry.on_answer if entry.incoming is None else entry.incoming.stream.ended
        self.loop.guarded(finish, answer)

    def _joined(self, sent: PartedAnswer) -> Answer:
        entry = self._entries.get(sent.answer.query_id)
        return put_together(sent, () if entry is None else entry.parts.get(sent.number, ()))

    def _piece_arrived(self, item: Piece, sender: Address) -> None:
        entry = self._entries.get(item.query_id)
        if isinstance(item, NotRun | RunEnded):
            self._not_answered(entry, item)
        elif isinstance(item, MayTryAgain):
            if entry is not None:
                entry.failed_at = item.replica
        elif isinstance(item, FeedWanted):
            self._upload_wanted(entry, item, sender)
        elif entry is None:
            if isinstance(item, StreamBegun | StillRuns):
                self._stop_at(sender, item.query_id)
        elif isinstance(item, StreamBegun):
            self._begun(entry, item, sender)
        elif isinstance(item, StillRuns):
            if (
                entry.process is None and sender not in entry.runs_at
            ):  # else the replica has it for good
                entry.runs_at.append(sender)
        else:
            entry.take(item)

    def _not_answered(self, entry: _Entry | None, item: NotRun | RunEnded) -> None:
        if isinstance(item, RunEnded):
            self.leases.ended(item.query_id, 0)
            return
        had_it = item.query_id in self.leases
        self.leases.refused(item.query_id)
        if had_it and entry is not None:
            entry.is_refused = True
            self._submit(entry)

    def _begun(self, entry: _Entry, begun: StreamBegun, sender: Address) -> None:
        if entry.incoming is not None:  # it ran twice, because its first replica died at once
            text = "its replica died with its answer under way"
            self._stop_at(sender, begun.query_id)
            self.fail(begun.query_id, _unavailable(begun.query_id, text))
            return
        entry.process, entry.process_at = begun.process, sender
        entry.incoming = _Incoming(self, begun, sender)
        if entry.query.follows == SOCKET and entry.timer is not None:
            entry.timer.cancel()  # it was for the handshake; a conversation has no time limit
        entry.on_answer(entry.incoming.stream)

    def _stop_at(self, replica: Address, query_id: int) -> None:
        """End a query at a replica when its answer is not wanted; it might go on for ever."""
        incarnation = self.process.incarnation
        self.loop.send(replica, ControlStreams(incarnation=incarnation, stopped=(query_id,)))

    def _upload_wanted(self, entry: _Entry | None, wanted: FeedWanted, sender: Address) -> None:
        if entry is None or entry.on_upload is None:  # there is nothing left to send
            self._outlets.stop(wanted, sender)
            return
        upload = entry.upload or self._make_upload(entry.query)
        if not upload.begin(wanted, sender):
            text = "its replica died when more of what followed the query was gone than is kept"
            self._outlets.stop(wanted, sender)
            self.fail(wanted.query_id, _unavailable(wanted.query_id, text))
            return
        entry.process, entry.process_at = wanted.process, sender
        if entry.upload is None:
            entry.upload = upload
            entry.on_upload(upload)

    def _make_upload(self, query: Query) -> Upload:
        query_id = query.id

        def fail(kind: str, text: str) -> None:
            self.fail(query_id, FailedAnswer(query_id, kind, text))

        return Upload(self._outlets, fail, lambda: self.let_go(query_id), query.follows)

    # --- Ends without an answer ---------------------------------------------------------------

    def _fail(self, entry: _Entry, text: str) -> None:
        if self._forget(entry.query.id) is not None:
            self.leases.cancel(entry.query.id, ReplicaUnavailableError.http_status)
            entry.stop()
            self._finish(entry, _unavailable(entry.query.id, text))

    def _expired(self, query: Query) -> None:
        self._time_out(query, f"no answer within {query.timeout_s:.6g} s")

    def _time_out(self, query: Query, text: str) -> None:
        self.fail(query.id, FailedAnswer(query.id, "QueryTimeoutError", text))

    def _forget(self, query_id: int) -> _Entry | None:
        entry = self._entries.pop(query_id, None)
        if entry is not None:
            if entry.unwatch is not nothing:
                entry.unwatch()
            if entry.patience is not None:
                entry.patience.cancel()
            if entry.timer is not None:
                entry.timer.cancel()
            if entry.upload is not None:
                entry.upload.close()
            for replica in entry.runs_at:
                self._stop_at(replica, query_id)
        return entry


def _unavailable(query_id: int, text: str) -> FailedAnswer:
    return FailedAnswer(query_id, "ReplicaUnavailableError", text, 1.0)
