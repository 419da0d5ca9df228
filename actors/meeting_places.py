"""Where a query's answer and its copy's are to be compared, as it travels with both."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

from understudy.actors.messages import CompareAt
from understudy.core.tables import ReplicaTable
from understudy.core.tickets import Pairing

MAX_PICKLES = 1_000  # of addresses and settings; then all are made anew


class MeetingPlaces:
    """Turns the pairings of tickets into places of replicas that live; ``find`` returns those."""

    def __init__(self, find: Callable[[str], ReplicaTable | None]) -> None:
        self._find = find
        self._pickles: dict[tuple[str, str], bytes] = {}

    def of(self, pairings: Iterable[Pairing]) -> tuple[CompareAt, ...]:
        """Return one place for each replica that lives."""
        places = []
        for number, tag, settings in pairings:
            replica = self._find(tag)
            if replica is not None:
                packed = b""
                if settings is not None:
                    packed = self._pickled(("settings", settings[0]), settings)
                places.append((number, self._place(replica), packed))
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
