"""The data side of a replica: queries in, answers out, on the event loop of the user's code.

Theory of operation. A replica is a process with two places in the actor system. The actor, on the
main thread, takes the controller's orders, and answers them whatever user code does. The data plane
is the other one, with an address of its own on user code's event loop: a query goes from the socket
to the user's coroutine, and its answer back to a socket, without changing threads. User code that
blocks its loop delays its own queries, and nothing else. :class:`Queries` keeps a :class:`Run` for
each query; answers wait in an outbox for each caller, reports of them in one for each proxy.

A query's slot is free when user code has returned. The router keeps the query until it hears that
the caller has the answer: if this process dies in between, it goes to another replica.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from greenroom.actors.caller import client as query_client
from greenroom.actors.caller.caller import Caller
from greenroom.actors.caller.streams import MOST_JOINED, NobodyListensError, Parts, Sender
from greenroom.actors.messages.closing import RESTARTING, close_frame
from greenroom.actors.messages.control import MeetProxy
from greenroom.actors.messages.queries import (
    END,
    LARGE,
    MORE,
    Address,
    Answer,
    AnswerPart,
    AnswerQueries,
    Assignment,
    CloseLeases,
    ControlStreams,
    FailedAnswer,
    FeedQueries,
    FeedTaken,
    FeedWanted,
    HttpAnswer,
    MayTryAgain,
    NotRun,
    OpenLease,
    PartedAnswer,
    Piece,
    Process,
    QueriesFinished,
    Query,
    RunEnded,
    RunLeased,
    RunQueries,
    StillRuns,
    StreamBegun,
    StreamPart,
    in_parts,
    part_arrived,
    part_travelling,
    size_of,
    status_of,
)
from greenroom.actors.replica import context as user_context, metrics
from greenroom.actors.replica.comparisons import Comparisons, ResponseSampler
from greenroom.actors.replica.context import Reply
from greenroom.actors.replica.user_code import UserCode
from greenroom.actors.runtime.loop import (
    GATHERED,
    GATHERED_PARTS,
    MAX_BYTES_UNDER_WAY,
    Callback,
    Lane,
    Loop,
    Outbox,
    Outboxes,
    Timer,
)
from greenroom.actors.runtime.port import Port
from greenroom.core.routing.outliers import has_failed
from greenroom.core.routing.retries import may_retry
from greenroom.core.routing.tickets import SOCKET

REPORT_S = 0.002  # what the router does not wait for goes along with what comes within that time
ORPHANED_S = 10.0  # how often callers hear which of their queries run without a router
LATE_S = 1.0  # after its deadline a query is ended here; until then that is the router's

PARTS_UNDER_WAY = 2_000_000  # bytes, which other answers to the same caller have to wait for

_Item = Answer | PartedAnswer | Piece
_Report = tuple[str, Any]  # a field of QueriesFinished, and an item of it


class Run(Reply):
    """One query in user code, and how its answer travels."""

    __slots__ = (
        "began_at",
        "is_delivered",
        "is_given_back",
        "is_leased",
        "is_undelivered",
        "key",
        "proxy",
        "queries",
        "sender",
        "status",
        "stream_key",
        "timer",
        "upload",
        "upload_number",
    )

    def __init__(self, queries: Queries, proxy: str, assignment: Assignment) -> None:
        timeout_s = assignment.timeout_s
        deadline_at = None if timeout_s is None else time.monotonic() + timeout_s
        super().__init__(assignment, deadline_at)
        self.began_at = time.monotonic()
        self.queries = queries
        self.proxy = proxy  # its incarnation; its caller's, for one under a lease
        self.is_leased = proxy == assignment.caller_incarnation
        self.key = proxy, assignment.ticket
        self.stream_key = assignment.caller_incarnation, assignment.query.id  # for its caller
        self.sender: Sender | None = None
        self.upload: Parts | None = None  # what follows it
        self.upload_number = 0
        self.status = 0  # of its answer
        self.is_given_back = False
        self.is_delivered = False
        self.is_undelivered = False  # on the way to its caller
        self.timer: Timer | None = None
        self.extra_headers = ()

    def begin(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """Begin an answer in parts."""
        self._check_runs()
        process = self.queries.process
        begun = StreamBegun(self.assignment.query.id, status, headers + self.extra_headers, process)
        self.sender = self.queries.begun(self, begun)
        if self.assignment.query.follows == SOCKET:
            self.deadline_at = None  # it was for the handshake

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """Send the next part."""
        if self.sender is not None:
            await self.sender.send(data, ends)
        else:  # of a copy for a shadow; a generator that awaits nothing must not have the loop
            self._check_runs()
            await asyncio.sleep(0)

    def _check_runs(self) -> None:
        """Raise NobodyListensError in a task that user code has left running."""
        if self.has_ended:
            raise NobodyListensError("the query has ended")

    def answer(self, answer: Answer) -> None:
        """Answer it; a second answer is dropped, and one that comes after the end."""
        if not (self.status or self.has_ended):
            self.status = status_of(answer)
            if self.extra_headers and isinstance(answer, HttpAnswer | FailedAnswer):
                answer = answer._replace(headers=(*answer.headers, *self.extra_headers))
            self.queries.answered(self, answer)

    def give_back(self) -> bool:
        """See :meth:`Reply.give_back`."""
        self.is_given_back = not self.status and self.sender is None
        return self.is_given_back

    def ended_by_caller(self) -> None:
        """Note that the last part that follows is here: a WebSocket's client reads no more."""
        if self.sender is not None and self.assignment.query.follows == SOCKET:
            self.sender.close()

    def end(self) -> None:
        """Note that user code has returned."""
        self.has_ended = True
        self.queries.ended(self)


