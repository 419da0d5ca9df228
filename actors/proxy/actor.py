"""The proxy: one actor per host; the shell around the router."""

from __future__ import annotations

import logging
import pickle
import random
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from thespian.actors import ActorAddress

from greenroom.actors.cluster.epoch_fence import Following
from greenroom.actors.cluster.heartbeats import Beater, beater_towards
from greenroom.actors.messages.control import (
    Changed,
    Listen,
    LoadReported,
    MeetController,
    MeetProxy,
    ReplicaLost,
    TalliesReported,
)
from greenroom.actors.messages.queries import (
    Address,
    AnswerQueries,
    AskProxy,
    AskProxyReply,
    Assignment,
    AttachCaller,
    AttachCallerReply,
    CompareAt,
    DetachCaller,
    FailedAnswer,
    Message,
    Process,
    QueriesFinished,
    RunQueries,
    SubmitQueries,
)
from greenroom.actors.proxy.metrics import Metrics
from greenroom.actors.runtime.actor import LoopActor
from greenroom.actors.runtime.loop import Loop, Outbox, Timer, nothing
from greenroom.actors.runtime.port import CONTROLLER, Finder, Port
from greenroom.actors.runtime.processes import is_alive
from greenroom.actors.runtime.settings import resolved_gates
from greenroom.actors.transport.addresses import parse_address
from greenroom.core.rollouts.judging import OVERDUE_S, Tallies
from greenroom.core.routing import tickets
from greenroom.core.routing.router import CANCELLED_STATUS, COPY_MORE_S, COPY_S, SATURATED_S, Router
from greenroom.core.routing.tables import (
    BACKEND_PREFIX,
    ENDPOINT_PREFIX,
    ROLLOUT_PREFIX,
    BackendTable,
    ReplicaTable,
    backend_of,
    order_of_taking,
)
from greenroom.core.routing.tickets import Pairing

# Replicas of other hosts that a proxy cannot reach, and tries again.
#
# Whether such a replica is dead, or its host lost, the controller has to judge, by what it sees
# itself. Until then the proxy leaves it out, whatever the tables say, and knocks now and then.

TRY_AGAIN_S = 1.0


class Unreachable:
    """``meet`` makes the message to knock with; ``is_wanted`` tells whether a table names one.

    ``reached`` is called when one has answered.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        meet: Callable[[ReplicaTable], Message],
        is_wanted: Callable[[ReplicaTable], bool],
        reached: Callable[[ReplicaTable], None],
    ) -> None:
        self._loop = loop
        self._meet = meet
        self._is_wanted = is_wanted
        self._reached = reached
        self._processes: set[Hashable] = set()

    def __contains__(self, replica: ReplicaTable) -> bool:
        return replica.process in self._processes

    def add(self, replica: ReplicaTable) -> None:
        """Leave a replica out until it has answered."""
        if replica.process not in self._processes:
            self._processes.add(replica.process)
            self._later(replica)

    def _later(self, replica: ReplicaTable) -> None:
        self._loop.call_later(TRY_AGAIN_S, lambda: self._try(replica))

    def _try(self, replica: ReplicaTable) -> None:
        if not self._is_wanted(replica):
            self._processes.discard(replica.process)
            return
        self._loop.send(
            replica.address,
            self._meet(replica),
            on_sent=lambda: self._answered(replica),
            on_failed=lambda: self._later(replica),
        )

    def _answered(self, replica: ReplicaTable) -> None:
        self._processes.discard(replica.process)
        self._reached(replica)


# Where a query's answer and its copy's are to be compared, as it travels with both.

MAX_PICKLES = 1_000  # of addresses and settings; then all are made anew


class Link(Protocol):
    """What is needed of a link."""

    @property
    def table(self) -> ReplicaTable:
        """The replica that it leads to."""


class ComparisonTargets:
    """Turns pairings of tickets into places; ``links`` are to the replicas that live, by tag."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = links
        self._pickles: dict[tuple[str, str], bytes] = {}

    def of(self, pairings: tuple[Pairing, ...] | None) -> tuple[CompareAt, ...] | None:
        """Return a place for each replica that lives; None where they are not known yet."""
        if pairings is None:
            return None
        places = []
        for number, tag, settings in pairings:
            link = self._links.get(tag)
            if link is not None:
                packed = b""
                if settings is not None:
                    packed = self._pickled(("settings", settings[0]), settings)
                places.append((number, self._place(link.table), packed))
        return tuple(places)

    def _place(self, replica: ReplicaTable) -> bytes:
        process: Any = replica.process
        incarnation = process.incarnation
        return self._pickled(("replica", incarnation), (incarnation, replica.address))

    def _pickled(self, key: tuple[str, str], value: Any) -> bytes:
        """Pickle what goes with many queries once; ``key`` is its own."""
        pickled = self._pickles.get(key)
        if pickled is None:
            if len(self._pickles) >= MAX_PICKLES:
                self._pickles.clear()
            pickled = self._pickles[key] = pickle.dumps(value)
        return pickled


