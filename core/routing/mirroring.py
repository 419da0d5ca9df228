"""Mirrored queries: copies of callers' queries for shadows.

Theory of operation. Mirroring observes the router. For each admitted query it draws the shadows of
the endpoint that get a copy. It makes these mirrored queries some milliseconds later, so that the
queries themselves go first. Each is a ticket without a caller: it runs at most once, and only
observers hear of its end. The queue of a shadow is short and its memory is limited, so a shadow
that cannot keep up misses some queries, which count as *dropped*.

If a shadow's answers are compared, the answers to a query and to its mirrored query meet at one
replica of the shadow. That replica is chosen as soon as the mirrored query is made, and both
replicas that run the two hear of it. It may not be the one that runs the mirrored query, which may
have to wait for room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from greenroom.core.errors import CANCELLED_STATUS
from greenroom.core.routing.dispatching import Dispatch
from greenroom.core.routing.tickets import Compare, Dropped, Observer, Pairing, Ticket

MIRROR_S = 0.005  # how long mirrored queries wait: queries go first, and others may go along
MIRROR_MORE_S = 0.001  # between two batches, for queries to be let in
AT_ONCE = 8
MAX_MIRRORED_BYTES = 32 * 1024 * 1024  # of calls that mirrored queries of a shadow keep in memory


class Mirroring(Observer):
    """Makes the mirrored queries of a router; ``draw`` returns a uniform number in [0, 1)."""

    def __init__(self, state: Dispatch, draw: Callable[[], float]) -> None:
        self._state = state
        self._draw = draw
        self._due: list[tuple[Ticket, list[str]]] = []  # queries, and their shadows
        self._next = 0  # the number of what is to make some, while any are due
        self._bytes: Counter[str] = Counter()  # by shadow; those without any leave it
        state.observers.add(self)

    def accepted(self, ticket: Ticket) -> None:
        """See Observer. What follows a query goes to one replica only, so it is not mirrored."""
        table = self._state.endpoints[ticket.endpoint].table
        if not table.shadows:
            return
        draw = self._draw
        shadows = [tag for tag, proportion in table.shadows.items() if draw() < proportion]
        if shadows:
            self._due.append((ticket, shadows))
            if not self._next:
                self._make_at(ticket.submitted_at + MIRROR_S)
            if not table.compares.keys().isdisjoint(shadows):
                ticket.compare = None  # not known yet

    def mirrored_ended(self, ticket: Ticket) -> None:
        """See Observer."""
        self._bytes[ticket.backend] -= len(ticket.query.call)
        if not self._bytes[ticket.backend]:
            del self._bytes[ticket.backend]

    def _make_at(self, time: float) -> None:
        self._next = self._state.tickets.once(time, self, Mirroring.make)

    def make(self, now: float) -> None:
        """Make some of the mirrored queries that are due; queries that come meanwhile wait.

        So of many it makes only a half.
        """
        self._state.tickets.never(self._next)
        self._next = 0
        count = max(AT_ONCE, len(self._due) // 2)
        due, self._due = self._due[:count], self._due[count:]
        for original, shadows in due:
            pairings: tuple[Pairing, ...] = ()
            for tag in shadows:
                pairings += self._mirror(original, tag, now)
            if original.compare is None:
                original.compare = pairings
                if original.replica is not None:  # else they go with its assignment
                    self._state.effects.append(Compare(original.replica, original))
        if self._due:
            self._make_at(now + MIRROR_MORE_S)

    def _mirror(self, original: Ticket, tag: str, now: float) -> tuple[Pairing, ...]:
        """Queue a mirrored query at a shadow; return where its answer is compared, if it is."""
        state, held, size = self._state, self._bytes[tag], len(original.query.call)
        endpoint, backend = state.endpoints.get(original.endpoint), state.backends.get(tag)
        compare = endpoint.table.compares.get(tag) if endpoint is not None else None
        if compare is not None and original.backend == tag:
            return ()  # a shadow that has traffic, too: it would be compared with itself
        is_left_out = original.query.follows or (held and held + size > MAX_MIRRORED_BYTES)
        if (
            is_left_out
            or endpoint is None
            or backend is None
            or not (
                tag in endpoint.table.shadows
                and original.status != CANCELLED_STATUS
                and backend.takes_mirrored
            )
        ):
            state.observers.dropped(Dropped(original.endpoint, tag))
            return ()
        ticket = state.tickets.open(None, original.query, endpoint.table, now)
        ticket.route, ticket.backend, ticket.session = original.route, tag, original.session
        backend.assign_home(ticket)
        state.limit(ticket, backend.table)
        original.mirrored += (ticket,)
        self._bytes[tag] = held + size
        backend.enqueue(ticket, now)
        pairings = _paired(ticket, compare, list(backend.replicas))
        if not (backend.replicas or backend.queue.size or backend.mirrored.size > 1):
            state.observers.starved(tag)
        state.wait(backend, now)
        return pairings


def _paired(
    mirrored: Ticket, compare: tuple[str, Any] | None, replicas: list[str]
) -> tuple[Pairing, ...]:
    if compare is None or not replicas:
        return ()
    # Two by two: numbers go to a query and its mirrored query in turn.
    pairing = Pairing(mirrored.number, replicas[mirrored.number // 2 % len(replicas)])
    mirrored.compare = (pairing._replace(settings=compare),)
    return (pairing,)
