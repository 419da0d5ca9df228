"""One backend as a router uses it: its replicas by load, and the queries that wait for them.

Queries wait in two queues, in each of which the endpoints take turns: those that somebody wants
answered, and the copies that the backend gets as a shadow. Copies go only where nobody waits, and
leave half of the slots alone where anybody might; their queue is short: a shadow that cannot follow
misses some, and nothing piles up.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp
from typing import Any

from greenroom.core.routing.tables import BackendTable, ReplicaTable
from greenroom.core.routing.tickets import Assign, Pairing, Ticket

# The queries that wait for one backend: a line for each endpoint, and the lines take turns.
#
# Theory of operation. Each line is first in, first out. Whenever a replica has room, the line
# whose turn it is gives its first ticket and goes to the end of the order of turns. So a flood of
# one endpoint makes its own line long, and nobody else's: who shares a backend with it gets every
# second turn, or as many as it has queries for.
#
# Lines that begin go before those that stand, as in RFC 8290 (4.1 and 4.2): an endpoint that asks
# for less than its share never waits for the turns of others, only for a replica. A line that was
# served keeps its place in the order when it runs empty, until its turn has come once: else one
# could stay new for ever by asking for one thing at a time, and those that stand would starve.

_Line = OrderedDict[int, Ticket]  # by number


class FairQueue:
    """Tickets in the order in which replicas get them; ``size`` is how many there are."""

    __slots__ = ("_lines", "_new", "_standing", "size")

    def __init__(self) -> None:
        self.size = 0
        self._lines: dict[str, _Line] = {}  # by endpoint; each is in one of the two
        self._new: OrderedDict[str, _Line] = OrderedDict()  # in the order of turns
        self._standing: OrderedDict[str, _Line] = OrderedDict()

    def add(self, ticket: Ticket) -> None:
        """Have a ticket wait after all others of its endpoint."""
        self._line_for(ticket)[ticket.number] = ticket
        self.size += 1

    def put_first(self, ticket: Ticket) -> None:
        """Have a ticket wait before all others: it had its turn already."""
        name, line = ticket.endpoint, self._line_for(ticket)
        line[ticket.number] = ticket
        line.move_to_end(ticket.number, last=False)
        self._standing.pop(name, None)
        self._new[name] = line
        self._new.move_to_end(name, last=False)
        self.size += 1

    def first(self) -> Ticket | None:
        """Return the ticket whose turn it is; None when nobody waits."""
        while self._new:
            name, line = next(iter(self._new.items()))
            if line:
                return next(iter(line.values()))
            del self._new[name]
            self._standing[name] = line
        while self._standing:
            name, line = next(iter(self._standing.items()))
            if line:
                return next(iter(line.values()))
            del self._standing[name], self._lines[name]
        return None

    def take(self, ticket: Ticket) -> None:
        """Take out the ticket that :meth:`first` has returned; the next line has its turn."""
        name = ticket.endpoint
        line = self._new.pop(name, None)
        if line is None:
            line = self._standing.pop(name)
        self._standing[name] = line
        self._remove(ticket, line)

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that waits here, whoever's turn it is."""
        self._remove(ticket, self._lines[ticket.endpoint])

    def take_all(self, endpoint: str | None = None) -> list[Ticket]:
        """Take out what waits, or what waits of one endpoint; return it as it came."""
        names = self._lines if endpoint is None else self._lines.keys() & {endpoint}
        tickets = sorted(
            (ticket for name in names for ticket in self._lines[name].values()),
            key=lambda ticket: ticket.number,
        )
        for ticket in tickets:
            self.remove(ticket)
        return tickets

    def length(self, endpoint: str) -> int:
        """Return how many of an endpoint wait."""
        line = self._lines.get(endpoint)
        return 0 if line is None else len(line)

    def ahead(self, endpoint: str) -> int:
        """Return how many will have had their turn before one more of this endpoint has."""
        own = self.length(endpoint)
        return sum(min(len(line), own) for line in self._lines.values())

    def longest_beside(self, endpoint: str) -> Ticket | None:
        """Return the newest ticket of the longest line, if that stays longer without it.

        Longer than the endpoint's own with one more, that is; None where no line is.
        """
        line = max(self._lines.values(), key=len, default=None)
        if line is None or len(line) < self.length(endpoint) + 2:
            return None
        return next(reversed(line.values()))

    def _line_for(self, ticket: Ticket) -> _Line:
        line = self._lines.get(ticket.endpoint)
        if line is None:
            line = self._lines[ticket.endpoint] = self._new[ticket.endpoint] = OrderedDict()
        return line

    def _remove(self, ticket: Ticket, line: _Line) -> None:
        del line[ticket.number]
        self.size -= 1
        if not self.size:  # nobody is kept waiting, so nobody is owed a turn
            self._lines.clear()
            self._new.clear()
            self._standing.clear()


