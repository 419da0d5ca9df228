"""The data side of a replica: queries in, answers out, on the event loop of the user's code.

Theory of operation. A replica is a process with two places in the actor system. The actor, on the
main thread, takes the controller's orders, and answers them whatever user code does. The data plane
is the other one, with an address of its own on user code's event loop: a query goes from the socket
to the user's coroutine, and its answer back to a socket, without changing threads. User code that
blocks its loop delays its own queries, and nothing else.

:class:`Queries` lets in what there is room for, and makes a :class:`Run` of each. A run knows its
caller (:class:`CallerLink`), which gets the answer, and the proxy that counts its slot
(:class:`ProxyLink`); under a lease (:class:`Leases`) the caller counts. :class:`Uploads` takes what
follows a query.

A query's slot is free when user code has returned. The router keeps the query until it hears that
the caller has the answer: if this process dies in between, it goes to another replica.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import secrets
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from greenroom.actors.caller import client as query_client
from greenroom.actors.caller.caller import Caller
from greenroom.actors.caller.streams import MOST_JOINED, Parts, Sender
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
from greenroom.actors.replica.context import Headers, Reply
from greenroom.actors.replica.user_code import UserCode
from greenroom.actors.runtime.loop import (
    GATHERED,
    GATHERED_PARTS,
    Callback,
    Lane,
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

DRAIN_CHECK_S = 0.02

PARTS_UNDER_WAY = 2_000_000  # bytes, which other answers to the same caller have to wait for

_Item = Answer | PartedAnswer | Piece


class Run(Reply):
    """One query in user code, and how its answer travels.

    ``caller`` is None for a copy for a shadow, ``proxy`` for a query under a lease.
    """

    __slots__ = (
        "began_at",
        "caller",
        "has_arrived",
        "is_given_back",
        "key",
        "lane",
        "proxy",
        "queries",
        "sender",
        "status",
        "timer",
        "upload",
    )

    def __init__(
        self,
        queries: Queries,
        assignment: Assignment,
        caller: CallerLink | None,
        proxy: ProxyLink | None,
    ) -> None:
        timeout_s = assignment.timeout_s
        self.began_at = time.monotonic()
        super().__init__(assignment, None if timeout_s is None else self.began_at + timeout_s)
        self.queries = queries
        self.caller = caller
        self.proxy = proxy
        source = assignment.caller_incarnation if proxy is None else proxy.incarnation
        self.key = source, assignment.ticket
        self.lane: Lane | None = None  # for all but large answers
        if caller is not None:
            caller.uses += 1
            self.lane = caller.lane if proxy is None else caller.outbox
        self.sender: Sender | None = None
        self.upload: Incoming | None = None
        self.status = 0  # of its answer
        self.is_given_back = False
        self.has_arrived: bool | None = None  # its answer, at its caller; None while that is open
        self.timer: Timer | None = None

    def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer in parts."""
        self.check_wanted()
        query, caller = self.assignment.query, self.caller
        if query.follows == SOCKET:
            self.deadline_at = None  # it was for the handshake
        if caller is None or self.lane is None:
            return
        if query.id in caller.streams:  # its router died, and the next one had it run again
            self.has_arrived = True  # by the other run
            self.cancel()
            return
        caller.streams[query.id] = self
        process = self.queries.port.process
        begun = StreamBegun(query.id, status, headers + self.extra_headers, process)
        # With the first part, at the end of this turn, and before the router hears of it: to write
        # to that first had the first byte 0.2 ms later.
        self.lane.put_all([(begun, self)])
        self._report("begun", self.assignment.ticket)
        self.sender = Sender(query.id, self.put, self.queries.port.loop.at_turn_end)

    async def send(self, data: bytes, ends: int = MORE) -> None:
        """Send the next part."""
        if self.sender is not None:
            await self.sender.send(data, ends)
        else:  # of a copy for a shadow; a generator that awaits nothing must not have the loop
            self.check_wanted()
            await asyncio.sleep(0)

    def put(self, item: _Item) -> None:
        """Send its caller something."""
        assert self.lane is not None, "a copy for a shadow has no answers"
        self.lane.put((item, self), _gathered(item))

    def answer(self, answer: Answer) -> None:
        """Answer it; a second answer is dropped, and one that comes after the end."""
        if self.status or self.has_ended:
            return
        self.status = status_of(answer)
        self.complete()
        if self.extra_headers and isinstance(answer, HttpAnswer | FailedAnswer):
            answer = answer._replace(headers=(*answer.headers, *self.extra_headers))
        if self.lane is not None and self.caller is not None and self.has_arrived is None:
            if self.sender is not None:
                self.sender.finish()
            if self.queries.config.get("retry_failures") and self._may_try_again():
                self.put(MayTryAgain(self.assignment.query.id, self.queries.proxies.tag))
            is_small = size_of(answer) < LARGE
            if self.lane is self.caller.outbox or not is_small:  # else it arrives, or it is dead
                self.queries.undelivered += 1
            if is_small:
                # What the last one answers is written before its slot is free: nothing joins it.
                self.lane.put((answer, self), GATHERED if self.queries.running > 1 else 1)
            else:
                self.caller.put_in_parts(answer, self)
        if self.assignment.compare != ():
            self.queries.copies.add(self.key[0], self.assignment, answer)

    def _may_try_again(self) -> bool:
        """Return whether its answer is a failure after which another replica may run the query."""
        query = self.assignment.query
        if not has_failed(self.status) or self.sender is not None or query.follows:
            return False
        return may_retry(query.http_method, (query.retryable, self.queries.config.get("retryable")))

    def give_back(self) -> bool:
        """See :meth:`Reply.give_back`."""
        self.is_given_back = not self.status and self.sender is None
        return self.is_given_back

    def ended_by_caller(self) -> None:
        """Note that the last part that follows is here: a WebSocket's client reads no more."""
        if self.sender is not None and self.assignment.query.follows == SOCKET:
            self.sender.close()

    def close_socket(self) -> None:
        """Close it, if it is a WebSocket: the replica is to stop."""
        query = self.assignment.query
        if query.follows != SOCKET or self.upload is None:
            return
        frame = close_frame(RESTARTING, "the replica stops")
        if self.sender is not None and not self.status:
            self.put(StreamPart(query.id, frame, END))
        self.upload.arrived(StreamPart(self.upload.number, frame, END))
        self.ended_by_caller()

    def cancel(self) -> None:
        """Cancel it in user code."""
        self.queries.user_code.cancel(self)

    def late(self) -> None:
        """End it, a while after its time was up: the router that would have has died."""
        if self.status or self.is_cancelled or self.deadline_at is None:
            return
        text = f"no answer within {self.assignment.timeout_s:.6g} s"
        self.answer(FailedAnswer(self.assignment.query.id, "QueryTimeoutError", text))
        self.cancel()

    def cut_off(self) -> None:
        """Tell the caller of a stream that the router ended it: it may have lost the caller."""
        if self.caller is None or self.sender is None or self.status:
            return
        text = "the answer was ended midway by the router, which may have lost its caller"
        answer = FailedAnswer(self.assignment.query.id, "RequestCancelledError", text)
        self.caller.send(answer)

    def end(self) -> None:
        """Free the slot. Its router hears of that or, under a lease, its caller, who counts."""
        self.has_ended = True
        self.complete()
        queries, assignment = self.queries, self.assignment
        queries.running -= 1
        queries.runs.pop(self.key, None)
        if not self.is_given_back:
            queries.served += 1
            metrics.ended(self.status, time.monotonic() - self.began_at)
        if self.timer is not None:
            self.timer.cancel()
        if self.upload is not None:
            del queries.uploads[self.upload.number]
        if self.caller is not None:
            if self.caller.streams.get(assignment.query.id) is self:
                del self.caller.streams[assignment.query.id]
            self.caller.release()
        self.sender = self.upload = None  # which name this
        if not self.status:
            self._ended_unanswered()
        elif self.proxy is not None:
            self._report_soon("answered", (assignment.ticket, self.status))
            if self.has_arrived is not None:
                self.report_arrival()

    def _ended_unanswered(self) -> None:
        ticket = self.assignment.ticket
        if self.proxy is None:  # an answer would say it
            self.put(NotRun(ticket) if self.is_given_back else RunEnded(ticket))
            return
        field = "undelivered" if self.has_arrived is False else "cancelled"
        if self.is_given_back:
            field = "rejected"
            self.queries.copies.forget(self.key)
        elif self.assignment.compare != ():
            self.queries.copies.add(self.key[0], self.assignment, None)
        self._report(field, ticket)

    def report_arrival(self) -> None:
        """Tell its router whether the answer is at its caller."""
        field = "delivered" if self.has_arrived else "undelivered"
        self._report_soon(field, self.assignment.ticket)

    def _report(self, field: str, value: Any) -> None:
        """Tell its router."""
        if self.proxy is not None:
            self.proxy.outbox.put((field, value))

    def _report_soon(self, field: str, value: Any) -> None:
        """Tell its router what may wait a moment while there is room for more queries."""
        queries = self.queries
        if self.proxy is None:
            return
        if queries.is_draining or (queries.running + 1) * 2 > queries.limit:  # with this one
            self.proxy.outbox.put((field, value))
        else:
            self.proxy.outbox.put_patiently((field, value), REPORT_S)


