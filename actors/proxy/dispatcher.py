"""The router's shell: passes it what callers and replicas send, and performs its effects.

It holds no hard state. A new dispatcher gets its tables from the controller, and callers attach to
it when they see that the old one is gone.
"""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from greenroom.actors.messages.control import DescribeEnd, EndDescribed
from greenroom.actors.messages.queries import (
    Address,
    AnswerQueries,
    Assignment,
    AttachCaller,
    AttachCallerReply,
    FailedAnswer,
    Process,
    QueriesFinished,
    SubmitQueries,
)
from greenroom.actors.proxy.host_metrics import Metrics
from greenroom.actors.proxy.leases import AttachedCaller, LeaseDesk
from greenroom.actors.proxy.replica_links import ReplicaLinks
from greenroom.actors.proxy.reports import Reports, Send
from greenroom.actors.proxy.request_routers import RequestRouters
from greenroom.actors.runtime.loop import Loop, Outbox, Timer
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.errors import CANCELLED_STATUS
from greenroom.core.lifecycle.replicas import RestartReason
from greenroom.core.metrics import Family
from greenroom.core.routing import load, tickets
from greenroom.core.routing.mirroring import MIRROR_S
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BACKEND_PREFIX, ENDPOINT_PREFIX, ROLLOUT_PREFIX
from greenroom.core.routing.tickets import NewQuery

DESCRIBED_WITHIN_S = 0.6  # how a replica ended: the controller has asked its host for so long


class QueryFailedError(Exception):
    """The router raised on a query."""

    def __init__(self, caller: str, query_id: int, error: Exception) -> None:
        super().__init__(f"query {query_id}: {type(error).__name__}: {error}")
        self.caller = caller
        self.query_id = query_id