# How fast one backend gets through its queries, as its router sees it.
#
# Theory of operation. The *drain rate* is how many slots become free per second while queries
# wait: only then does it say what the replicas can do, and not what they are asked to. What is
# longer ago counts less, with the time constant MEMORY_S; the time in which nothing waited does
# not count, and makes nothing older. Before the first slot became free there is no rate.
#
# How long a query takes in a replica is followed by a part of each sample's difference, down
# sooner than up, and no sample counts as more than twice the present value: the first query,
# which loads something, and one that hangs, say little about the others.

MEMORY_S = 10.0
MAX_RETRY_AFTER_S = 60.0
# A query may wait for so much of its time: then it has the rest to run, and a rate that was
# measured wrong by a half makes nobody run out of time in a replica, where it costs others theirs.
WAITING_SHARE = 0.5
STEP_UP, STEP_DOWN = 0.1, 0.3


class DrainRate:
    """Follows one backend. ``now`` is monotonic seconds."""

    __slots__ = ("_at", "_began_at", "_freed", "_span_s", "run_s")

    def __init__(self) -> None:
        self.run_s = 0.0  # how long a query takes in a replica; 0 until one has ended
        self._freed = 0.0  # slots, and in which time; what is longer ago counts less
        self._span_s = 0.0
        self._at = 0.0  # until when both are told
        self._began_at = 0.0

    def began(self, now: float) -> None:
        """Take note that a query waits where none did."""
        self._at = self._began_at = now

    def freed(self, slots: int, now: float) -> None:
        """Count slots that became free while queries waited."""
        kept, span_s = self._told(now)
        self._freed, self._span_s, self._at = kept + slots, span_s, now

    def resized(self, ratio: float) -> None:
        """Expect the rate to follow the number of slots, which is so many times what it was."""
        self._freed *= ratio

    def ran(self, seconds: float) -> None:
        """Learn from a query that took so long in a replica, its answer included."""
        difference = min(seconds - self.run_s, self.run_s)
        if not self.run_s:
            self.run_s = seconds
        else:
            self.run_s += difference * (STEP_UP if difference > 0 else STEP_DOWN)

    def wait_s(self, ahead: int, now: float) -> float | None:
        """Return how long it takes until so many that wait have got a slot; None if unknown."""
        freed, span_s = self._told(now)
        return ahead * span_s / freed if freed and span_s else None

    def retry_after_s(self, ahead: int, now: float) -> float:
        """Return when to come back, where so many wait: when these will have got a slot.

        Where no slot was free yet: after as long again as that takes already, or a second.
        """
        wait_s = self.wait_s(max(ahead, 1), now)
        if wait_s is None:
            wait_s = max(now - self._began_at, 1.0)
        return min(wait_s, MAX_RETRY_AFTER_S)

    def too_slow_for(self, ahead: int, left_s: float, now: float) -> float | None:
        """Return how long a query would wait where that is too long for what it has left."""
        wait_s = self.wait_s(ahead, now)
        return wait_s if wait_s is not None and wait_s > left_s * WAITING_SHARE else None

    def _told(self, now: float) -> tuple[float, float]:
        since_s = now - self._at
        kept = exp(-since_s / MEMORY_S)
        return self._freed * kept, self._span_s * kept + since_s


# Which replica of a backend gets the next ticket: the least loaded, round robin among equals.
#
# A replica that lets a query wait for UNHEARD_S without a word about any is *suspect*, until it
# ends one sooner: it is taken only when each other one has SUSPECT_LOAD tickets more. So one
# whose loop is blocked costs few queries, and where all take long, all are alike.
#
# Theory of operation. Replicas stand in *levels* by the number of tickets they have; each level
# is ordered by who came to it first. The next ticket goes to the first of the lowest level, which
# goes to the end of the next level thereby. So every step takes the same short time, however many
# replicas there are. What may get no ticket at present (it rejected one, or drains) stands in no
# level.

