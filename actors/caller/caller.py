"""The caller: queries on their way to replicas, until they are answered.

Theory of operation. A caller (an HTTP worker, a script with handles, a replica whose code calls
handles) keeps every query until its first answer, and ignores later answers to it. A query goes
straight to a replica where a lease has room (held_leases.py), else to the proxy (proxy_link.py), as
does one that its replica refused, failed or took along when it died. Answers come straight from
replicas.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from greenroom.actors.caller.held_leases import CallerLeases
from greenroom.actors.caller.open_queries import Exchange, OnAnswer, OnUpload, OpenQuery, stop_at
from greenroom.actors.caller.proxy_link import REPLICA_DIED, ProxyLink, unavailable
from greenroom.actors.caller.uploads import Outlets, Upload
from greenroom.actors.messages.queries import (
    Address,
    Answer,
    AnswerQueries,
    AttachCallerReply,
    FailedAnswer,
    FeedWanted,
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
    put_together,
    status_of,
)
from greenroom.actors.runtime.loop import GATHERED, Callback, Loop, nothing
from greenroom.core.errors import CANCELLED_STATUS, error_status
from greenroom.core.routing.tickets import SOCKET

CLOSED = "the connection to the system was closed"  # by this process, and for good


class Caller:
    """A caller's ``queries``, by id. All methods run on the loop's thread.

    ``on_ready`` is called for each proxy that has its tables.
    """

    def __init__(self, loop: Loop, process: Process, on_ready: Callback = nothing) -> None:
        self.loop = loop
        self.process = process
        self.left = False  # for good; may be read from any thread
        self.next_id = itertools.count(1).__next__  # for a query; callable from any thread
        self._on_ready = on_ready
        self.queries: dict[int, OpenQuery] = {}
        self._outlets = Outlets(loop, process)
        self._proxy = ProxyLink(loop, process, self.queries, self._fail)
        self.leases = CallerLeases(loop, process, self._proxy, self.queries, self._lost)

    def listen(self, on: Callable[[type, Callable[[Any, Address], None]], None]) -> None:
        """Take what comes for callers; ``on`` is a Port's."""
        on(AnswerQueries, self.answered)
        on(AttachCallerReply, lambda message, _: self.attached(message))
        on(LeaseGranted, lambda message, _: self.leases.granted(message))
        on(RevokeLeases, lambda message, _: self.leases.revoked(message))

    @property
    def is_idle(self) -> bool:
        """Return whether every query is answered."""
        return not any(entry.is_wanted for entry in self.queries.values())

    # --- Queries ------------------------------------------------------------------------------

    def submit(self, query: Query, on_answer: OnAnswer, on_upload: OnUpload | None = None) -> None:
        """Send the query; ``on_answer`` gets one answer, or stream, unless it is cancelled.

        For a query that more follows, ``on_upload`` gets what to send that with, once a replica
        wants it.
        """
        now, limit_s = time.monotonic(), query.timeout_s
        if self.left:
            self.loop.guarded(on_answer, unavailable(query.id, CLOSED))
            return
        if limit_s is not None and limit_s <= 0:  # the query on whose behalf it is made has none
            self.loop.guarded(on_answer, _timed_out(query, "the time was up before it was sent"))
            return
        entry = self.queries[query.id] = OpenQuery(query, on_answer, on_upload, now)
        share = self.leases.take(query, now)
        if share is None:
            self._proxy.put(entry)
        else:
            entry.share, own_s = share, share.lease.timeout_s
            if own_s is not None and (limit_s is None or own_s < limit_s):
                limit_s, entry.query = own_s, query._replace(timeout_s=own_s)
            # The only query waits for no other that could join it.
            share.at.lane.put(entry, GATHERED if len(self.queries) > 1 else 1)
        if limit_s is not None:
            entry.timer = self.loop.call_later(limit_s, partial(self._time_up, entry, limit_s))

    def _time_up(self, entry: OpenQuery, limit_s: float) -> None:
        self._fail(entry, _timed_out(entry.query, f"no answer within {limit_s:.6g} s"))

    def cancel(self, query_id: int) -> None:
        """Forget a query and have it dropped wherever it is; harmless when it is answered."""
        entry = self.queries.get(query_id) or self.queries.get(-query_id)  # see _try_again
        if entry is not None:
            self._cancel(entry)

    def _cancel(self, entry: OpenQuery) -> None:
        if entry.is_wanted:
            self._drop(entry, CANCELLED_STATUS)

    def _drop(self, entry: OpenQuery, status: int) -> Callable[[Any], None]:
        """End a query wherever it is, with this status; return what gets its answer."""
        if entry.exchange is not None:
            entry.exchange.end_at_replica()
        on_answer = self._let_go(entry)
        if entry.share is None:
            self._proxy.cancel(entry.query.id)
        else:
            self.leases.cancel(entry, status)
        return on_answer

    def _let_go(self, entry: OpenQuery) -> Callable[[Any], None]:
        """Forget a query, which may go on to its end; return what gets its answer."""
        if entry.share is None:
            self.queries.pop(entry.query.id, None)
        return entry.end()

    def _fail(self, entry: OpenQuery, answer: FailedAnswer) -> None:
        """Answer a query with this failure, and cancel it wherever it is."""
        if entry.is_wanted:
            self.loop.guarded(self._drop(entry, error_status(answer.kind)), answer)

    def leave(self, on_left: Callback) -> None:
        """Fail what is not answered, and have the proxy forget this caller; then ``on_left``."""
        self.left = True
        for entry in list(self.queries.values()):
            self._fail(entry, unavailable(entry.query.id, CLOSED))
        self.leases.leave()
        self._proxy.leave(on_left)

    # --- The proxy ----------------------------------------------------------------------------

    def met_proxy(self, address: Address, process: Process) -> None:
        """Use this proxy from now on."""
        if process != self._proxy.process and not self.left:
            self.proxy_gone()
            self.leases.renew()
            self._proxy.meet(address, process)

    def attached(self, message: AttachCallerReply) -> None:
        """Learn that the proxy has its route table, or that it does not know this caller."""
        address, process = self._proxy.address, message.proxy
        if process != self._proxy.process:
            return
        if message.ready:
            self._proxy.has_tables()
            self._on_ready()
        else:
            self.proxy_gone()
            self.met_proxy(address, process)

    def proxy_gone(self) -> None:
        """Keep what was with the proxy for the next one, and leases for a while."""
        self._proxy.gone()
        self.leases.orphaned()

    # --- Answers, and what comes before them --------------------------------------------------

    def answered(self, message: AnswerQueries, sender: Address) -> None:
        """Pass on answers, except second ones and those to earlier processes of this address.

        A callback that raises does not keep others from their answers.
        """
        if message.incarnation != self.process.incarnation:
            return
        for sent in message.answers:
            if isinstance(sent, Piece):
                self.loop.guarded(self._piece_arrived, sent, sender)
                continue
            answer = self._joined(sent) if isinstance(sent, PartedAnswer) else sent
            entry = self.queries.pop(answer.query_id, None)
            if entry is None:
                continue
            is_wanted, exchange = entry.is_wanted, entry.exchange
            if is_wanted:
                if exchange is not None:
                    if exchange.fails_with(answer):
                        self._try_again(entry, exchange, answer)
                        continue
                    if not isinstance(answer, StreamEnded):  # another replica may have answered
                        exchange.stop_stream()
                self.loop.guarded(entry.end(), answer)
            if entry.share is not None:  # when the client has it
                self.leases.free(entry, status_of(answer) if is_wanted else 0)

    def _joined(self, sent: PartedAnswer) -> Answer:
        entry = self.queries.get(sent.answer.query_id)
        exchange = None if entry is None else entry.exchange
        return put_together(sent, () if exchange is None else exchange.parts.get(sent.number, ()))

    def _try_again(self, entry: OpenQuery, exchange: Exchange, first: Answer) -> None:
        """Have another replica run a query that has failed at one; the first failure says more.

        It gets another id, the negative one: the router may not have heard yet that it has ended.
        """

        def answered(answer: Any) -> None:
            on_answer(first if status_of(answer) >= 500 else answer)

        on_answer, entry.on_answer = entry.on_answer, answered
        if entry.share is not None:
            self.leases.free(entry, status_of(first))
        entry.failed_at = exchange.failing_at
        entry.query = entry.query._replace(id=-entry.query.id)
        self.queries[entry.query.id] = entry
        self._to_proxy(entry)

    def _to_proxy(self, entry: OpenQuery) -> None:
        """Leave a query that its replica did not answer to the router."""
        entry.is_sent = False
        if entry.exchange is not None:
            entry.exchange.begin_anew()
        self._proxy.put(entry)

    def _lost(self, entry: OpenQuery, replica: str) -> None:
        """Ask the proxy about a query whose replica died with it, or before it, under a lease."""
        if entry.replica is not None:  # an answer has begun: the proxy can only tell why it ends
            if not self._proxy.is_ready:
                self._fail(entry, unavailable(entry.query.id, REPLICA_DIED))
                return
            entry.query = entry.query._replace(retryable=False)
        entry.died = replica
        self._to_proxy(entry)

    def _piece_arrived(self, item: Piece, sender: Address) -> None:
        entry = self.queries.get(item.query_id)
        if isinstance(item, NotRun | RunEnded):
            if entry is None or entry.share is None:
                return
            if isinstance(item, RunEnded):
                self.leases.free(entry, 0)
                return
            self.leases.refused(entry)
            if entry.is_wanted:
                entry.is_refused = True
                self._to_proxy(entry)
        elif entry is None or not entry.is_wanted:
            self._not_wanted(item, sender)
        else:
            exchange = entry.exchange
            if exchange is None:
                cancel = partial(self._cancel, entry)
                exchange = Exchange(self.loop, self.process.incarnation, cancel)
                entry.exchange = exchange
            if isinstance(item, MayTryAgain):
                exchange.failing_at = "" if entry.failed_at else item.replica
            elif isinstance(item, FeedWanted):
                self._upload_wanted(entry, exchange, item, sender)
            elif isinstance(item, StreamBegun):
                self._begun(entry, exchange, item, sender)
            else:
                exchange.take(item, sender)

    def _not_wanted(self, item: Piece, sender: Address) -> None:
        if isinstance(item, FeedWanted):
            self._outlets.stop(item, sender)
        elif isinstance(item, StreamBegun | StillRuns):
            stop_at(self.loop, self.process.incarnation, sender, item.query_id)

    def _begun(
        self, entry: OpenQuery, exchange: Exchange, begun: StreamBegun, sender: Address
    ) -> None:
        if exchange.stream is not None:  # it ran twice, because its first replica died at once
            stop_at(self.loop, self.process.incarnation, sender, begun.query_id)
            text = "its replica died with its answer under way"
            self._fail(entry, unavailable(entry.query.id, text))
            return
        stream = exchange.begin(begun, sender)
        self._proxy.watch(entry)
        if entry.query.follows == SOCKET and entry.timer is not None:
            entry.timer.cancel()  # it was for the handshake; a conversation has no time limit
        entry.on_answer(stream)

    def _upload_wanted(
        self, entry: OpenQuery, exchange: Exchange, wanted: FeedWanted, sender: Address
    ) -> None:
        if entry.on_upload is None:  # there is nothing to send
            self._not_wanted(wanted, sender)
            return

        def fail(kind: str, text: str) -> None:
            self._fail(entry, FailedAnswer(entry.query.id, kind, text))

        def let_go() -> None:
            self._let_go(entry)

        known = exchange.upload
        upload = known or Upload(self._outlets, fail, let_go, entry.query.follows)
        if not upload.begin(wanted, sender):
            self._outlets.stop(wanted, sender)
            text = "its replica died when more of what followed the query was gone than is kept"
            self._fail(entry, unavailable(entry.query.id, text))
            return
        exchange.replica, exchange.at = wanted.process, sender
        self._proxy.watch(entry)
        if known is None:
            exchange.upload = upload
            entry.on_upload(upload)


def _timed_out(query: Query, text: str) -> FailedAnswer:
    return FailedAnswer(query.id, "QueryTimeoutError", text)
