"""A proxy's links to replicas: what is sent to them, and which of them live and can be reached.

A replica of another host may be out of reach. Whether it is dead, or its host lost, is for the
controller to judge. Until then it is left out, whatever the tables say, and tried again now and
then.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from greenroom.actors.messages.control import MeetProxy, ReplicaLost
from greenroom.actors.messages.queries import Address, Assignment, CompareAt, Process, RunQueries
from greenroom.actors.proxy.reports import Send
from greenroom.actors.proxy.silent_hosts import SilentHosts
from greenroom.actors.runtime.loop import Loop, Outbox, nothing
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BackendTable, ReplicaTable, backend_of
from greenroom.core.routing.tickets import Effects, Ticket

TRY_AGAIN_S = 1.0  # to reach a replica of another host that could not be reached
MAX_PICKLES = 1_000  # of addresses and settings for comparisons; then all are made anew


class _Link(NamedTuple):
    table: ReplicaTable
    outbox: Outbox
    unwatch: Callable[[], None]


class ReplicaLinks:
    """The links of one proxy, whose actor is at ``address``; ``run`` performs the router's effects.

    ``introduce`` sends a replica of this host its first message.
    """

    def __init__(
        self,
        loop: Loop,
        process: Process,
        address: Address,
        router: Router,
        *,
        send: Send,
        run: Callable[[Effects], None],
        introduce: Callable[[ReplicaTable, MeetProxy], None],
    ) -> None:
        self._loop = loop
        self._process = process
        self._address = address
        self._router = router
        self._send = send
        self._run = run
        self._introduce = introduce
        self._tables: dict[str, BackendTable] = {}  # as the controller has them
        self._links: dict[str, _Link] = {}  # by tag
        self._unreachable: set[Hashable] = set()
        self._silent = SilentHosts(loop, self._host_silent, self._host_answers)
        self._pickles: dict[tuple[str, str], bytes] = {}  # what goes with many mirrored queries

    def outbox(self, tag: str) -> Outbox | None:
        """Return what sends a replica its queries; None for one whose death is being handled."""
        link = self._links.get(tag)
        return None if link is None else link.outbox

    def set_backend(self, tag: str, table: BackendTable | None, now: float) -> None:
        """Have a link to each replica of a backend's newest table, and the router use these."""
        if table is None:
            self._tables.pop(tag, None)
        else:
            self._tables[tag] = table
            table = self._without_dead(table)
        for replica in table.replicas if table is not None else ():
            link = self._links.get(replica.tag)
            if link is not None and link.table != replica:
                self._gone(link.table)  # a new process of the same tag
            if replica.tag not in self._links:
                self._links[replica.tag] = self._link(replica)
        self._run(self._router.set_backend(tag, table, now))
        for done in self._links.keys() - self._router.state.replicas.keys():
            self._links.pop(done).unwatch()

    def _table(self, tag: str) -> ReplicaTable | None:
        link = self._links.get(tag)
        return None if link is None else link.table

    def _without_dead(self, table: BackendTable) -> BackendTable:
        """Leave out replicas whose end was seen here before the controller heard of it.

        Each query that was sent to one again would count as one more replica that died under it.
        """
        living = tuple(r for r in table.replicas if self._table(r.tag) == r or self._lives(r))
        return replace(table, replicas=living)

    def _link(self, replica: ReplicaTable) -> _Link:
        process: Any = replica.process
        outbox = Outbox(
            self._loop,
            replica.address,
            partial(self._pack_run, process.incarnation),
            on_failed=lambda _items: self._gone(replica),
            weigh=lambda item: len(item.query.call) if isinstance(item, Assignment) else 0,
        )
        gone = lambda: self._gone(replica)  # noqa: E731
        cut_off = lambda: self._gone(replica, is_certain=False)  # noqa: E731
        unwatch_process = self._loop.watch_process(process, gone, replica.address, cut_off)
        unfollow = nothing
        if self._is_near(replica):
            self._introduce(replica, self._introduction(replica))
        else:
            unfollow = self._silent.follow(replica.host, replica.address)
            self._loop.send(replica.address, self._introduction(replica))

        def unwatch() -> None:
            unwatch_process()
            unfollow()

        return _Link(replica, outbox, unwatch)

    def _introduction(self, replica: ReplicaTable) -> MeetProxy:
        is_near = self._is_near(replica)
        return MeetProxy(proxy=self._address, process=self._process, is_near=is_near)

    def _pack_run(self, incarnation: str, items: list[Any]) -> RunQueries:
        by_type: dict[type, list[Any]] = {Assignment: [], int: [], tuple: []}
        for item in items:
            by_type[type(item)].append(item)
        assignments, cancelled, compared = map(tuple, by_type.values())
        return RunQueries(
            incarnation=incarnation,
            proxy=self._process,
            assignments=assignments,
            cancelled=cancelled,
            compared=compared,
        )

    # --- Deaths, and what is out of reach -------------------------------------------------------

    def _is_near(self, replica: ReplicaTable) -> bool:
        return self._router.hosts.is_near(replica.host)

    def _lives(self, replica: ReplicaTable) -> bool:
        process: Any = replica.process
        if self._is_near(replica):
            return self._loop.machine.is_alive(process)
        return process not in self._unreachable

    def _gone(self, replica: ReplicaTable, *, is_certain: bool = True) -> None:
        """Give up a replica's process, unless another one has its tag by now.

        Nobody is asked how one has ended that may only be out of reach.
        """
        tag = replica.tag
        link = self._links.get(tag)
        if link is None or link.table != replica:
            return
        del self._links[tag]
        link.unwatch()
        unsent = [item.ticket for item in link.outbox.drop() if isinstance(item, Assignment)]
        now = time.monotonic()
        self._run(self._router.replica_gone(tag, unsent, now, is_certain=is_certain))
        if self._is_near(replica):
            process: Any = replica.process
            self._send(ReplicaLost(replica=tag, incarnation=process.incarnation))
        elif replica.process not in self._unreachable:
            self._unreachable.add(replica.process)
            self._try_later(replica)

    def _try_later(self, replica: ReplicaTable) -> None:
        self._loop.call_later(TRY_AGAIN_S, lambda: self._try(replica))

    def _try(self, replica: ReplicaTable) -> None:
        if not self._is_wanted(replica):
            self._unreachable.discard(replica.process)
            return
        self._loop.send(
            replica.address,
            self._introduction(replica),
            on_sent=lambda: self._reached(replica),
            on_failed=lambda: self._try_later(replica),
        )

    def _reached(self, replica: ReplicaTable) -> None:
        self._unreachable.discard(replica.process)
        if self._is_wanted(replica):
            backend = backend_of(replica)
            self.set_backend(backend, self._tables[backend], time.monotonic())

    def _is_wanted(self, replica: ReplicaTable) -> bool:
        table = self._tables.get(backend_of(replica))
        return table is not None and replica in table.replicas

    def _host_silent(self, host: str, for_long: bool) -> None:
        self._run(self._router.hosts.silent(host, time.monotonic(), for_long=for_long))

    def _host_answers(self, host: str) -> None:
        self._run(self._router.hosts.answers(host, time.monotonic()))

    # --- Comparisons ----------------------------------------------------------------------------

    def compare_at(self, ticket: Ticket) -> tuple[CompareAt, ...] | None:
        """Return where a ticket's answer is compared, at replicas that live; None if unknown."""
        if ticket.compare is None:
            return None
        places = []
        for number, tag, settings in ticket.compare:
            replica = self._table(tag)
            if replica is not None:
                process: Any = replica.process
                at = (process.incarnation, replica.address)
                packed = b"" if settings is None else self._pickled("settings", settings)
                places.append((number, self._pickled("replica", at), packed))
        return tuple(places)

    def _pickled(self, kind: str, value: tuple[str, Any]) -> bytes:
        """Pickle once what goes with many queries; the first of ``value`` is its id."""
        key = (kind, value[0])
        pickled = self._pickles.get(key)
        if pickled is None:
            if len(self._pickles) >= MAX_PICKLES:
                self._pickles.clear()
            pickled = self._pickles[key] = pickle.dumps(value)
        return pickled
