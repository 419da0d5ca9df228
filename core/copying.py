"""The making of copies for shadows: some ms after their queries were let in, which go first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from greenroom.core.open_tickets import OpenTickets
from greenroom.core.queueing import RoutedBackend
from greenroom.core.tables import EndpointTable
from greenroom.core.tickets import Compare, Dropped, Effects, Pairing, Starved, Ticket
from greenroom.core.traffic import RoutedEndpoint, choose_shadows

AT_ONCE = 8
Fill = Callable[[RoutedBackend, float], Effects]


class Copying:
    """Makes the copies of a router's queries; ``fill`` gives what waits at a backend its room."""

    def __init__(
        self,
        endpoints: Mapping[str, RoutedEndpoint],
        backends: Mapping[str, RoutedBackend],
        tickets: OpenTickets,
        fill: Fill,
    ) -> None:
        self._endpoints = endpoints
        self._backends = backends
        self._tickets = tickets
        self._fill = fill
        self._due: list[tuple[Ticket, list[str]]] = []  # queries, and their shadows

    @property
    def is_due(self) -> bool:
        """Whether there are copies to be made."""
        return bool(self._due)

    def later(self, original: Ticket, endpoint: EndpointTable, draw: Callable[[], float]) -> None:
        """Note which shadows are to get a copy: all else can wait until the query has left."""
        if shadows := choose_shadows(endpoint.shadows, draw):
            self._due.append((original, shadows))
            if endpoint.compares and not endpoint.compares.keys().isdisjoint(shadows):
                original.compare = None

    def make(self, now: float) -> Effects:
        """Make some of those that are due, where that costs nobody anything.

        Of many only a half: queries that come meanwhile wait for what is done at once.
        """
        count = max(AT_ONCE, len(self._due) // 2)
        due, self._due = self._due[:count], self._due[count:]
        effects: Effects = []
        for original, shadows in due:
            places: tuple[Pairing, ...] = ()
            for tag in shadows:
                places += self._copy(original, tag, effects, now)
            if original.compare is None:
                original.compare = places
                if original.replica is not None:  # else they go with its assignment
                    effects.append(Compare(original.replica, original))
        return effects

    def _copy(
        self, original: Ticket, tag: str, effects: Effects, now: float
    ) -> tuple[Pairing, ...]:
        """Have one shadow run a query, too; return where its answer is to be compared."""
        endpoint = self._endpoints.get(original.endpoint)
        backend = self._backends.get(tag)
        copy = None
        if backend is not None and endpoint is not None and endpoint.copies_to(tag, original):
            copy = self._tickets.copy(original, backend, now)
        if copy is None or backend is None or endpoint is None:
            effects.append(Dropped(original.endpoint, tag))
            return ()
        compare = endpoint.table.compares.get(tag)
        places = () if compare is None else backend.pair(copy, compare)
        if not (backend.replicas or backend.queue.size or backend.copies.size > 1):
            effects.append(Starved(tag))
        effects += self._fill(backend, now)
        return places