class CallerLink:
    """A caller, as a replica sends to it, and notices its end.

    The death of a caller is the router's to notice, unless the caller sends here by itself, under a
    lease or what follows a query. Then it is watched as long as it has a query or a lease here. A
    process may open and close many connections, each of them a caller, before it ends.
    """

    def __init__(self, queries: Queries, incarnation: str, address: Address) -> None:
        self._queries = queries
        self._incarnation = incarnation
        self._address = address
        self._unwatch: Callback | None = None
        self._numbers = itertools.count(int(secrets.token_hex(7), 16))  # see AnswerPart
        self.uses = 0  # runs and open leases
        self.streams: dict[int, Run] = {}  # whose answer has begun to come in parts, by query id
        loop, failed = queries.port.loop, self._undelivered
        outbox = partial(Outbox, loop, address, self._pack, self._delivered, failed, _weigh)
        self.lane = Lane(loop, address, self._pack, _weigh)  # for queries under leases
        self.outbox: Outbox = outbox()
        self._parted: Outbox = outbox(PARTS_UNDER_WAY)  # large answers: others go in between

    @property
    def is_idle(self) -> bool:
        """Return whether nothing of it is here, or on its way to it."""
        return not self.uses and self.outbox.is_idle and self._parted.is_idle

    def put_in_parts(self, answer: Any, run: Run) -> None:
        """Send a large answer."""
        self._parted.put_all([(item, run) for item in in_parts(answer, next(self._numbers))])

    def send(self, answer: Answer) -> None:
        """Send an answer that nobody counts on, at once."""
        self._queries.port.loop.send(self._address, self._pack([(answer, None)]))

    def watch(self, process: Process) -> None:
        """Notice its end from now on."""
        if self._unwatch is None:
            watch = self._queries.port.loop.watch_process
            self._unwatch = watch(process, self._gone, self._address)

    def release(self) -> None:
        """Count the end of a use, and after the last one watch the caller no more."""
        self.uses -= 1
        if not self.uses and self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def _gone(self) -> None:
        """End what only the caller itself could end. It may live, and come back for the rest."""
        queries, unwatch, self._unwatch = self._queries, self._unwatch, None
        if unwatch is not None:
            unwatch()
        queries.leases.caller_gone(self)
        for run in list(queries.runs.values()):
            if run.caller is self and (run.proxy is None or run.upload is not None):
                run.cancel()

    def _delivered(self, items: list[tuple[_Item, Run]]) -> None:
        for item, run in items:
            if not isinstance(item, Piece):
                self._queries.undelivered -= 1
                if run.has_arrived is None:
                    run.has_arrived = True
                if run.has_ended:
                    run.report_arrival()

    def _undelivered(self, items: list[tuple[_Item, Run]]) -> None:
        """Abandon a caller. It may live behind a broken link, so the router hears of it."""
        items = items + self.outbox.drop() + self._parted.drop()
        for _, run in items:
            run.has_arrived = False
        self._delivered(items)
        for run in dict.fromkeys(run for _, run in items if not run.has_ended):
            run.cancel()

    def _pack(self, items: list[tuple[_Item, Run | None]]) -> AnswerQueries:
        answers: list[_Item] = []
        for item, _ in items:
            answers.append(part_travelling(item) if type(item) is StreamPart else item)
        return AnswerQueries(incarnation=self._incarnation, answers=tuple(answers))


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


