"""Which replica of a backend gets the next ticket: the least loaded, round robin among equals.

A replica that lets a query wait for UNHEARD_S without a word about any is *suspect*, until it ends
one sooner: it is taken only when each other one has SUSPECT_LOAD tickets more. So one whose loop is
blocked costs few queries, and where all take long, all are alike.

Theory of operation. Replicas stand in *levels* by the number of tickets they have; each level is
ordered by who came to it first. The next ticket goes to the first of the lowest level, which goes
to the end of the next level thereby. So every step takes the same short time, however many replicas
there are. What may get no ticket at present (it rejected one, or drains) stands in no level.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from greenroom.core.tables import ReplicaTable
from greenroom.core.tickets import Ticket

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
