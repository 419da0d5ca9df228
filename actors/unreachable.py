"""Replicas of other hosts that a proxy cannot reach, and tries again.

Whether such a replica is dead, or its host lost, the controller has to judge, by what it sees
itself. Until then the proxy leaves it out, whatever the tables say, and knocks now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from greenroom.actors.loop import Loop
from greenroom.actors.messages import Message
from greenroom.core.tables import ReplicaTable

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