class Lease(NamedTuple):
    """An open one."""

    caller: CallerLink
    proxy: str  # its incarnation
    endpoint: str
    route: str


class Leases(dict[str, Lease]):
    """The open leases by name: see greenroom.core.routing.leases."""

    def __init__(self, queries: Queries) -> None:
        super().__init__()
        self._queries = queries
        self._proxy = ""  # the incarnation of the one that may grant leases
        self._fenced: set[str] = set()  # the names of others, that are to be refused if they come
        queries.port.on(OpenLease, self._open)
        queries.port.on(CloseLeases, self._close)

    def follow(self, proxy: str) -> None:
        """Take leases of this proxy from now on, and of no other."""
        self._proxy = proxy
        self._drop([name for name, each in self.items() if each.proxy != proxy])
        self._fenced = {name for name in self._fenced if name.startswith(f"{proxy}/")}

    def caller_gone(self, caller: CallerLink) -> None:
        """Forget the leases of a caller."""
        self._drop([name for name, each in self.items() if each.caller is caller])

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self.pop(name).caller.release()

    def _open(self, message: OpenLease, sender: Address) -> None:
        """Let a caller send queries by itself, and notice its end: its router may be dead then."""
        mine = self._queries.port.process.incarnation
        if message.incarnation != mine or message.proxy != self._proxy:
            return
        if message.lease in self._fenced:
            self._fenced.discard(message.lease)
            return
        caller = self._queries.caller(message.caller.incarnation, sender)
        if message.lease not in self:
            caller.uses += 1
        self[message.lease] = Lease(caller, message.proxy, message.endpoint, message.route)
        caller.watch(message.caller)

    def _close(self, message: CloseLeases, _sender: Address) -> None:
        if message.incarnation == self._queries.port.process.incarnation:
            if message.is_fence:
                self._fenced.update(name for name in message.leases if name not in self)
            self._drop([name for name in message.leases if name in self])