UNHEARD_S = 1.0
SUSPECT_LOAD = 1
GIVEN_UP_S = 0.1  # a caller that gives up after that, unheard, says as much


@dataclass(slots=True, eq=False)
class RoutedReplica:
    """One replica as a router uses it, and the tickets it has."""

    table: ReplicaTable
    backend: str
    ongoing: dict[int, Ticket] = field(default_factory=dict)
    unconfirmed: dict[int, Ticket] = field(default_factory=dict)  # answered, but did it arrive?
    saturated_until: float = 0.0  # it rejected a ticket, and is left alone for a moment
    draining: bool = False  # it rejected a ticket because it is to stop: for good
    retired: bool = False  # no longer in the table; lives on until its tickets are done
    is_near: bool = True  # on the router's own host
    models: frozenset[str] = frozenset()  # multiplexed ones, that it has or loads
    heard_at: float = float("-inf")  # when it said something of a ticket, the last time
    is_suspect: bool = False
    level: int = -1  # where it stands in its backend's Levels; -1 is nowhere

    def seems_suspect(self, numbers: Iterable[int], now: float) -> bool:
        """Take a word on these tickets, which it still has; return whether it is suspect now."""
        if not self.ongoing:
            return self.is_suspect
        oldest_at = next(iter(self.ongoing.values())).assigned_at
        unheard_s = now - max(self.heard_at, oldest_at)
        self.heard_at = now
        if not self.is_suspect and unheard_s <= UNHEARD_S:
            return False
        told = (self.ongoing.get(number) for number in numbers)
        return not any(t is not None and now - t.assigned_at <= UNHEARD_S for t in told)

    def is_unheard_of(self, ticket: Ticket, now: float) -> bool:
        """Return whether it has said nothing since it got a ticket that is given up now."""
        return self.heard_at < ticket.assigned_at < now - GIVEN_UP_S


class Levels:
    """The replicas of one backend that may get tickets, by load."""

    __slots__ = ("_levels", "_lowest")

    def __init__(self) -> None:
        self._levels: list[dict[str, RoutedReplica]] = [{}]
        self._lowest = 0  # no level below this one has a replica

    def place(self, replica: RoutedReplica) -> None:
        """Put a replica where its load belongs; to be called after each change of its load."""
        load, levels = len(replica.ongoing), self._levels
        if replica.level == load:
            return
        tag = replica.table.tag
        if replica.level >= 0:
            del levels[replica.level][tag]
        while load >= len(levels):
            levels.append({})
        levels[load][tag] = replica
        replica.level = load
        self._lowest = min(self._lowest, load)

    def remove(self, replica: RoutedReplica) -> None:
        """Give a replica no more tickets; harmless when it stands nowhere."""
        if replica.level >= 0:
            del self._levels[replica.level][replica.table.tag]
            replica.level = -1

    def least_loaded(self, limit: int) -> RoutedReplica | None:
        """Return the replica to take next, or None when all have ``limit`` tickets or more."""
        levels, lowest = self._levels, self._lowest
        end = min(limit, len(levels))
        while lowest < end and not levels[lowest]:
            lowest += 1
        self._lowest = lowest
        return next(iter(levels[lowest].values())) if lowest < end else None


MAX_COPIES_QUEUED = 100


@dataclass(slots=True, eq=False)
class RoutedBackend:
    """A backend's newest table, and what a router has there."""

    table: BackendTable
    queue: FairQueue = field(default_factory=FairQueue)
    copies: FairQueue = field(default_factory=FairQueue)
    pace: DrainRate = field(default_factory=DrainRate)
    replicas: dict[str, RoutedReplica] = field(default_factory=dict)
    levels: Levels = field(default_factory=Levels)
    far_levels: Levels = field(default_factory=Levels)  # of replicas on other hosts
    suspects: Levels = field(default_factory=Levels)  # of both kinds
    has_traffic: bool = False
    slots: int = 0  # of all replicas

    def queue_of(self, ticket: Ticket) -> FairQueue:
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