logger = logging.getLogger(__name__)

LOAD_REPORT_S = 0.5
TALLIES_REPORT_S = 1.0
LISTEN_AGAIN_S = 2.0  # also the heartbeat by which the controller knows that this host lives
SEEK_AFTER_S = 0.2  # in which a host process that lives introduces the controller


class _Recipient(NamedTuple):
    """Who gets an answer."""

    address: bytes | None  # pickled
    incarnation: str


class _Caller(NamedTuple):
    address: bytes  # pickled
    incarnation: str
    outbox: Outbox
    unwatch: Callable[[], None]


class _QueryFailedError(Exception):
    """The router raised on a query of this caller's."""

    def __init__(self, caller: str, query_id: int, error: Exception) -> None:
        super().__init__(f"query {query_id}: {type(error).__name__}: {error}")
        self.caller = caller
        self.query_id = query_id


_NOBODY = _Recipient(None, "")  # what copies for shadows are answered to


class _Link(NamedTuple):
    table: ReplicaTable
    outbox: Outbox
    unwatch: Callable[[], None]


class Proxy(LoopActor):
    """Dispatches callers' queries to replicas, as the core's router says.

    It holds no hard state: a new one learns its tables from the controller by long poll, and its
    callers attach again when they see that the old one is gone.
    """

    role = "proxy"
    carries_bodies = True

    def started(self) -> None:
        """See :meth:`LoopActor.started`."""
        self._router = Router(random.random, self.settings.host_name)
        self._tables: dict[str, BackendTable] = {}  # as the controller has them
        self._unreachable = Unreachable(
            self.loop, meet=self._meet, is_wanted=self._is_wanted, reached=self._reached
        )
        self._beater: Beater | None = None
        self._unwatch_host: Callable[[], None] = nothing
        self._metrics = Metrics()
        self._tallies = Tallies()
        self._tallies_timer: Timer | None = None  # armed while an endpoint has a rollout
        self._held: set[str] = set()  # the keys of its tables
        self._following = Following(self.loop)
        self._finder: Finder | None = None  # of the controller, while no host process names one
        self._port: Port | None = None
        self.loop.call_later(SEEK_AFTER_S, self._listen)
        self._ready = False
        self._waiting: list[SubmitQueries] = []
        self._listen_timer: Timer | None = None
        self._load_timer: Timer | None = None  # armed while there are queries
        self._copies_timer: Timer | None = None  # armed while copies for shadows are due
        self._deadline_timer: Timer | None = None
        self._deadline_at: float | None = None
        self._callers: dict[str, _Caller] = {}
        self._links: dict[str, _Link] = {}  # by the replica's tag
        self._meeting_places = ComparisonTargets(self._links)
        self._linked: dict[str, set[str]] = {}  # backend -> the replicas of its table
        self._leaving: set[str] = set()  # replicas that are in no table, and may have queries
        self._perform: dict[type, Callable[[Any], None]] = {
            tickets.Assign: self._assign,
            tickets.Cancel: self._cancel,
            tickets.Compare: self._compare,
            tickets.Refuse: self._refuse,
            tickets.Ended: self._ended,
            tickets.Dropped: lambda effect: self._metrics.dropped(*effect),
            tickets.Repeated: self._repeated,
            tickets.NotRepeated: lambda effect: self._metrics.not_repeated(*effect),
            tickets.Starved: self._starved,
        }

    def survives(self, message: Any, sender: Address, error: Exception) -> bool:
        """Answer a question that failed; it has changed nothing."""
        if not isinstance(message, AskProxy):
            return False
        self.loop.send(sender, AskProxyReply(request_id=message.request_id, value=None))
        return True

    def owed(self, message: Any, sender: Address, error: Exception) -> Iterable[Any]:
        """Return the answer to the query that failed; callers send all others to the next proxy.

        That one they would send to the next one as well, which would fail like this one.
        """
        if not isinstance(error, _QueryFailedError):
            return
        caller = self._callers.get(error.caller)
        if caller is not None:
            text = "the router failed on the query; see proxy.log"
            answers = (FailedAnswer(error.query_id, "GreenroomError", text),)
            answer = AnswerQueries(incarnation=caller.incarnation, answers=answers)
            yield pickle.loads(caller.address), answer

    @property
    def _controller(self) -> Address | None:
        return self._following.controller

    # --- Tables, by long poll -------------------------------------------------------------------

    def receiveMsg_MeetController(self, message: MeetController, _sender: Address) -> None:
        """Listen to this controller from now on, and beat for this host."""
        if not self._following.meets(message):
            return
        if message.by is not None:
            self._seek_no_more()
            self._unwatch_host()
            self._unwatch_host = self.loop.watch_process(
                message.by, nothing
            )  # to end a hanging one
        if self._beater is not None:
            self._beater.close()
        self._beater = beater_towards(
            message.controller,
            message.process.incarnation,
            self.settings,
            self.loop.asyncio,
            self.process.incarnation,
        )
        self._listen()
        self._report_load_now()  # also when there is none: a new controller waits for that

    def receiveMsg_Changed(self, message: Changed, sender: Address) -> None:
        """Take newer tables; then tell the controller that they are held."""
        if not self._following.takes(message, sender):
            return
        snapshots = message.snapshots
        if message.complete:
            gone = dict.fromkeys(self._held - snapshots.keys(), (message.upto, None))
            snapshots = {**gone, **snapshots}
        for key, (_, table) in sorted(snapshots.items(), key=order_of_taking):
            self._take_table(key, table, time.monotonic())
        self._following.seen = message.upto
        if not self._ready:
            self._begin_dispatch()
        self._listen()

    def _take_table(self, key: str, table: Any, now: float) -> None:
        (self._held.discard if table is None else self._held.add)(key)
        if key.startswith(ENDPOINT_PREFIX):
            name = key.removeprefix(ENDPOINT_PREFIX)
            self._run(self._router.set_endpoint(name, table, now))
        elif key.startswith(ROLLOUT_PREFIX):
            self._tallies.watch(key.removeprefix(ROLLOUT_PREFIX), table)
            if self._tallies_timer is None:
                self._report_tallies()
        else:
            self._set_backend(key.removeprefix(BACKEND_PREFIX), table, now)

    def _begin_dispatch(self) -> None:
        self._ready = True
        for caller in self._callers.values():
            self._welcome(pickle.loads(caller.address))
        waiting, self._waiting = self._waiting, []
        for submission in waiting:
            self._submit(submission)

    def _listen(self) -> None:
        if self._listen_timer is not None:
            self._listen_timer.cancel()
        self._listen_timer = self.loop.call_later(LISTEN_AGAIN_S, self._listen)
        if self._controller is None:
            self._seek()
        else:
            seen = self._following.seen
            listen = Listen(
                listener=self.process,
                host=self.settings.host_name,
                seen=seen,
                store=self._following.store,
            )
            self.loop.send(self._controller, listen, on_failed=self._seek)

    def _seek(self) -> None:
        """Look for the controller, as the host process does: that one may be dead, too."""
        if self._finder is not None:
            return
        settings = self.settings
        asyncio_loop = self.loop.asyncio
        self._port = Port(settings.admin_port, self.process, asyncio_loop)
        gates = [settings.own_address] if settings.leaders else []
        gates += resolved_gates(settings)
        addresses = [ActorAddress(parse_address(gate)) for gate in gates]
        self._finder = Finder(self._port, CONTROLLER, self._sought, gates=lambda: addresses)
        self._finder.start()

    def _seek_no_more(self) -> None:
        if self._finder is not None and self._port is not None:
            self._finder.stop()
            self._port.detach()
            self._finder = self._port = None

    def _sought(self, controller: Address, process: Process) -> None:
        if self._finder is not None:
            epoch = self._finder.epoch
            found = MeetController(controller=controller, process=process, by=None, epoch=epoch)
            self.receiveMsg_MeetController(found, self.myAddress)

    def _set_backend(self, tag: str, table: BackendTable | None, now: float) -> None:
        if table is not None:
            self._tables[tag] = table
            table = self._without_dead(table)
        else:
            self._tables.pop(tag, None)
        for replica in table.replicas if table is not None else ():
            link = self._links.get(replica.tag)
            if link is not None and link.table != replica:
                self._replica_lost(link.table)  # a new process of the same tag
            if replica.tag not in self._links:
                self._links[replica.tag] = self._link(replica)
        present = {replica.tag for replica in table.replicas} if table is not None else set()
        self._leaving = (self._leaving | self._linked.pop(tag, set())) - present
        if present:
            self._linked[tag] = present
        self._run(self._router.set_backend(tag, table, now))
        self._let_go(self._leaving - self._router.ongoing(self._leaving).keys())

    def _let_go(self, replicas: set[str]) -> None:
        """Forget replicas that have left the tables, and have nothing to do any more."""
        self._leaving -= replicas
        for tag in replicas & self._links.keys():
            self._links.pop(tag).unwatch()

    def _without_dead(self, table: BackendTable) -> BackendTable:
        """Leave out replicas whose end was seen here before the controller heard of it.

        Each query that was sent to one again would count as one more replica that died under it.
        """
        links = {r.tag: self._links.get(r.tag) for r in table.replicas}
        known = {tag: link.table for tag, link in links.items() if link is not None}
        living = tuple(r for r in table.replicas if known.get(r.tag) == r or self._lives(r))
        return replace(table, replicas=living)

    def _link(self, replica: ReplicaTable) -> _Link:
        process: Any = replica.process
        outbox = Outbox(
            self.loop,
            replica.address,
            lambda items: self._pack_run(process.incarnation, items),
            on_failed=lambda _items: self._replica_lost(replica),
            weigh=lambda item: len(item.query.call) if isinstance(item, Assignment) else 0,
        )
        gone = lambda: self._replica_lost(replica)  # noqa: E731
        unwatch = self.loop.watch_process(process, gone, replica.address)
        self.loop.send(replica.address, self._meet(replica))
        return _Link(replica, outbox, unwatch)

    def _meet(self, replica: ReplicaTable) -> MeetProxy:
        is_near = self._is_near(replica)
        return MeetProxy(proxy=self.myAddress, process=self.process, is_near=is_near)

    def _is_near(self, replica: ReplicaTable) -> bool:
        return replica.host in {"", self.settings.host_name}

    def _lives(self, replica: ReplicaTable) -> bool:
        process: Any = replica.process
        return is_alive(process) if self._is_near(replica) else replica not in self._unreachable

    def _is_wanted(self, replica: ReplicaTable) -> bool:
        table = self._tables.get(backend_of(replica))
        return table is not None and replica in table.replicas

    def _reached(self, replica: ReplicaTable) -> None:
        if self._is_wanted(replica):
            backend = backend_of(replica)
            self._set_backend(backend, self._tables[backend], time.monotonic())

    def _replica_lost(self, replica: ReplicaTable) -> None:
        """Give up a replica's process, unless another one has its tag by now."""
        tag = replica.tag
        link = self._links.get(tag)
        if link is None or link.table != replica:
            return
        del self._links[tag]
        link.unwatch()
        now = time.monotonic()
        unsent = [item.ticket for item in link.outbox.drop() if isinstance(item, Assignment)]
        self._run(self._router.replica_lost(tag, unsent, now))
        if not self._is_near(replica):
            self._unreachable.add(replica)
        elif self._controller is not None:
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
            lost = lambda: self._caller_lost(incarnation)  # noqa: E731
            unwatch = self.loop.watch_process(message.process, lost, sender)
            address = pickle.dumps(sender)
            self._callers[incarnation] = _Caller(address, incarnation, outbox, unwatch)
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

    def receiveMsg_SubmitQueries(self, message: SubmitQueries, sender: Address) -> None:
        """Dispatch a caller's queries; before the first tables came they wait.

        A caller of another host may have been given up, and not know it: it attaches again.
        """
        if message.incarnation not in self._callers:
            self.loop.send(sender, AttachCallerReply(proxy=self.process, ready=False))
        elif self._ready:
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
            resent = query.id in message.resent
            try:
                self._run(self._router.submit(caller, query, now, resent=resent))
            except Exception as error:
                raise _QueryFailedError(caller, query.id, error) from error
        for query_id in message.cancelled:
            self._run(self._router.cancel(caller, query_id, now))
        self._arm_deadline()
        self._copy_in(COPY_S)
        if self._load_timer is None:
            self._load_timer = self.loop.call_later(LOAD_REPORT_S, self._report_load)

    def _copy_in(self, delay_s: float) -> None:
        if self._router.has_copies_due and self._copies_timer is None:
            self._copies_timer = self.loop.call_later(delay_s, self._make_copies)

    def _make_copies(self) -> None:
        self._copies_timer = None
        self._run(self._router.make_copies(time.monotonic()))
        self._copy_in(COPY_MORE_S)
        self._arm_deadline()

    def receiveMsg_QueriesFinished(self, message: QueriesFinished, _sender: Address) -> None:
        """Free the slots of what a replica has done, queue again what it rejected."""
        link = self._links.get(message.replica)
        process: Any = link.table.process if link is not None else None
        if process is None or process.incarnation != message.incarnation:
            return
        now, replica = time.monotonic(), message.replica
        if message.models:
            self._router.holds(replica, message.models[-1])
        if message.begun:
            self._router.begun(replica, message.begun, now)
        if message.answered:
            self._run(self._router.answered(replica, message.answered, now))
        if message.delivered:  # perhaps of the same tickets
            self._run(self._router.delivered(replica, message.delivered))
        if message.undelivered:
            self._run(self._router.undelivered(replica, message.undelivered, now))
        if message.cancelled:
            cancelled = [(ticket, CANCELLED_STATUS) for ticket in message.cancelled]
            self._run(self._router.finished(replica, cancelled, now))
        if message.rejected:
            draining = message.draining
            self._run(self._router.rejected(replica, message.rejected, now, draining=draining))
            self.loop.call_later(SATURATED_S, self._wake)

    def receiveMsg_AskProxy(self, message: AskProxy, sender: Address) -> None:
        """Answer questions of the HTTP front."""
        answers: dict[str, Callable[[], Any]] = {
            "routes": self._router.routes,
            "unready": self._router.unready,
            "controller": self._following.known,
            "metrics": lambda: self._metrics.text(*self._router.load_by_endpoint()),
        }
        value = answers[message.what]() if message.what in answers else None
        self.loop.send(sender, AskProxyReply(request_id=message.request_id, value=value))

    # --- Effects --------------------------------------------------------------------------------

    def _run(self, effects: tickets.Effects) -> None:
        for effect in effects:
            self._perform[type(effect)](effect)

    def _assign(self, effect: tickets.Assign) -> None:
        ticket = effect.ticket
        link = self._links.get(effect.replica)
        caller = _NOBODY if ticket.caller is None else self._callers.get(str(ticket.caller))
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
                caller_incarnation=caller.incarnation,
                endpoint=ticket.endpoint,
                route=ticket.route,
                timeout_s=timeout_s,
                compare=() if ticket.compare == () else self._meeting_places.of(ticket.compare),
            )
        )

    def _compare(self, effect: tickets.Compare) -> None:
        link = self._links.get(effect.replica)
        if link is not None:
            places = self._meeting_places.of(effect.ticket.compare) or ()
            link.outbox.put_patiently((effect.ticket.number, places), COPY_S)

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
        if self._tallies and not effect.is_copy:
            self._tallies.ended(*effect[:4])

    def _repeated(self, effect: tickets.Repeated) -> None:
        self._metrics.repeated(*effect)
        self._tallies.lost(*effect)

    def _starved(self, _effect: tickets.Starved) -> None:
        self._report_load_now()

    def _report_load_now(self) -> None:
        if self._load_timer is not None:
            self._load_timer.cancel()
        self._load_timer = self.loop.call_later(0, self._report_load)

    def _report_load(self) -> None:
        """Tell the controller what there is, and again until there is nothing."""
        load = self._router.busy()
        again = bool(load) or self._controller is None
        self._load_timer = self.loop.call_later(LOAD_REPORT_S, self._report_load) if again else None
        if self._controller is not None:
            report = LoadReported(proxy=self.process, load=load)
            self.loop.send(self._controller, report)

    def _report_tallies(self) -> None:
        """Tell the controller what has been counted for rollouts, while there is any."""
        self._tallies_timer = None
        if not self._tallies:
            return
        self._tallies_timer = self.loop.call_later(TALLIES_REPORT_S, self._report_tallies)
        if self._controller is not None:
            tallies = self._tallies.plain(self._router.overdue(time.monotonic() - OVERDUE_S))
            self.loop.send(self._controller, TalliesReported(proxy=self.process, tallies=tallies))

    def _pack_run(self, incarnation: str, items: list[Any]) -> RunQueries:
        return RunQueries(
            incarnation=incarnation,
            proxy=self.process,
            assignments=tuple(item for item in items if isinstance(item, Assignment)),
            cancelled=tuple(item for item in items if isinstance(item, int)),
            compared=tuple(item for item in items if type(item) is tuple),
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