class Incoming(Parts):
    """What follows a query, as it arrives."""

    def __init__(self, run: Run, number: int) -> None:
        query = run.assignment.query
        super().__init__(lambda size: run.put(FeedTaken(query.id, number, size)), query.follows)
        self.number = number


class Uploads(dict[int, Run]):
    """The runs of queries that more follows, by the numbers of their FeedWanted."""

    def __init__(self, port: Port) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self._process = port.process
        port.on(FeedQueries, self._take)

    def want(self, run: Run) -> None:
        """Ask a query's caller for what follows it."""
        number = next(self._numbers)
        self[number] = run
        run.upload = Incoming(run, number)
        run.put(FeedWanted(run.assignment.query.id, number, self._process))

    def _take(self, message: FeedQueries, _sender: Address) -> None:
        """Take what a caller sends. A later proxy may not know of the caller, so it is watched."""
        if message.incarnation != self._process.incarnation:
            return  # meant for a dead process, whose numbers are others
        for part in message.parts:
            run = self.get(part.query_id)
            if run is not None and run.upload is not None and run.caller is not None:
                run.caller.watch(message.process)
                run.upload.arrived(part_arrived(part))
                if part.ends == END:
                    run.ended_by_caller()
        for number in message.stopped:
            if number in self:
                self[number].cancel()


class ProxyLink:
    """A proxy, as a replica reports to it; its runs keep it when it is gone.

    It may not be dead then, but only cut off. Of what is not reported, the slots would stay taken.
    """

    def __init__(self, incarnation: str, outbox: Outbox) -> None:
        self.incarnation = incarnation
        self.outbox = outbox
        self.is_gone = False


