"""Which replica of a backend gets the next ticket: the least loaded, round robin among equals.

Theory of operation. Replicas stand in one order: by *tier*, and there in *levels* by how many of
their slots are taken, by tickets or by leases (leases.py), and more for those that are new or slow
(weights.py); each level is ordered by which came to
it first. The next ticket goes to the first replica of the lowest level, which thereby goes to the
end of the next level. So every step takes the same short time, however many replicas there are. A
replica that cannot get tickets at present (it rejected one, drains, or its host is silent) stands
nowhere. Whatever changes any of this has the replica placed anew. A ticket's slot is free again
when its replica reports the outcome, rejects it or dies, but not when the caller cancels, because
the replica may still be busy with it.

Replicas on the router's own host are taken first, while they have room. A replica becomes *suspect*
when a query has waited there for UNHEARD_S and the replica has reported nothing meanwhile; it stays
so until it ends a query sooner than that. It is taken only when each other replica has SUSPECT_LOAD
more tickets. So a replica with a blocked loop delays few queries, and if all replicas are slow,
they are all treated alike. Those that fail where others do not are left out (outliers.py).

There are two queues: one for callers' queries, and one for mirrored queries, for which the backend
is a shadow. Mirrored queries are dispatched only when no caller's query waits, and take at most
half of the slots if callers send queries too. Their queue is short: a shadow that cannot keep up
misses some, and nothing piles up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from greenroom.core.config import SessionAffinity
from greenroom.core.formats import fit
from greenroom.core.routing.outliers import Outliers, has_failed
from greenroom.core.routing.queues import DrainRate, FairQueue
from greenroom.core.routing.sessions import Homes
from greenroom.core.routing.tables import BackendTable, ReplicaTable
from greenroom.core.routing.tickets import DROPPED, RUNNING, Assign, Lending, Ticket
from greenroom.core.routing.weights import ENOUGH, EVEN, LEVELS, Pace, Paces, Sums, Weight

UNHEARD_S = 1.0
SUSPECT_LOAD = 1
CANCELLED_S = 0.1  # a caller that cancels after that, with nothing heard, counts as a silence
SATURATED_S = 0.02  # how long a replica that rejected a ticket is left alone
MAX_MIRRORED_QUEUED = 100
BAD = 400  # how long queries take that end with this status or a higher one says nothing
TIERS = NEAR, FAR, SUSPECT = range(3)  # on the router's own host, on others, on any
NOWHERE = "-"  # the home of a session while there is no replica


@dataclass(slots=True, eq=False)
class RoutedReplica:
    """One replica as a router uses it, and the tickets it has."""

    table: ReplicaTable
    backend: RoutedBackend
    ongoing: dict[int, Ticket] = field(default_factory=dict)
    unconfirmed: dict[int, Ticket] = field(default_factory=dict)  # answered, but did it arrive?
    saturated_until: float = 0.0  # it rejected a ticket, and is left alone for a moment
    draining: bool = False  # it rejected a ticket because it is to stop: for good
    retired: bool = False  # no longer in the table; lives on until its tickets are done
    is_near: bool = True  # on the router's own host
    models: frozenset[str] = frozenset()  # multiplexed ones, that it has or loads
    heard_at: float = float("-inf")  # when it said something of a ticket, the last time
    is_suspect: bool = False
    is_silent: bool = False  # its host does not answer
    withdrawn: set[int] = field(default_factory=set)  # what it may still run, and others do
    tier: int = 0  # where it stands in its backend's order, as does this
    level: int = -1  # -1 is nowhere
    leased: int = 0  # slots
    came_at: float = 0.0
    weight: Weight = EVEN
    pace: Pace = field(default_factory=Pace)

    @property
    def load(self) -> int:
        """How many of its slots are taken."""
        return len(self.ongoing) + len(self.withdrawn) + self.leased

    def has_room(self, slots: int) -> bool:
        """Return whether it may get a ticket, and has fewer than ``slots``."""
        return 0 <= self.level < slots * LEVELS

    def hear(self, numbers: Iterable[int], now: float) -> None:
        """Hear of these tickets, which it still has, and judge by that whether it is suspect."""
        if not self.ongoing:
            return
        oldest_at = next(iter(self.ongoing.values())).assigned_at
        unheard_s = now - max(self.heard_at, oldest_at)
        self.heard_at = now
        if self.is_suspect or unheard_s > UNHEARD_S:
            assigned = (self.ongoing.get(number) for number in numbers)
            is_quick = any(t is not None and now - t.assigned_at <= UNHEARD_S for t in assigned)
            self.suspect(is_suspect=not is_quick)

    def suspect(self, *, is_suspect: bool) -> None:
        """Note whether it is suspect, and put it where it belongs then."""
        self.is_suspect = is_suspect
        if self.level >= 0:
            self.backend.order.put(self, self.level)

    def is_silent_on(self, ticket: Ticket, now: float) -> bool:
        """Return whether it has said nothing since it got a ticket that is cancelled now."""
        return self.heard_at < ticket.assigned_at < now - CANCELLED_S


class Order:
    """The replicas of one backend that may get tickets: by tier, then by level."""

    __slots__ = ("_levels", "_lowest")

    def __init__(self) -> None:
        self._levels: list[list[dict[str, RoutedReplica]]] = [[{}] for _ in TIERS]
        self._lowest = [0 for _ in TIERS]  # no level below this one has a replica

    def put(self, replica: RoutedReplica, level: int) -> None:
        """Put a replica at the end of a level of its tier, unless it is there; -1 is nowhere."""
        tier = SUSPECT if replica.is_suspect else NEAR if replica.is_near else FAR
        if replica.level == level and replica.tier == tier:
            return
        tag = replica.table.tag
        if replica.level >= 0:
            del self._levels[replica.tier][replica.level][tag]
        replica.tier, replica.level = tier, level
        if level < 0:
            return
        levels = self._levels[tier]
        while level >= len(levels):
            levels.append({})
        levels[level][tag] = replica
        if level < self._lowest[tier]:  # noqa: PLR1730  # min() takes longer
            self._lowest[tier] = level

    def first(self, limit: int) -> RoutedReplica | None:
        """Return the replica to take next, or None when all have ``limit`` tickets or more."""
        best = self._first_of(NEAR, limit) or self._first_of(FAR, limit)
        suspect = self._first_of(SUSPECT, limit)
        if best is None or suspect is None:
            return best or suspect
        return suspect if best.level > suspect.level + SUSPECT_LOAD * LEVELS else best

    def _first_of(self, tier: int, limit: int) -> RoutedReplica | None:
        levels, lowest = self._levels[tier], self._lowest[tier]
        end = min(limit * LEVELS, len(levels))
        while lowest < end and not levels[lowest]:
            lowest += 1
        self._lowest[tier] = lowest
        return next(iter(levels[lowest].values())) if lowest < end else None


@dataclass(slots=True, eq=False)
class RoutedBackend:
    """A backend's newest table, its replicas by load, and the queries that wait for them."""

    table: BackendTable
    outliers: Outliers
    queue: FairQueue = field(default_factory=FairQueue)
    mirrored: FairQueue = field(default_factory=FairQueue)
    rate: DrainRate = field(default_factory=DrainRate)
    homes: Homes = field(default_factory=Homes)
    affinity: SessionAffinity | None = None
    replicas: dict[str, RoutedReplica] = field(default_factory=dict)
    order: Order = field(default_factory=Order)
    paces: Paces = field(default_factory=Paces)
    endpoints: set[str] = field(default_factory=set)  # that have traffic here, by name
    lending: Lending = field(default_factory=Lending)
    slots: int = 0  # of all replicas

    def take_table(self, table: BackendTable) -> None:
        """Replace the table, and expect the drain rate to follow the number of slots."""
        self.table = table
        given = table.session_affinity
        self.affinity = None if given is None else SessionAffinity.read(given)
        slots = len(table.replicas) * table.max_ongoing_requests
        if slots and self.slots:
            self.rate.resized(slots / self.slots)
        self.slots = slots

    # --- Replicas -------------------------------------------------------------------------------

    def choose(self, ticket: Ticket, slots: int) -> RoutedReplica | None:
        """Return the replica for a ticket, or None when all have ``slots`` tickets or more.

        A replica that has the model which the query needs is better than the least loaded of all:
        loading one takes longer than waiting among other queries.
        """
        if ticket.home:
            home = self.replicas.get(ticket.home)
            return home if home is not None and home.has_room(slots) else None
        for rank in ticket.preference.ranks if ticket.preference is not None else ():
            if best := self._least_loaded_of(rank, slots):
                return best
        if model := ticket.query.multiplexed_model_id:
            having = [tag for tag, r in self.replicas.items() if model in r.models]
            if best := self._least_loaded_of(having, slots):
                return best
        if self.outliers.decide and _has_a_choice(ticket):
            return self._by_chance(ticket, slots)
        return self.order.first(slots)

    def _by_chance(self, ticket: Ticket, slots: int) -> RoutedReplica | None:
        """Return a replica that waits for a probe, or else the least loaded one.

        Where that is on trial and another has room, too, chance decides between them: one that is
        on no trial, as failures there say more, if there is any.
        """
        ticket.trial = None
        for tag in self.outliers.probed:
            replica = self.replicas[tag]
            if not (replica.ongoing or replica.draining or replica.is_silent):
                return replica
        best = self.order.first(slots)
        if best is None or best.table.tag not in self.outliers.on_trial:
            return best
        tried = [self.replicas[tag] for tag in self.outliers.on_trial]
        other = self._least_loaded_except(tried, slots) or self._least_loaded_except([best], slots)
        if other is None:
            return best
        ticket.trial = self.outliers.draw(best.table.tag)
        return best if ticket.trial.is_kept else other

    def _least_loaded_of(self, tags: Iterable[str], slots: int) -> RoutedReplica | None:
        named = [self.replicas[tag] for tag in tags if tag in self.replicas]
        with_room = [each for each in named if each.has_room(slots)]
        key = lambda each: each.level + SUSPECT_LOAD * LEVELS * each.is_suspect  # noqa: E731
        return min(with_room, key=key, default=None)

    def assign_home(self, ticket: Ticket) -> None:
        """Find a home for a ticket that is in no queue, and may not run at just any replica.

        That of a session, or the least loaded other one for what has failed at a replica.
        """
        if ticket.failed_at:
            others = [self.replicas[tag] for tag in self.inhabitable() if tag != ticket.failed_at]
            least = min(others, key=lambda replica: replica.load, default=None)
            ticket.home = "" if least is None else least.table.tag
        elif ticket.session is not None:
            homes = self.inhabitable()
            ticket.home = self.homes.of(ticket.session, self.table.tag, homes) or NOWHERE

    def inhabitable(self) -> list[str]:
        """Return the replicas that can be waited for."""
        return [tag for tag in self._serving() if not self.outliers.is_out(tag)]

    def _serving(self) -> list[str]:
        return [tag for tag, r in self.replicas.items() if not (r.draining or r.is_silent)]

    def reassign_homes(self, now: float) -> None:
        """Find other homes for what waits for replicas that are none any more."""
        for queue in (self.queue, self.mirrored):
            if queue.has_homes and (homes := self.inhabitable()):
                for ticket in reversed(queue.take_homeless(homes)):
                    self.assign_home(ticket)
                    self.enqueue(ticket, now, first=True)

    def place(self, replica: RoutedReplica, now: float) -> None:
        """Put a replica where its load belongs, or nowhere while it is not to be chosen.

        To be called after each change of either. One that has room stays below the limit, in the
        last of these levels by its load: else the first of two slow ones would be filled up.
        """
        is_out = replica.draining or replica.is_silent or replica.saturated_until > now
        tag, outliers = replica.table.tag, self.outliers
        if is_out or tag in outliers.ejected or tag in outliers.probed:
            self.order.put(replica, -1)
            return
        level = least = replica.load * LEVELS
        if replica.weight is not EVEN:
            slots = self.table.max_ongoing_requests
            most = slots * LEVELS - 1 - (slots - 1 - replica.load) // 8
            level = max(min(replica.weight.level(replica.load, now), most), least)
            if replica.weight.pace == 1.0 and now >= replica.weight.warm_at:
                replica.weight = EVEN
        self.order.put(replica, level)

    def took(self, replica: RoutedReplica, ticket: Ticket, now: float) -> None:
        """Learn what an answered ticket took."""
        seconds, taken = now - ticket.assigned_at, replica.pace.taken
        self.rate.ran(seconds)
        if not self.table.learn_weights or taken.queries >= ENOUGH:
            return
        if ticket.status < BAD and _has_a_choice(ticket):
            taken.add(seconds, len(replica.ongoing))

    def compare(self, now: float) -> bool:
        """Compare what replicas take, if it is time; return whether their weights have changed."""
        if not self.table.learn_weights or now < self.paces.due_at:
            return False
        paces = [replica.pace for replica in self.replicas.values()]
        has_changed = self.paces.compare(paces, self.rate.run_s, now)
        if has_changed:
            self.weigh(now)
        return has_changed

    def weigh(self, now: float) -> None:
        """Have replicas count by how long they take for queries, unless that is switched off."""
        for replica in self.replicas.values():
            factor = replica.pace.factor if self.table.learn_weights else 1.0
            if replica.weight.pace != factor:
                replica.weight = replica.weight._replace(pace=factor)
                self.place(replica, now)

    def add(self, replica: RoutedReplica, now: float) -> None:
        """Let a replica get tickets."""
        replica.backend, replica.retired = self, False
        self.replicas[replica.table.tag] = replica
        if self.table.outlier_ejection:
            self.outliers.came(replica.table.tag, now)
        self.place(replica, now)

    def retire(self, replica: RoutedReplica, now: float) -> None:
        """Give a replica no more tickets."""
        replica.retired = True
        del self.replicas[replica.table.tag]
        self.order.put(replica, -1)
        self.outliers.went(replica.table.tag, now)

    def assign(self, ticket: Ticket, replica: RoutedReplica, now: float) -> Assign:
        """Give a ticket to a replica that has room."""
        ticket.become(RUNNING)
        ticket.replica = tag = replica.table.tag
        if ticket.assigned_at < 0 and ticket.budget is not None:
            ticket.budget.pay_in(self.slots)
        ticket.assigned_at = now
        ticket.attempts += 1
        replica.ongoing[ticket.number] = ticket
        self.place(replica, now)
        return Assign(tag, ticket)

    def _least_loaded_except(
        self, left_out: Iterable[RoutedReplica], slots: int
    ) -> RoutedReplica | None:
        standing = [(replica, replica.level) for replica in left_out if replica.level >= 0]
        for replica, _ in standing:
            self.order.put(replica, -1)
        best = self.order.first(slots)
        for replica, level in standing:
            self.order.put(replica, level)
        return best

    # --- Outliers -------------------------------------------------------------------------------

    def judge(self, ticket: Ticket, status: int, now: float) -> str | None:
        """Learn of an answer; return the replica that is ejected or let in by it, if any is."""
        failed = has_failed(status) and not (ticket.begun or ticket.state is DROPPED)
        is_awaited = ticket.trial is not None or ticket.replica in self.outliers.probed
        if not (failed or is_awaited) or ticket.replica is None:
            return None
        if not (self.table.outlier_ejection and _has_a_choice(ticket)):
            return None
        changed = self.outliers.ended(
            ticket.replica, ticket.trial, failed=failed, replicas=len(self._serving()), now=now
        )
        if changed is not None:
            self.place(self.replicas[changed], now)
        return changed

    def learn(
        self, failed: Mapping[str, int], took: Mapping[str, tuple[Any, ...]], now: float
    ) -> None:
        """Learn by replica how many queries failed under a lease, and what the others took."""
        if failed and self.table.outlier_ejection:
            count = len(self._serving())
            for tag in failed.keys() & self.replicas.keys():
                self.outliers.failed(tag, failed[tag], replicas=count, now=now)
        self.outliers.check(now)
        for tag in took.keys() & self.replicas.keys():
            self.replicas[tag].pace.taken.join(fit(Sums, took[tag]))

    def let_in(self, now: float) -> None:
        """Leave no more replicas out than half of those that could serve."""
        if self.outliers:
            most_out = len(self._serving()) // 2 if self.table.outlier_ejection else 0
            for tag in self.outliers.let_in(most_out, now):
                self.place(self.replicas[tag], now)

    # --- What waits -----------------------------------------------------------------------------

    def queue_of(self, ticket: Ticket) -> FairQueue:
        """Return the queue that a ticket waits in, or would."""
        return self.mirrored if ticket.is_mirrored else self.queue

    def enqueue(self, ticket: Ticket, now: float, *, first: bool = False) -> None:
        """Queue a ticket, after all others of its line or before all of its queue."""
        queue = self.queue_of(ticket)
        if queue is self.queue and not queue.size:
            self.rate.began(now)
        queue.add(ticket, first=first)

    @property
    def is_waited_for(self) -> bool:
        """Whether any query waits, mirrored ones included."""
        return bool(self.queue.size or self.mirrored.size)

    def take_waiting(self) -> list[Ticket]:
        """Remove and return all that waits."""
        return self.queue.take_all() + self.mirrored.take_all()

    def slots_for(self, *, is_mirrored: bool) -> int:
        """Return how many tickets a replica may have before it gets one more of a kind.

        Half of the slots where there is traffic, which mirrored queries that hang leave free.
        """
        slots = self.table.max_ongoing_requests
        return max(slots // 2, 1) if is_mirrored and self.endpoints else slots

    @property
    def takes_mirrored(self) -> bool:
        """Whether one more mirrored query may wait, or need not wait."""
        limit = self.table.max_queued_requests
        limit = MAX_MIRRORED_QUEUED if limit < 0 else min(limit, MAX_MIRRORED_QUEUED)
        if self.mirrored.size < limit:
            return True  # and where anything waits, no replica has room
        return self.order.first(self.slots_for(is_mirrored=True)) is not None


def _has_a_choice(ticket: Ticket) -> bool:
    """Return whether any replica will do for a caller's query."""
    return not (
        ticket.is_mirrored
        or ticket.session is not None
        or ticket.preference is not None
        or ticket.query.multiplexed_model_id
    )
