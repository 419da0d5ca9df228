"""The proxy: one actor per host; the shell around the router."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from understudy.actors.base import LoopActor
from understudy.actors.loop import Outbox, Timer
from understudy.actors.messages import (
    Address,
    AnswerQueries,
    AskProxy,
    AskProxyReply,
    Assignment,
    AttachCaller,
    AttachCallerReply,
    Changed,
    DetachCaller,
    FailedAnswer,
    Listen,
    MeetController,
    MeetProxy,
    Process,
    QueriesFinished,
    ReplicaLost,
    RunQueries,
    SubmitQueries,
)
from understudy.actors.metrics import Metrics
from understudy.core import tickets
from understudy.core.routing import SATURATED_S, Router
from understudy.core.tables import BACKEND_PREFIX, ENDPOINT_PREFIX, BackendTable, ReplicaTable

logger = logging.getLogger(__name__)

LISTEN_AGAIN_S = 2.0  # also the heartbeat by which the controller knows that this host lives


class _Caller(NamedTuple):
    address: Address
    process: Process
    outbox: Outbox
    unwatch: Callable[[], None]


class _Link(NamedTuple):
    table: ReplicaTable
    outbox: Outbox
    unwatch: Callable[[], None]


class Proxy(LoopActor):
    """Dispatches callers' queries to replicas as its :class:`~understudy.core.routing.Router` says.

    It holds no hard state: a new one learns its tables from the controller by long poll, and its
    callers attach again when they see that the old one is gone.
    """

    role = "proxy"

    def started(self) -> None:
        """See :meth:`LoopActor.started`."""
        self._router = Router(random.random)
        self._metrics = Metrics()
        self._known: dict[str, int] = {}
        self._controller: Address | None = None
        self._ready = False
        self._waiting: list[SubmitQueries] = []
        self._listen_timer: Timer | None = None
        self._deadline_timer: Timer | None = None
        self._deadline_at: float | None = None
        self._callers: dict[str, _Caller] = {}
        self._links: dict[str, _Link] = {}
        self._perform: dict[type, Callable[[Any], None]] = {
            tickets.Assign: self._assign,
            tickets.Cancel: self._cancel,
            tickets.Refuse: self._refuse,
            tickets.Ended: self._ended,
        }

    # --- Tables, by long poll -------------------------------------------------------------------

    def receiveMsg_MeetController(self, message: MeetController, _sender: Address) -> None:
        """Listen to this controller from now on."""
        self._controller = message.controller
        self._listen()

    def receiveMsg_Changed(self, message: Changed, sender: Address) -> None:
        """Take newer tables; then tell the controller that they are held."""
        self._controller = sender
        now = time.monotonic()
        for key, (snapshot_id, table) in sorted(message.snapshots.items(), key=_apply_order):
            self._known[key] = snapshot_id
            if table is None:
                del self._known[key]
            if key.startswith(ENDPOINT_PREFIX):
                name = key.removeprefix(ENDPOINT_PREFIX)
                self._run(self._router.set_endpoint(name, table, now))
            else:
                self._set_backend(key.removeprefix(BACKEND_PREFIX), table, now)
        if not self._ready:
            self._begin_dispatch()
        self._listen()

    def _begin_dispatch(self) -> None:
        self._ready = True
        for caller in self._callers.values():
            self._welcome(caller.address)
        waiting, self._waiting = self._waiting, []
        for submission in waiting:
            self._submit(submission)

    def _listen(self) -> None:
        if self._listen_timer is not None:
            self._listen_timer.cancel()
        self._listen_timer = self.loop.call_later(LISTEN_AGAIN_S, self._listen)
        if self._controller is not None:
            listen = Listen(listener=self.process, host="", known=dict(self._known))
            self.loop.send(self._controller, listen)

    def _set_backend(self, tag: str, table: BackendTable | None, now: float) -> None:
        for replica in table.replicas if table is not None else ():
            link = self._links.get(replica.tag)
            if link is not None and link.table != replica:
                self._replica_lost(replica.tag)  # a new process of the same tag
            if replica.tag not in self._links:
                self._links[replica.tag] = self._link(replica)
        self._run(self._router.set_backend(tag, table, now))
        for replica_tag in set(self._links) - set(self._router.ongoing()):
            self._links.pop(replica_tag).unwatch()

    def _link(self, replica: ReplicaTable) -> _Link:
        process: Any = replica.process
        outbox = Outbox(
            self.loop,
            replica.address,
            lambda items: self._pack_run(process.incarnation, items),
            on_failed=lambda _items: self._replica_lost(replica.tag),
            weigh=lambda item: len(item.query.call) if isinstance(item, Assignment) else 0,
        )
        unwatch = self.loop.watch_process(process, lambda: self._replica_lost(replica.tag))
        meet = MeetProxy(proxy=self.myAddress, process=self.process)
        self.loop.send(replica.address, meet)
        return _Link(replica, outbox, unwatch)

    def _replica_lost(self, tag: str) -> None:
        link = self._links.pop(tag, None)
        if link is None:
            return
        link.unwatch()
        now = time.monotonic()
        unsent = [item.ticket for item in link.outbox.drop() if isinstance(item, Assignment)]
        self._run(self._router.replica_lost(tag, unsent, now))
        if self._controller is not None:
            process: Any = link.table.process
            lost = ReplicaLost(replica=tag, incarnation=process.incarnation)
            self.loop.send(self._controller, lost)

    # --- Callers --------------------------------------------------------------------------------

    def receiveMsg_AttachCaller(self, message: AttachCaller, sender: Address) -> None:
        """Know a caller, so that it can be answered and its death noticed."""
        incarnation = message.process.incarnation
        if incarnation not in self._callers:
            outbox = Outbox(
                self.loop,
                sender,
                lambda items: AnswerQueries(incarnation=incarnation, answers=tuple(items)),
            )
            unwatch = self.loop.watch_process(
                message.process, lambda: self._caller_lost(incarnation)
            )
            self._callers[incarnation] = _Caller(sender, message.process, outbox, unwatch)
        if self._ready:
            self._welcome(sender)

    def receiveMsg_DetachCaller(self, message: DetachCaller, _sender: Address) -> None:
        """Forget a caller, as if its process had ended."""
        self._caller_lost(message.incarnation)

    def _welcome(self, caller: Address) -> None:
        self.loop.send(caller, AttachCallerReply(proxy=self.process, ready=True))

    def _caller_lost(self, incarnation: str) -> None:
        caller = self._callers.pop(incarnation, None)
        if caller is not None:
            caller.unwatch()
            self._run(self._router.caller_lost(incarnation, time.monotonic()))

    def receiveMsg_SubmitQueries(self, message: SubmitQueries, _sender: Address) -> None:
        """Dispatch a caller's queries; before the first tables came they wait."""
        if self._ready:
            self._submit(message)
        else:
            self._waiting.append(message)

    def _submit(self, message: SubmitQueries) -> None:
        caller = message.incarnation
        if caller not in self._callers:
            logger.warning("ignored queries of a caller that is not attached")
            return
        now = time.monotonic()
        for query in message.queries:
            self._run(self._router.submit(caller, query, now))
        for query_id in message.cancelled:
            self._run(self._router.cancel(caller, query_id, now))
        self._arm_deadline()

    def receiveMsg_QueriesFinished(self, message: QueriesFinished, _sender: Address) -> None:
        """Free the slots of what a replica has done, queue again what it rejected."""
        link = self._links.get(message.replica)
        process: Any = link.table.process if link is not None else None
        if process is None or process.incarnation != message.incarnation:
            return
        now = time.monotonic()
        outcomes = [(outcome.ticket, outcome.status) for outcome in message.finished]
        self._run(self._router.finished(message.replica, outcomes, now))
        if message.rejected:
            draining = message.draining
            self._run(
                self._router.rejected(message.replica, message.rejected, now, draining=draining)
            )
            self.loop.call_later(SATURATED_S, self._wake)

    def receiveMsg_AskProxy(self, message: AskProxy, sender: Address) -> None:
        """Answer questions of the HTTP front."""
        answers: dict[str, Callable[[], Any]] = {
            "routes": self._router.routes,
            "metrics": lambda: self._metrics.text(self._router.load()),
        }
        value = answers[message.what]() if message.what in answers else None
        self.loop.send(sender, AskProxyReply(request_id=message.request_id, value=value))

    # --- Effects --------------------------------------------------------------------------------

    def _run(self, effects: tickets.Effects) -> None:
        for effect in effects:
            self._perform[type(effect)](effect)

    def _assign(self, effect: tickets.Assign) -> None:
        ticket = effect.ticket
        caller = self._callers.get(str(ticket.caller))
        link = self._links.get(effect.replica)
        if caller is None or link is None:
            return  # its death is being handled, and ends the ticket
        timeout_s = None
        if ticket.deadline_at is not None:
            timeout_s = max(ticket.deadline_at - time.monotonic(), 0.0)
        link.outbox.put(
            Assignment(
                ticket=ticket.number,
                query=ticket.query,
                caller=caller.address,
                caller_incarnation=caller.process.incarnation,
                endpoint=ticket.endpoint,
                route=ticket.route,
                timeout_s=timeout_s,
            )
        )

    def _cancel(self, effect: tickets.Cancel) -> None:
        link = self._links.get(effect.replica)
        if link is not None:
            link.outbox.put(effect.ticket.number)

    def _refuse(self, effect: tickets.Refuse) -> None:
        caller = self._callers.get(str(effect.caller))
        if caller is not None:
            caller.outbox.put(FailedAnswer(*effect[1:]))

    def _ended(self, effect: tickets.Ended) -> None:
        self._metrics.ended(*effect)

    def _pack_run(self, incarnation: str, items: list[Any]) -> RunQueries:
        return RunQueries(
            incarnation=incarnation,
            proxy=self.process,
            assignments=tuple(item for item in items if isinstance(item, Assignment)),
            cancelled=tuple(item for item in items if isinstance(item, int)),
        )

    def _wake(self) -> None:
        self._run(self._router.wake(time.monotonic()))

    def _arm_deadline(self) -> None:
        due = self._router.next_deadline_at()
        if due is None or due == self._deadline_at:
            return
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_at = due
        delay_s = max(due - time.monotonic(), 0.0)
        self._deadline_timer = self.loop.call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._deadline_at = None
        self._run(self._router.expire(time.monotonic()))
        self._arm_deadline()


def _apply_order(item: tuple[str, tuple[int, Any]]) -> int:
    """Never let an endpoint name a backend that is not there (yet, or any more)."""
    key, (_, table) = item
    if key.startswith(ENDPOINT_PREFIX):
        return 0 if table is None else 2
    return 3 if table is None else 1