class Proxies(dict[str, ProxyLink]):
    """The proxies that are there, by incarnation; a near one also gets the queries of handles."""

    def __init__(self, queries: Queries, tag: str) -> None:
        super().__init__()
        self.tag = tag
        self._queries = queries
        self._loop = queries.port.loop
        self._reporting: Timer | None = None  # armed while there are orphans
        self.caller = Caller(self._loop, queries.port.process)  # of handles
        self.caller.listen(queries.port.on)
        query_client.install(query_client.CallerClient(self.caller))
        user_context.on_models_changed(partial(self._loop.post, self._report_models))
        queries.port.on(MeetProxy, self._met)

    def _met(self, message: MeetProxy, _sender: Address) -> None:
        if message.is_near:
            self.caller.met_proxy(message.proxy, message.process)
            self._queries.leases.follow(message.process.incarnation)
        self.link(message.process, message.proxy)

    def link(self, process: Process, address: Address) -> ProxyLink:
        """Return the link to a proxy, and notice its end."""
        known = self.get(process.incarnation)
        if known is not None:
            return known
        link = ProxyLink(process.incarnation, Outbox(self._loop, address, self._pack))
        self[process.incarnation] = link
        self._loop.watch_process(process, partial(self._gone, link), address)
        if models := user_context.model_ids():
            link.outbox.put(("models", models))
        return link

    def _gone(self, link: ProxyLink) -> None:
        """Let callers know where their queries run: only they can end them now."""
        link.is_gone = True
        if self.get(link.incarnation) is link:  # a link that breaks may be heard of twice
            del self[link.incarnation]
        for run in [run for run in self._queries.runs.values() if run.proxy is link]:
            if run.caller is None:
                run.cancel()
        self._report_orphans()

    def orphans(self) -> list[Run]:
        """Return the runs that have no router any more, and no answer yet."""
        runs = self._queries.runs.values()
        orphans = [run for run in runs if run.proxy is not None and run.proxy.is_gone]
        return [run for run in orphans if run.caller is not None and not run.status]

    def _report_orphans(self) -> None:
        """Repeat this: it is how the death of a caller without a router is noticed."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        if orphans := self.orphans():
            self._reporting = self._loop.call_later(ORPHANED_S, self._report_orphans)
        for run in orphans:
            run.put(StillRuns(run.assignment.query.id))

    def _report_models(self) -> None:
        for link in self.values():
            link.outbox.put(("models", user_context.model_ids()))

    def _pack(self, items: list[tuple[str, Any]]) -> QueriesFinished:
        """Make a message of fields of it, each with one item."""
        reports: dict[str, list[Any]] = {}
        for field, value in items:
            reports.setdefault(field, []).append(value)
        return QueriesFinished(
            replica=self.tag,
            incarnation=self._queries.port.process.incarnation,
            draining=self._queries.is_draining,
            **{field: tuple(values) for field, values in reports.items()},
        )


class Queries:
    """Runs queries for any proxy, and answers their callers directly.

    All on user code's loop, but for ``limit``, ``accepting``, ``is_draining``, which the replica's
    main thread sets, and ``running``, which it reads.
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
        self.config: Mapping[str, Any] = {}
        self.accepting = False
        self.is_draining = False
        self.running = 0  # queries in user code; never above the limit
        self.served = 0  # queries that have ended
        self.undelivered = 0  # answers
        self.port = port
        self.user_code = user_code
        self.runs: dict[tuple[str, int], Run] = {}  # by key
        self.callers = Outboxes[CallerLink]()  # by incarnation
        self.leases = Leases(self)
        self.uploads = Uploads(port)
        self.proxies = Proxies(self, tag)
        incarnation = port.process.incarnation
        self.copies = ResponseSampler(
            port.loop, incarnation, backend, lambda: self.running > 0, comparisons
        )
        port.on(RunQueries, self._run)
        port.on(RunLeased, self._run_leased)
        port.on(ControlStreams, self._control)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Take newer settings; callable from any thread."""
        self.config = config
        self.limit = config["max_ongoing_requests"]

    def report(self) -> None:
        """Report what comparisons have found, and what became of the queries of handles.

        Callable from any thread.
        """
        self.port.loop.post(self.copies.here.report)
        self.port.loop.post(self.proxies.caller.leases.report)

    def when_drained(self, callback: Callback) -> None:
        """Call, on this loop, once nothing runs here or is on its way; callable from any thread.

        Only here that can be told for sure: a query may be about to begin that was let in before.
        """

        def check() -> None:
            # What a caller sent under a lease that is still open may be on its way.
            if self.running or self.undelivered or self.leases:
                self.port.loop.call_later(DRAIN_CHECK_S, check)
            else:
                callback()

        self.port.loop.post(check)

    def close_sockets(self) -> None:
        """Close all WebSockets, as this replica is to stop; callable from any thread."""

        def close() -> None:
            for run in list(self.uploads.values()):
                run.close_socket()

        self.port.loop.post(close)

    def caller(self, incarnation: str, address: Address) -> CallerLink:
        """Return the link to a caller."""
        link = self.callers.get(incarnation)
        if link is None:
            link = self.callers[incarnation] = CallerLink(self, incarnation, address)
        return link

    def _run(self, message: RunQueries, sender: Address) -> None:
        """Run what there is room for, reject the rest."""
        if message.incarnation != self.port.process.incarnation:
            return  # meant for a dead process whose address this one has
        proxy = self.proxies.link(message.proxy, sender)
        source, runs = proxy.incarnation, self.runs
        room = max(self.limit - self.running, 0) if self.accepting else 0
        # A router that could not reach this replica for a while sends what it had here again.
        assignments = [each for each in message.assignments if (source, each.ticket) not in runs]
        self.running += min(room, len(assignments))
        for assignment in assignments[:room]:
            self._begin(Run(self, assignment, self._caller_of(assignment), proxy))
        for assignment in assignments[room:]:
            proxy.outbox.put(("rejected", assignment.ticket))
        for ticket in message.cancelled:
            if (run := runs.get((source, ticket))) is not None:
                run.cut_off()
                run.cancel()
        for ticket, places in message.compared:
            key = source, ticket
            self.copies.meet(key, places, has_answer=key not in runs)

    def _caller_of(self, assignment: Assignment) -> CallerLink | None:
        if assignment.caller is None:
            return None
        incarnation = assignment.caller_incarnation
        known = self.callers.get(incarnation)
        return known or self.caller(incarnation, pickle.loads(assignment.caller))

    def _run_leased(self, message: RunLeased, sender: Address) -> None:
        """Run what comes under open leases while there is room, refuse the rest."""
        if message.incarnation != self.port.process.incarnation:
            return
        source, refused = message.caller, []
        for name, query in message.queries:
            lease = self.leases.get(name)
            if lease is None or not self.accepting or self.running >= self.limit:
                refused.append(NotRun(query.id))
                continue
            self.running += 1
            caller, _, endpoint, route = lease
            # Its address is known: the lease is from there.
            assignment = Assignment(query.id, query, b"", source, endpoint, route, query.timeout_s)
            self._begin(Run(self, assignment, caller, None))
        if refused:
            answer = AnswerQueries(incarnation=source, answers=tuple(refused))
            self.port.loop.send(sender, answer)
        for query_id in message.cancelled:
            if (run := self.runs.get((source, query_id))) is not None:
                run.cancel()

    def _begin(self, run: Run) -> None:
        self.runs[run.key] = run
        assignment = run.assignment
        if assignment.query.follows:
            self.uploads.want(run)
        if assignment.timeout_s is not None:
            run.timer = self.port.loop.call_later(assignment.timeout_s + LATE_S, run.late)
        self.user_code.run(run)

    def _control(self, message: ControlStreams, _sender: Address) -> None:
        """Go on with streams from which the caller took parts, stop those it does not want."""
        caller = self.callers.get(message.incarnation)
        if caller is None:
            return
        for query_id, size in message.taken:
            run = caller.streams.get(query_id)
            if run is not None and run.sender is not None:
                run.sender.taken(size)
        for query_id in message.stopped:
            begun = caller.streams.get(query_id)
            runs = [run for run in self.proxies.orphans() if run.caller is caller]
            for run in [begun] if begun is not None else runs:
                if run.assignment.query.id == query_id:
                    run.cancel()
