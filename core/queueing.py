"""One backend as a router uses it: its replicas by load, and the queries that wait for them.

Queries wait in two queues, each first in, first out: those that somebody wants answered, and the
copies that the backend gets as a shadow. Copies go only where nobody waits, and leave half of the
slots alone where anybody might; their queue is short: a shadow that cannot follow misses some, and
nothing piles up.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from understudy.core.balancing import Levels, RoutedReplica
from understudy.core.tables import BackendTable
from understudy.core.tickets import Assign, Pairing, Ticket

MAX_COPIES_QUEUED = 100


@dataclass(slots=True, eq=False)
class RoutedBackend:
    """A backend's newest table, and what a router has there."""

    table: BackendTable
    queue: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)
    copies: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)
    replicas: dict[str, RoutedReplica] = field(default_factory=dict)
    levels: Levels = field(default_factory=Levels)
    has_traffic: bool = False

    def queue_of(self, ticket: Ticket) -> OrderedDict[int, Ticket]:
        """Return the queue that a ticket waits in, or would."""
        return self.copies if ticket.is_copy else self.queue

    @property
    def takes_copies(self) -> bool:
        """Whether one more copy may wait, or need not wait."""
        limit = self.table.max_queued_requests
        limit = MAX_COPIES_QUEUED if limit < 0 else min(limit, MAX_COPIES_QUEUED)
        if len(self.copies) < limit:
            return True  # and where anything waits, no replica has room
        return self.levels.least_loaded(self.slots_for_copies) is not None

    @property
    def slots_for_copies(self) -> int:
        """How many tickets a replica may have to be given a copy.

        Where there is traffic, too, half of its slots are left to queries: copies that hang, or of
        which there are many, would have them wait.
        """
        slots = self.table.max_ongoing_requests
        return max(slots // 2, 1) if self.has_traffic else slots

    def choose(self, ticket: Ticket, slots: int) -> RoutedReplica | None:
        """Return the replica for a ticket, or None when all have ``slots`` tickets or more.

        One that has the model which the query needs is better than the least loaded of all: loading
        one takes longer than waiting among other queries.
        """
        model = ticket.query.multiplexed_model_id
        if model:
            having = [r for r in self.replicas.values() if model in r.models]
            with_room = [r for r in having if 0 <= r.level < slots]
            if with_room:
                return min(with_room, key=lambda replica: replica.level)
        return self.levels.least_loaded(slots)

    def assign(self, ticket: Ticket, replica: RoutedReplica) -> Assign:
        """Give a ticket to a replica that has room."""
        ticket.replica = tag = replica.table.tag
        ticket.attempts += 1
        replica.ongoing[ticket.number] = ticket
        self.levels.place(replica)
        return Assign(tag, ticket)

    def assign_waiting(self) -> list[Assign]:
        """Give what waits to replicas, as far as they have room."""
        assigned = []
        while waiting := self.queue or self.copies:
            slots = self.table.max_ongoing_requests if self.queue else self.slots_for_copies
            number, ticket = next(iter(waiting.items()))
            replica = self.choose(ticket, slots)
            if replica is None:
                break
            del waiting[number]
            assigned.append(self.assign(ticket, replica))
        return assigned

    def pair(self, original: Ticket, copy: Ticket, settings: tuple[str, Any]) -> None:
        """Have a query's and its copy's answers compared at one of the replicas, if there is any.

        Not always at the one that gets the copy: that may have to wait for room, and the query
        itself is on its way before.
        """
        if self.replicas:
            place = copy.number // 2 % len(self.replicas)  # two by two: a query and its copy
            tag = next(itertools.islice(self.replicas, place, None))
            original.compare = (*original.compare, Pairing(copy.number, tag))
            copy.compare = (Pairing(copy.number, tag, settings),)

    def take_waiting(self) -> list[Ticket]:
        """Return all that waits, and forget it."""
        tickets = [*self.queue.values(), *self.copies.values()]
        self.queue.clear()
        self.copies.clear()
        return tickets

    def put_first(self, ticket: Ticket) -> None:
        """Have a ticket wait before all others of its queue."""
        queue = self.queue_of(ticket)
        queue[ticket.number] = ticket
        queue.move_to_end(ticket.number, last=False)