class Dispatcher:
    """Dispatches callers' queries to replicas; ``send`` sends to the controller."""

    def __init__(
        self,
        loop: Loop,
        process: Process,
        address: Address,
        settings: HostSettings,
        records: RunRecords,
        send: Send,
    ) -> None:
        self._loop = loop
        self._process = process
        self._send = send
        self.router = Router(random.random, settings.host_name)
        self.reports = Reports(loop, process, self.router, send)
        self._metrics = Metrics()
        self.router.observers.add(self._metrics)
        self._callers: dict[Hashable, AttachedCaller] = {}  # by incarnation
        self.leases = LeaseDesk(loop, process, self.router, self._run, self._callers)
        self._replicas = ReplicaLinks(
            *(loop, process, address, self.router),
            send=send,
            run=self._run,
            introduce=self.leases.introduce,
        )
        self._request_routers = RequestRouters(
            loop, settings, records, self.router, self._metrics, self._submit_asked
        )

        self.ready = False  # it has had its first tables
        # What is to be answered of replicas that have died, until the controller has said why.
        self._died: dict[str, list[tickets.Refuse]] = {}
        self._deadline: tuple[float, Timer] | None = None  # the router's next
        self._perform: dict[type, Callable[[Any], None]] = {
            tickets.Assign: self._assign,
            tickets.Cancel: self._cancel,
            tickets.Compare: self._compare,
            tickets.Refuse: self._refuse,
            tickets.Grant: self.leases.grant,
            tickets.Revoke: self.leases.revoke,
        }

    def metrics(self) -> list[Family]:
        """Return all metrics of the router."""
        return self._metrics.families(*load.by_endpoint(self.router.state))

    # --- Tables ---------------------------------------------------------------------------------

    def take_tables(self, tables: Iterable[tuple[str, Any]], now: float) -> None:
        """Take newer tables by key, None for what is gone; dispatch begins with the first."""
        for key, table in tables:
            if key.startswith(ENDPOINT_PREFIX):
                name = key.removeprefix(ENDPOINT_PREFIX)
                self._run(self.router.set_endpoint(name, table, now))
                if table is None:
                    self._metrics.forget("endpoint", name)
            elif key.startswith(ROLLOUT_PREFIX):
                name = key.removeprefix(ROLLOUT_PREFIX)
                self.reports.watch(name, table)
            else:
                tag = key.removeprefix(BACKEND_PREFIX)
                self._replicas.set_backend(tag, table, now)
                self._request_routers.take(tag, None if table is None else table.request_router)
                if table is None:
                    self._metrics.forget("backend", tag)
        if not self.ready:
            self.ready = True
            for caller in self._callers.values():
                self._welcome(caller.address)

    def finished(self, message: QueriesFinished) -> None:
        """Free the slots of what a replica has done, queue again what it rejected."""
        known = self.router.state.replicas.get(message.replica)
        process: Any = None if known is None else known.table.process
        if process is None or process.incarnation != message.incarnation:
            return
        now, router, replica = time.monotonic(), self.router, message.replica
        if message.models:
            router.holds(replica, message.models[-1])
        if message.begun:
            router.begun(replica, message.begun, now)
        if message.answered:
            self._run(router.answered(replica, message.answered, now))
        if message.delivered:  # perhaps of the same tickets
            router.delivered(replica, message.delivered)
        if message.undelivered:
            self._run(router.undelivered(replica, message.undelivered, now))
        if message.cancelled:
            cancelled = [(ticket, CANCELLED_STATUS) for ticket in message.cancelled]
            self._run(router.answered(replica, cancelled, now, is_awaited=False))
        if message.rejected:
            draining = message.draining
            self._run(router.rejected(replica, message.rejected, now, draining=draining))

    # --- Callers --------------------------------------------------------------------------------

    def attach(self, message: AttachCaller, sender: Address) -> None:
        """Know a caller, so that it can be answered and its death noticed."""
        incarnation = message.process.incarnation
        if incarnation not in self._callers:
            outbox = Outbox(
                self._loop,
                sender,
                lambda items: AnswerQueries(incarnation=incarnation, answers=tuple(items)),
            )
            gone = lambda: self.detach(incarnation)  # noqa: E731
            unwatch = self._loop.watch_process(message.process, gone, sender)
            self._callers[incarnation] = AttachedCaller(
                message.process, sender, pickle.dumps(sender), outbox, unwatch
            )
            if self._loop.is_here(sender):
                self.router.leases.lessees[incarnation] = message.splits
        if self.ready:
            self._welcome(sender)

    def detach(self, incarnation: str) -> None:
        """Forget a caller that has left, or whose process has ended."""
        caller = self._callers.pop(incarnation, None)
        if caller is not None:
            caller.unwatch()
            self._request_routers.caller_gone(incarnation)
            self._run(self.router.caller_gone(incarnation, time.monotonic()))
            self.leases.check_confirmed()

    def _welcome(self, caller: Address) -> None:
        self._loop.send(caller, AttachCallerReply(proxy=self._process, ready=True))

    def submit(self, message: SubmitQueries, sender: Address) -> None:
        """Dispatch a caller's queries.

        A caller of another host may have been abandoned, and not know it: it attaches again.
        """
        caller = message.incarnation
        if caller not in self._callers:
            self._loop.send(sender, AttachCallerReply(proxy=self._process, ready=False))
            return
        now, refused, attempts = time.monotonic(), message.refused, dict(message.lost)
        died, resent = dict(message.died), message.resent
        failed = {query_id: (replica, s) for query_id, replica, s in message.failed}
        first: list[NewQuery] = []
        others: list[NewQuery] = []
        for query in message.queries:
            n = query.id
            before = n in resent, attempts.get(n, 0), died.get(n, ""), n in refused, failed.get(n)
            new = NewQuery(caller, query, *before)
            (first if new.is_refused else others).append(new)
        # To the front of the queue one by one, so the last comes first; then all have their turns.
        self._submit_unasked(reversed(first), now)
        if first:
            self._run(self.router.fill(now))
        self._submit_unasked(others, now)
        for query_id in message.cancelled:
            self._request_routers.cancel(caller, query_id)
            self._run(self.router.cancel(caller, query_id, now))

    def _submit_unasked(self, queries: Iterable[NewQuery], now: float) -> None:
        """Dispatch queries of which no request router is asked."""
        for new in queries:
            if not self._request_routers.ask(new):
                self._submit_one(new, now)

    def _submit_one(
        self, new: NewQuery, now: float, preference: tickets.Preference | None = None
    ) -> None:
        try:
            self._run(self.router.submit(new, now, preference))
        except Exception as error:
            raise QueryFailedError(str(new.caller), new.query.id, error) from error

    def _submit_asked(self, new: NewQuery, preference: tickets.Preference) -> None:
        """Dispatch a query of which a request router was asked."""
        now = time.monotonic()
        self._submit_one(new, now, preference)
        if new.is_refused:
            self._run(self.router.fill(now))

    def failed(self, error: QueryFailedError) -> Iterable[tuple[Address, AnswerQueries]]:
        """Return the answer to a query on which the router failed.

        Callers send all other queries to the next proxy. It would fail on this one, too.
        """
        caller = self._callers.get(error.caller)
        if caller is not None:
            text = "the router failed on the query; see proxy.log"
            answers = (FailedAnswer(error.query_id, "GreenroomError", text),)
            answer = AnswerQueries(incarnation=caller.process.incarnation, answers=answers)
            yield caller.address, answer

    # --- Timers ---------------------------------------------------------------------------------

    def _arm_deadline(self) -> None:
        due, armed = self.router.next_due_at(), self._deadline
        if due is None or (armed is not None and due == armed[0]):
            return
        if armed is not None:
            armed[1].cancel()
        delay_s = max(due - time.monotonic(), 0.0)
        self._deadline = due, self._loop.call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._deadline = None
        self._run(self.router.expire(time.monotonic()))

    # --- Effects --------------------------------------------------------------------------------

    def _run(self, effects: tickets.Effects) -> None:
        for effect in effects:
            self._perform[type(effect)](effect)
        self._arm_deadline()

    def _assign(self, effect: tickets.Assign) -> None:
        ticket = effect.ticket
        outbox = self._replicas.outbox(effect.replica)
        caller = None if ticket.is_mirrored else self._callers.get(ticket.caller)
        if outbox is None or (caller is None and not ticket.is_mirrored):
            return  # its death is being handled, and ends the ticket
        if ticket.preference is not None:
            self._request_routers.routed(ticket.preference, effect.replica)
        timeout_s = None
        if ticket.deadline_at is not None:
            timeout_s = max(ticket.deadline_at - time.monotonic(), 0.0)
        outbox.put(
            Assignment(
                ticket=ticket.number,
                query=ticket.query,
                caller=None if caller is None else caller.pickled,
                caller_incarnation="" if caller is None else caller.process.incarnation,
                endpoint=ticket.endpoint,
                route=ticket.route,
                timeout_s=timeout_s,
                compare=() if ticket.compare == () else self._replicas.compare_at(ticket),
            )
        )

    def _compare(self, effect: tickets.Compare) -> None:
        if (outbox := self._replicas.outbox(effect.replica)) is not None:
            places = self._replicas.compare_at(effect.ticket) or ()
            outbox.put_patiently((effect.ticket.number, places), MIRROR_S)

    def _cancel(self, effect: tickets.Cancel) -> None:
        if (outbox := self._replicas.outbox(effect.replica)) is not None:
            outbox.put(effect.number)

    def _refuse(self, effect: tickets.Refuse) -> None:
        """Answer with an error; where a replica has died, once it is known why."""
        caller = self._callers.get(effect.caller)
        if not effect.died:
            if caller is not None:
                caller.outbox.put(FailedAnswer(*effect[1:-1]))
            return
        if effect.died not in self._died:
            self._died[effect.died] = []
            unknown = EndDescribed(request_id=effect.died, cause="")
            question = DescribeEnd(request_id=effect.died, replica=effect.died, address=None)
            is_asked = self._send(question)
            wait_s = DESCRIBED_WITHIN_S if is_asked else 0.0
            self._loop.call_later(wait_s, lambda: self.end_described(unknown))
        self._died[effect.died].append(effect)

    def end_described(self, message: EndDescribed) -> None:
        """Answer what a replica took along. Of the causes, clients get one."""
        is_oom = RestartReason.parse(message.cause) is RestartReason.OUT_OF_MEMORY
        for effect in self._died.pop(message.request_id, ()):
            text = f"{effect.text} (the replica ran out of memory)" if is_oom else effect.text
            self._refuse(effect._replace(text=text, died=""))
