"""The replicas that a router knows of, with the tickets that they hold."""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.core.balancing import RoutedReplica
from greenroom.core.queueing import RoutedBackend
from greenroom.core.tables import ReplicaTable

SATURATED_S = 0.02  # how long a replica that rejected a ticket is left alone


class Holders:
    """Replicas by tag: those of the newest tables, and retired ones until their tickets are done.

    A retired replica gets no more tickets. One that has rejected a ticket *rests* for SATURATED_S,
    or until it has done something.
    """

    def __init__(self, own_host: str = "") -> None:
        self._own_host = own_host
        self.by_tag: dict[str, RoutedReplica] = {}
        self._resting: list[RoutedReplica] = []

    def ongoing(self, among: Iterable[str] | None = None) -> dict[str, int]:
        """Return replica -> tickets it has, of all or of those among these."""
        tags = self.by_tag if among is None else self.by_tag.keys() & set(among)
        return {tag: len(self.by_tag[tag].ongoing) for tag in tags}

    def add(self, backend: RoutedBackend, table: ReplicaTable, now: float) -> None:
        """Have a replica get tickets; one that was retired may be back with those it has.

        A new controller begins with empty tables.
        """
        replica = self.by_tag.get(table.tag)
        if replica is None:
            is_near = table.host in {"", self._own_host}
            replica = RoutedReplica(table, backend.table.tag, is_near=is_near)
            self.by_tag[table.tag] = replica
        replica.retired = False
        backend.replicas[table.tag] = replica
        self.set_level(backend, replica, now)

    def retire(self, backend: RoutedBackend, replica: RoutedReplica) -> None:
        """Give a replica no more tickets."""
        replica.retired = True
        del backend.replicas[replica.table.tag]
        backend.levels_of(replica).remove(replica)
        self.forget_if_done(replica)

    def forget_if_done(self, replica: RoutedReplica) -> None:
        """Forget a retired replica that holds nothing any more."""
        if replica.ongoing or replica.unconfirmed:
            return
        if self.by_tag.get(replica.table.tag) is replica:
            del self.by_tag[replica.table.tag]

    def rest(self, replica: RoutedReplica, now: float) -> None:
        """Leave a replica that has rejected a ticket alone for a moment."""
        replica.saturated_until = now + SATURATED_S
        self._resting.append(replica)

    def rested(self, now: float) -> list[RoutedReplica]:
        """Return those that have rested by now; each is returned once."""
        resting, self._resting = self._resting, []
        rested: list[RoutedReplica] = []
        for replica in resting:
            (self._resting if replica.saturated_until > now else rested).append(replica)
        return rested

    def set_level(self, backend: RoutedBackend, replica: RoutedReplica, now: float) -> None:
        """Have a replica's backend choose it by the load it has now, if it may be chosen."""
        if replica.draining or replica.saturated_until > now:
            backend.levels_of(replica).remove(replica)
        else:
            backend.levels_of(replica).place(replica)