class Queries:
    """Runs queries for any proxy, and answers their callers directly.

    All on user code's loop, but for ``limit``, ``accepting``, ``is_draining``, which the replica's
    main thread sets, and ``running``, ``undelivered``, which it reads.
    """

    def __init__(
        self,
        port: Port,
        user_code: UserCode,
        tag: str,
        backend: str,
        limit: int,
        comparisons: Comparisons,
    ) -> None:
        self.limit = limit  # max_ongoing_requests
        self.retries_failures = False
        self.retryable: bool | None = None  # by its deployment's word
        self.accepting = False
        self.is_draining = False
        self.running = 0  # queries in user code; never above the limit
        self.served = 0  # queries that have ended
        self.undelivered = 0
        self._port = port
        self._loop = port.loop
        self.process = port.process
        self._incarnation = port.process.incarnation
        self._user_code = user_code
        self._tag = tag
        self._comparisons = comparisons
        self._copies = ResponseSampler(
            port.loop,
            port.process.incarnation,
            backend,
            lambda: self.running > 0,
            comparisons.arrived,
        )
        self._answers = Outboxes[Outbox]()  # by the caller's incarnation
        self._leased = Outboxes[Lane]()  # the same, for queries under leases
        self._parted = Outboxes[Outbox]()  # the same, for large answers: others go in between
        self._parted_numbers = itertools.count(int(secrets.token_hex(7), 16))
        # By the proxy's incarnation. An idle one is kept as long as its proxy lives, or has queries
        # here: what is not reported of them takes their slots for good.
        self._reports: dict[str, Outbox] = {}
        self._runs: dict[tuple[str, int], Run] = {}  # by key
        self.streams: dict[tuple[str, int], Run] = {}  # by the caller's incarnation and query id
        self._orphaned: dict[tuple[str, int], Run] = {}  # the same, of those whose router is dead
        self._orphaned_timer: Timer | None = None
        self._proxies: set[str] = set()  # incarnations of those whose end will be noticed
        self.leases: dict[str, OpenLease] = {}  # open ones, by name
        self._fenced: set[str] = set()  # the names of others, that are to be refused if they come
        self._near_proxy = ""  # the incarnation of the one that may grant leases
        # Watched callers under leases, by incarnation: what unwatches.
        self._lessees: dict[str, Callback] = {}
        self._leaving: set[str] = set()  # those of them that have queries here, and no lease
        self._uploads: dict[int, Run] = {}  # by the number of its FeedWanted
        self._upload_numbers = itertools.count(1)
        self._uploaders: dict[str, Callback] = {}  # watched callers, by incarnation: what unwatches
        self._caller = caller = Caller(port.loop, port.process)
        query_client.install(query_client.CallerClient(caller))
        user_context.on_models_changed(self._models_changed)
        port.on(RunQueries, self._run)
        port.on(FeedQueries, self._take_uploads)
        port.on(ControlStreams, self._control)
        port.on(MeetProxy, self._met_proxy)
        caller.listen(port.on)
        port.on(OpenLease, self._open_lease)
        port.on(CloseLeases, self._close_leases)
        port.on(RunLeased, self._run_leased)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Take newer settings; callable from any thread."""
        self.limit = config["max_ongoing_requests"]
        self.retries_failures = config.get("retry_failures", False)
        self.retryable = config.get("retryable")

    @property
    def loop(self) -> Loop:
        """The loop that all this runs on."""
        return self._loop

    @property
    def address(self) -> Address:
        """Where proxies send queries."""
        return self._port.address

    def report_comparisons(self) -> None:
        """Report all that comparisons have found; callable from any thread."""
        self._loop.post(self._comparisons.report)

    def report_used(self) -> None:
        """Report what became of queries of handles under leases; callable from any thread."""
        self._loop.post(self._caller.leases.report)

    # --- Proxies ------------------------------------------------------------------------------

    def _met_proxy(self, message: MeetProxy, _sender: Address) -> None:
        """Send this proxy reports of its queries; a near one also gets the queries of handles."""
        if message.is_near:
            self._caller.met_proxy(message.proxy, message.process)
            self._near_proxy = proxy = message.process.incarnation
            self.leases = {name: it for name, it in self.leases.items() if it.proxy == proxy}
            self._fenced = {name for name in self._fenced if name.startswith(f"{proxy}/")}
            self._unwatch_lessees()
        if message.process.incarnation not in self._reports:
            self._meet(message.process, message.proxy)

    def _meet(self, process: Process, address: Address) -> None:
        proxy = process.incarnation
        known = self._proxies | {run.proxy for run in self._runs.values()}
        for gone in [each for each in self._reports if each not in known]:
            del self._reports[gone]
        self._reports[proxy] = self._make_outbox(proxy, address)
        if proxy not in self._proxies:
            self._proxies.add(proxy)
            self._loop.watch_process(process, partial(self._proxy_died, proxy), address)
        if models := user_context.model_ids():
            self._report(proxy, ("models", models))

    def _proxy_died(self, proxy: str) -> None:
        """Let callers know where their queries run: only they can end them now."""
        self._proxies.discard(proxy)
        for run in [run for run in self._runs.values() if run.proxy == proxy]:
            if run.assignment.caller is None:
                self.cancel(run)
            elif not run.status:
                self._orphaned[run.stream_key] = run
        self._report_orphaned()

    def _report_orphaned(self) -> None:
        """Repeat this: it is how the death of a caller without a router is noticed."""
        if self._orphaned_timer is not None:
            self._orphaned_timer.cancel()
            self._orphaned_timer = None
        for run in self._orphaned.values():
            if not run.status:
                self._put(StillRuns(run.assignment.query.id), run)
        if self._orphaned:
            self._orphaned_timer = self._loop.call_later(ORPHANED_S, self._report_orphaned)

    def _models_changed(self) -> None:
        """Send all proxies the models that are here; callable from any thread."""

        def report() -> None:
            for proxy in list(self._reports):  # one that cannot be reached is forgotten
                self._report(proxy, ("models", user_context.model_ids()))

        self._loop.post(report)

    # --- Queries ------------------------------------------------------------------------------

    def _run(self, message: RunQueries, sender: Address) -> None:
        """Run what there is room for, reject the rest."""
        if message.incarnation != self._incarnation:
            return  # meant for a dead process whose address this one has
        proxy = message.proxy.incarnation
        if proxy not in self._reports:
            self._meet(message.proxy, sender)
        room = max(self.limit - self.running, 0) if self.accepting else 0
        # A router that could not reach this replica for a while sends what it had here again.
        assignments = [a for a in message.assignments if (proxy, a.ticket) not in self._runs]
        self.running += min(room, len(assignments))
        for assignment in assignments[:room]:
            self._begin(proxy, assignment)
        for assignment in assignments[room:]:
            self._report(proxy, ("rejected", assignment.ticket))
        for ticket in message.cancelled:
            self._report_cut_off(self._runs.get((proxy, ticket)))
            self._user_code.cancel((proxy, ticket))
        for ticket, places in message.compared:
            key = (proxy, ticket)
            self._copies.meet(key, places, has_answer=key not in self._runs)

    def _begin(self, source: str, assignment: Assignment) -> None:
        run = Run(self, source, assignment)
        self._runs[run.key] = run
        if assignment.query.follows:
            self._want(run, assignment.query)
        if assignment.timeout_s is not None:
            delay_s = assignment.timeout_s + LATE_S
            run.timer = self._loop.call_later(delay_s, partial(self._late, run))
        self._user_code.run(run)

    # --- Leases: see greenroom.core.routing.leases ----------------------------------------------

    def _open_lease(self, message: OpenLease, sender: Address) -> None:
        """Let a caller send queries by itself, and notice its end: its router may be dead then."""
        if message.incarnation != self._incarnation or message.proxy != self._near_proxy:
            return
        if message.lease in self._fenced:
            self._fenced.discard(message.lease)
            return
        caller = message.caller.incarnation
        self.leases[message.lease] = replace(message, caller_address=pickle.dumps(sender))
        if caller not in self._lessees:
            gone = partial(self._lessee_gone, caller)
            self._lessees[caller] = self._loop.watch_process(message.caller, gone)

    def _lessee_gone(self, caller: str) -> None:
        self._lessees.pop(caller, None)
        self._leaving.discard(caller)
        self._leased.pop(caller, None)
        self.leases = {
            name: it for name, it in self.leases.items() if it.caller.incarnation != caller
        }
        for run in [run for run in self._runs.values() if run.proxy == caller]:
            self.cancel(run)

    def _close_leases(self, message: CloseLeases, _sender: Address) -> None:
        if message.incarnation == self._incarnation:
            for name in message.leases:
                if self.leases.pop(name, None) is None and message.is_fence:
                    self._fenced.add(name)
            self._unwatch_lessees()

    def _unwatch_lessees(self) -> None:
        """Stop watching callers that have neither a lease nor a query here.

        A process may open and close many connections, each of them a caller, before it ends.
        """
        without = self._lessees.keys() - {it.caller.incarnation for it in self.leases.values()}
        self._leaving = without & {run.proxy for run in self._runs.values() if run.is_leased}
        for caller in without - self._leaving:
            self._lessees.pop(caller)()

    def _run_leased(self, message: RunLeased, sender: Address) -> None:
        """Run what comes under open leases while there is room, refuse the rest."""
        if message.incarnation != self._incarnation:
            return
        caller, refused = message.caller, []
        for name, query in message.queries:
            lease = self.leases.get(name)
            if lease is None or not self.accepting or self.running >= self.limit:
                refused.append(NotRun(query.id))
                continue
            self.running += 1
            assignment = Assignment(
                query.id,
                query,
                lease.caller_address,
                caller,
                lease.endpoint,
                lease.route,
                query.timeout_s,
            )
            self._begin(caller, assignment)
        if refused:
            answer = AnswerQueries(incarnation=caller, answers=tuple(refused))
            self._loop.send(sender, answer)
        for query_id in message.cancelled:
            self._user_code.cancel((caller, query_id))

    def _late(self, run: Run) -> None:
        """End a query whose time was up a while ago: the router that would have has died."""
        if run.status or run.is_cancelled or run.deadline_at is None:
            return
        text = f"no answer within {run.assignment.timeout_s:.6g} s"
        run.answer(FailedAnswer(run.assignment.query.id, "QueryTimeoutError", text))
        self.cancel(run)

    def _report_cut_off(self, run: Run | None) -> None:
        """Tell the caller of a stream that the router ended it: it may have lost the caller."""
        if run is None or run.sender is None or run.status or run.assignment.caller is None:
            return
        text = "the answer was ended midway by the router, which may have lost its caller"
        answer = FailedAnswer(run.assignment.query.id, "RequestCancelledError", text)
        message = AnswerQueries(incarnation=run.assignment.caller_incarnation, answers=(answer,))
        self._loop.send(pickle.loads(run.assignment.caller), message)

    def close_sockets(self) -> None:
        """Close all WebSockets, as this replica is to stop; callable from any thread."""

        def close() -> None:
            for run in list(self._uploads.values()):
                self._close_socket(run)

        self._loop.post(close)

    def _close_socket(self, run: Run) -> None:
        query = run.assignment.query
        if query.follows != SOCKET or run.upload is None:
            return
        frame = close_frame(RESTARTING, "the replica stops")
        if run.sender is not None and not run.status:
            self._put(StreamPart(query.id, frame, END), run)
        run.upload.arrived(StreamPart(run.upload_number, frame, END))
        run.ended_by_caller()

    def cancel(self, run: Run) -> None:
        """Cancel a query in user code."""
        self._user_code.cancel(run.key)

    # --- What comes of a query ----------------------------------------------------------------

    def begun(self, run: Run, begun: StreamBegun) -> Sender | None:
        """Send the head of an answer in parts; return their sender, None if it is not wanted."""
        assignment = run.assignment
        if assignment.caller is None:
            return None
        if run.stream_key in self.streams:  # its router died, and the next one had it run again
            run.is_delivered = True  # by the other run
            self._user_code.cancel(run.key)
            return None
        self.streams[run.stream_key] = run
        # With the first part, at the end of this turn, and before the router hears of it: to write
        # to that first had the first byte 0.2 ms later.
        self._outbox(run).put_all([(begun, run)])
        self._report(run.proxy, ("begun", assignment.ticket))
        return Sender(
            assignment.query.id, lambda part: self._put(part, run), self._loop.at_turn_end
        )

    def answered(self, run: Run, answer: Answer) -> None:
        """Send an answer, if its caller still waits."""
        if run.assignment.caller is not None and not run.is_delivered:
            if run.sender is not None:
                run.sender.flush()
            is_large = size_of(answer) >= LARGE
            if is_large or not run.is_leased:  # else it arrives, or its caller is dead
                self.undelivered += 1
            if self.retries_failures and self._may_try_again(run):
                self._put(MayTryAgain(run.assignment.query.id, self._tag), run)
            if is_large:
                self._put_in_parts(answer, run)
            else:
                self._outbox(run).put((answer, run))
        if run.assignment.compare != ():
            self._copies.add(run.proxy, run.assignment, answer)

    def _may_try_again(self, run: Run) -> bool:
        """Return whether an answer is a failure after which another replica may run the query."""
        query = run.assignment.query
        if not has_failed(run.status) or run.sender is not None or query.follows:
            return False
        return may_retry(query.http_method, (query.retryable, self.retryable))

    def ended(self, run: Run) -> None:
        """Free the slot; report to the router."""
        self.running -= 1
        if not run.is_given_back:
            self.served += 1
            metrics.ended(run.status, time.monotonic() - run.began_at)
        if run.timer is not None:
            run.timer.cancel()
        self._runs.pop(run.key, None)
        for runs in (self.streams, self._orphaned):
            if runs.get(run.stream_key) is run:
                del runs[run.stream_key]
        run.sender = None  # which names the run
        if run.upload_number:
            self._upload_ended(run)
        if run.is_leased:
            self._leased_ended(run)
            return
        ticket = run.assignment.ticket
        if not run.status:
            self._ended_unanswered(run)
            return
        self._report_soon(run.proxy, ("answered", (ticket, run.status)))
        if run.is_delivered:
            self._report_delivered(run)

    def _ended_unanswered(self, run: Run) -> None:
        field = "undelivered" if run.is_undelivered else "cancelled"
        if run.is_given_back:
            field = "rejected"
        elif run.assignment.compare != ():
            self._copies.add(run.proxy, run.assignment, None)
        self._report(run.proxy, (field, run.assignment.ticket))

    def _leased_ended(self, run: Run) -> None:
        """Tell the caller, which counts for itself; an answer would say it."""
        if run.is_given_back:
            self._put(NotRun(run.assignment.ticket), run)
        elif not run.status:
            self._put(RunEnded(run.assignment.ticket), run)
        if run.proxy in self._leaving:
            self._unwatch_lessees()

    # --- What follows queries -----------------------------------------------------------------

    def _want(self, run: Run, query: Query) -> None:
        """Ask a query's caller for what follows it."""
        run.upload_number = number = next(self._upload_numbers)
        self._uploads[number] = run
        run.upload = Parts(
            lambda size: self._put(FeedTaken(query.id, number, size), run), query.follows
        )
        self._put(FeedWanted(query.id, number, self.process), run)

    def _take_uploads(self, message: FeedQueries, sender: Address) -> None:
        """Take what a caller sends. A later proxy may not know of the caller, so it is watched."""
        for part in message.parts:
            run = self._uploads.get(part.query_id)
            if run is None or run.upload is None:
                continue
            caller = message.process.incarnation
            if caller not in self._uploaders:
                gone = partial(self._uploader_gone, caller)
                self._uploaders[caller] = self._loop.watch_process(message.process, gone, sender)
            run.upload.arrived(part_arrived(part))
            if part.ends == END:
                run.ended_by_caller()
        for number in message.stopped:
            if number in self._uploads:
                self.cancel(self._uploads[number])

    def _uploader_gone(self, caller: str) -> None:
        for run in list(self._uploads.values()):
            if run.assignment.caller_incarnation == caller:
                self.cancel(run)

    def _upload_ended(self, run: Run) -> None:
        """Forget an upload, and stop to watch its caller after the last of its queries."""
        del self._uploads[run.upload_number]
        run.upload = None  # as its sender does
        caller = run.assignment.caller_incarnation
        if caller in self._uploaders and all(
            each.assignment.caller_incarnation != caller for each in self._uploads.values()
        ):
            self._uploaders.pop(caller)()

    # --- Messages to callers ------------------------------------------------------------------

    def _put(self, item: _Item, run: Run) -> None:
        self._outbox(run).put((item, run), _gathered(item))

    def _outbox(self, run: Run) -> Lane:
        caller = run.assignment.caller_incarnation
        if run.is_leased:
            return self._leased.get(caller) or self._make_lane(caller, run)
        return self._answers.get(caller) or self._make_answers(self._answers, run)

    def _make_lane(self, caller: str, run: Run) -> Lane:
        pack = partial(_pack_answers, caller)
        lane = self._leased[caller] = Lane(self._loop, _caller_of(run), pack, _weigh)
        return lane

    def _put_in_parts(self, answer: Any, run: Run) -> None:
        outbox = self._parted.get(run.assignment.caller_incarnation)
        if outbox is None:
            outbox = self._make_answers(self._parted, run, PARTS_UNDER_WAY)
        outbox.put_all([(item, run) for item in in_parts(answer, next(self._parted_numbers))])

    def _make_answers(
        self, outboxes: Outboxes[Outbox], run: Run, most_under_way: int = MAX_BYTES_UNDER_WAY
    ) -> Outbox:
        caller = run.assignment.caller_incarnation
        outbox = outboxes[caller] = Outbox(
            self._loop,
            _caller_of(run),
            partial(_pack_answers, caller),
            on_sent=self._delivered,
            on_failed=partial(self._undeliverable, caller),
            weigh=_weigh,
            most_under_way=most_under_way,
        )
        return outbox

    def _delivered(self, items: list[tuple[_Item, Run]]) -> None:
        for item, run in items:
            if not isinstance(item, Piece):
                self.undelivered -= 1
                run.is_delivered = True
                if run.has_ended:
                    self._report_delivered(run)

    def _report_delivered(self, run: Run) -> None:
        field = "undelivered" if run.is_undelivered else "delivered"
        self._report_soon(run.proxy, (field, run.assignment.ticket))

    def _undeliverable(self, caller: str, items: list[tuple[_Item, Run]]) -> None:
        """Abandon a caller. It may live behind a broken link, so the router hears of it."""
        for outboxes in (self._answers, self._parted):
            outbox = outboxes.pop(caller, None)
            items = items + (outbox.drop() if outbox is not None else [])
        for _, run in items:
            run.is_undelivered = True
        self._delivered(items)
        for run in dict.fromkeys(run for _, run in items if not run.has_ended):
            self._user_code.cancel(run.key)

    def _control(self, message: ControlStreams, _sender: Address) -> None:
        """Go on with streams from which the caller took parts, stop those it does not want."""
        for query_id, size in message.taken:
            run = self.streams.get((message.incarnation, query_id))
            if run is not None and run.sender is not None:
                run.sender.taken(size)
        for query_id in message.stopped:
            for runs in (self.streams, self._orphaned):
                run = runs.get((message.incarnation, query_id))
                if run is not None:
                    self._user_code.cancel(run.key)

    # --- Reports to proxies -------------------------------------------------------------------

    def _make_outbox(self, proxy: str, address: Address) -> Outbox:
        return Outbox(
            self._loop, address, self._pack_reports, on_failed=lambda _: self._forget(proxy)
        )

    def _report(self, proxy: str, report: _Report) -> None:
        outbox = self._reports.get(proxy)
        if outbox is not None:
            outbox.put(report)

    def _report_soon(self, proxy: str, report: _Report) -> None:
        """Send a report that may wait a moment while there is room for more queries."""
        outbox = self._reports.get(proxy)
        if outbox is None:
            return
        if self.is_draining or (self.running + 1) * 2 > self.limit:  # with the one that has ended
            outbox.put(report)
        else:
            outbox.put_patiently(report, REPORT_S)

    def _forget(self, proxy: str) -> None:
        self._reports.pop(proxy, None)

    def _pack_reports(self, items: list[_Report]) -> QueriesFinished:
        reports: dict[str, list[Any]] = {}
        for field, value in items:
            reports.setdefault(field, []).append(value)
        return QueriesFinished(
            replica=self._tag,
            incarnation=self._incarnation,
            draining=self.is_draining,
            **{field: tuple(values) for field, values in reports.items()},
        )


def _caller_of(run: Run) -> Address:
    address = run.assignment.caller
    assert address is not None, "a copy for a shadow has no answers"
    return pickle.loads(address)


def _pack_answers(caller: str, items: list[tuple[_Item, Run]]) -> AnswerQueries:
    answers: list[_Item] = []
    for item, _ in items:
        answers.append(part_travelling(item) if type(item) is StreamPart else item)
    return AnswerQueries(incarnation=caller, answers=tuple(answers))


def _gathered(item: _Item) -> int:
    """Return with how many items this one leaves before the end of the turn."""
    if not isinstance(item, StreamPart):
        return GATHERED
    return 1 if item.parts >= MOST_JOINED else GATHERED_PARTS


def _weigh(item: tuple[_Item, Run]) -> int:
    answer = item[0]
    if isinstance(answer, StreamPart):
        return len(answer.data)
    return len(answer.content) if isinstance(answer, AnswerPart) else size_of(answer)
