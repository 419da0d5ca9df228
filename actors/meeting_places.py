"""Where a query's answer and its copy's are to be compared, as it travels with both."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, Protocol

from greenroom.actors.messages import CompareAt
from greenroom.core.tables import ReplicaTable
from greenroom.core.tickets import Pairing

MAX_PICKLES = 1_000  # of addresses and settings; then all are made anew


class Link(Protocol):
    """What is needed of a link."""

    @property
    def table(self) -> ReplicaTable:
        """The replica that it leads to."""


class MeetingPlaces:
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
