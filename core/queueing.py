"""One backend as a router uses it: its replicas by load, and the queries that wait for them.

Queries wait in two queues, in each of which the endpoints take turns: those that somebody wants
answered, and the copies that the backend gets as a shadow. Copies go only where nobody waits, and
leave half of the slots alone where anybody might; their queue is short: a shadow that cannot follow
misses some, and nothing piles up.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from greenroom.core.balancing import SUSPECT_LOAD, Levels, RoutedReplica
from greenroom.core.lines import Lines
from greenroom.core.pace import Pace
from greenroom.core.tables import BackendTable
from greenroom.core.tickets import Assign, Pairing, Ticket

MAX_COPIES_QUEUED = 100


@dataclass(slots=True, eq=False)
class RoutedBackend:
    """A backend's newest table, and what a router has there."""

    table: BackendTable
    queue: Lines = field(default_factory=Lines)
    copies: Lines = field(default_factory=Lines)
    pace: Pace = field(default_factory=Pace)
    replicas: dict[str, RoutedReplica] = field(default_factory=dict)
    levels: Levels = field(default_factory=Levels)
    far_levels: Levels = field(default_factory=Levels)  # of replicas on other hosts
    suspects: Levels = field(default_factory=Levels)  # of both kinds
    has_traffic: bool = False
    slots: int = 0  # of all replicas

    def queue_of(self, ticket: Ticket) -> Lines:
        """Return the queue that a ticket waits in, or would."""
        return self.copies if ticket.is_copy else self.queue

    def resize(self) -> None:
        """Count the slots of the replicas that the table has now."""
        slots = len(self.table.replicas) * self.table.max_ongoing_requests
        if slots and self.slots:
            self.pace.resized(slots / self.slots)
        self.slots = slots

    @property
    def is_full(self) -> bool:
        """Whether as many queries wait as may."""
        return 0 <= self.table.max_queued_requests <= self.queue.size

    def retry_after_s(self, ticket: Ticket, now: float) -> float:
        """Return when the caller of a query that may not wait should come back."""
        return self.pace.retry_after_s(self.queue.ahead(ticket.endpoint), now)

    def let_wait(self, ticket: Ticket, now: float) -> list[tuple[Ticket, str]]:
        """Have a query wait, unless it would for too long, or too many wait already.

        Return who is to be refused, and why. Where the queue is full, the longest line gives one up
        for a line that is clearly shorter: else a flood of one endpoint would have others refused.
        """
        ahead = self.queue.ahead(ticket.endpoint)
        if wait_s := self.pace.too_slow_for(ahead, ticket.left_s(now), now):
            return [(ticket, _too_slow(ticket, wait_s, now))]
        refused = []
        if self.is_full:
            given_up = self.queue.longest_beside(ticket.endpoint)
            if given_up is None:
                return [(ticket, self._full(ticket))]
            refused.append((given_up, self._full(given_up)))
            self.queue.remove(given_up)
        if not self.queue.size:
            self.pace.began(now)
        self.queue.add(ticket)
        return refused

    def _full(self, ticket: Ticket) -> str:
        own, every = self.queue.length(ticket.endpoint), self.queue.size
        text = f"{ticket.endpoint} has {own} queries queued, "
        return text + ("its limit" if own == every else f"of {every} in all, the limit")

    @property
    def takes_copies(self) -> bool:
        """Whether one more copy may wait, or need not wait."""
        limit = self.table.max_queued_requests
        limit = MAX_COPIES_QUEUED if limit < 0 else min(limit, MAX_COPIES_QUEUED)
        if self.copies.size < limit:
            return True  # and where anything waits, no replica has room
        return self._least_loaded(self.slots_for_copies) is not None

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
                return min(with_room, key=lambda each: each.level + SUSPECT_LOAD * each.is_suspect)
        return self._least_loaded(slots)

    def _least_loaded(self, slots: int) -> RoutedReplica | None:
        """Return the replica to take next: one of this host while any has room here."""
        best = self.levels.least_loaded(slots) or self.far_levels.least_loaded(slots)
        suspect = self.suspects.least_loaded(slots)
        if best is None or suspect is None:
            return best or suspect
        return suspect if best.level > suspect.level + SUSPECT_LOAD else best

    def levels_of(self, replica: RoutedReplica) -> Levels:
        """Return where a replica stands by its load."""
        if replica.is_suspect:
            return self.suspects
        return self.levels if replica.is_near else self.far_levels

    def set_suspect(self, replica: RoutedReplica, *, is_suspect: bool) -> None:
        """Have a replica stand with others of its kind, if it stands anywhere."""
        if is_suspect == replica.is_suspect:
            return
        stands = replica.level >= 0
        self.levels_of(replica).remove(replica)
        replica.is_suspect = is_suspect
        if stands:
            self.levels_of(replica).place(replica)

    def assign(self, ticket: Ticket, replica: RoutedReplica, now: float) -> Assign:
        """Give a ticket to a replica that has room."""
        ticket.replica = tag = replica.table.tag
        if ticket.assigned_at < 0 and ticket.budget is not None:
            ticket.budget.pay_in(self.slots)
        ticket.assigned_at = now
        ticket.attempts += 1
        replica.ongoing[ticket.number] = ticket
        self.levels_of(replica).place(replica)
        return Assign(tag, ticket)

    def assign_waiting(self, now: float) -> tuple[list[Assign], list[Ticket]]:
        """Give what waits to replicas, as far as they have room.

        Return that, and the queries that had their turn too late: what is left of their time is
        shorter than queries take here, so that to run them would only keep others waiting.
        """
        assigned: list[Assign] = []
        late: list[Ticket] = []
        while (
            waiting := self.queue if self.queue.size else self.copies if self.copies.size else None
        ):
            slots = (
                self.slots_for_copies if waiting is self.copies else self.table.max_ongoing_requests
            )
            ticket = waiting.first()
            replica = None if ticket is None else self.choose(ticket, slots)
            if ticket is None or replica is None:
                break
            waiting.take(ticket)
            if ticket.deadline_at is not None and now + self.pace.run_s >= ticket.deadline_at:
                late.append(ticket)
            else:
                assigned.append(self.assign(ticket, replica, now))
        return assigned, late

    def pair(self, copy: Ticket, settings: tuple[str, Any]) -> tuple[Pairing, ...]:
        """Have a copy's answer compared with its query's at a replica; return where, if anywhere.

        Not always at the one that gets the copy: that may have to wait for room.
        """
        if not self.replicas:
            return ()
        place = copy.number // 2 % len(self.replicas)  # two by two: a query and its copy
        pairing = Pairing(copy.number, next(itertools.islice(self.replicas, place, None)))
        copy.compare = (pairing._replace(settings=settings),)
        return (pairing,)

    def take_waiting(self) -> list[Ticket]:
        """Return all that waits, and forget it."""
        return self.queue.take_all() + self.copies.take_all()

    def put_first(self, ticket: Ticket, now: float) -> None:
        """Have a ticket wait before all others of its queue."""
        queue = self.queue_of(ticket)
        if queue is self.queue and not queue.size:
            self.pace.began(now)
        queue.put_first(ticket)


def _too_slow(ticket: Ticket, wait_s: float, now: float) -> str:
    return (
        f"{ticket.endpoint} could begin with this query in about {wait_s:.3g} s only, "
        f"of the {ticket.left_s(now):.3g} s that it has in all"
    )
