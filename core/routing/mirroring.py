"""Mirrored queries: copies of callers' queries for shadows.

Theory of operation. Mirroring observes the router. For each admitted query it draws the shadows of
the endpoint that get a copy. It makes these mirrored queries some milliseconds later, so that the
queries themselves go first. Each is a ticket without a caller: it runs at most once, and only
observers hear of its end. The queue of a shadow is short and its memory is limited, so a shadow
that cannot keep up misses some queries, which count as *dropped*.

If a shadow's answers are compared, the answers to a query and to its mirrored query meet at one
replica of the shadow. That replica is chosen as soon as the mirrored query is made, and both
replicas that run the two are told. It may not be the one that runs the mirrored query, which may
have to wait for room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from greenroom.core.routing.router import Router
from greenroom.core.routing.tickets import Compare, Dropped, Effects, Observer, Pairing, Ticket

MIRROR_S = 0.005  # how long mirrored queries wait: queries go first, and others may go along
MIRROR_MORE_S = 0.001  # between two batches, for queries to be let in
AT_ONCE = 8
MAX_MIRRORED_BYTES = 32 * 1024 * 1024  # of calls that mirrored queries of a shadow keep in memory


class Mirroring(Observer):
    """Makes the mirrored queries of a router; ``draw`` returns a uniform number in [0, 1)."""

    def __init__(self, router: Router, draw: Callable[[], float]) -> None:
        self._router = router
        self._draw = draw
        self._due: list[tuple[Ticket, list[str]]] = []  # queries, and their shadows
        self._bytes: Counter[str] = Counter()  # by shadow; those without any leave it
        router.observers.add(self)

    @property
    def is_due(self) -> bool:
        """Whether to call :meth:`make`, MIRROR_S later."""
        return bool(self._due)

    def accepted(self, ticket: Ticket) -> None:
        """See Observer. What follows a query goes to one replica only, so it is not mirrored."""
        endpoint = self._router.endpoint(ticket.endpoint)
        if endpoint is None or not endpoint.shadows:
            return
        draw = self._draw
        shadows = [tag for tag, proportion in endpoint.shadows.items() if draw() < proportion]
        if shadows:
            self._due.append((ticket, shadows))
            if not endpoint.compares.keys().isdisjoint(shadows):
                ticket.compare = None  # not known yet

    def finished(self, ticket: Ticket) -> None:
        """See Observer."""
        if ticket.caller is None:
            self._bytes[ticket.backend] -= len(ticket.query.call)
            if not self._bytes[ticket.backend]:
                del self._bytes[ticket.backend]

    def make(self, now: float) -> Effects:
        """Make some of the mirrored queries that are due; queries that come meanwhile wait.

        So of many it makes only a half.
        """
        count = max(AT_ONCE, len(self._due) // 2)
        due, self._due = self._due[:count], self._due[count:]
        effects: Effects = []
        for original, shadows in due:
            pairings: tuple[Pairing, ...] = ()
            for tag in shadows:
                pairings += self._mirror(original, tag, effects, now)
            if original.compare is None:
                original.compare = pairings
                if original.replica is not None:  # else they go with its assignment
                    effects.append(Compare(original.replica, original))
        return effects

    def _mirror(
        self, original: Ticket, tag: str, effects: Effects, now: float
    ) -> tuple[Pairing, ...]:
        """Queue a mirrored query at a shadow; return where its answer is compared, if it is."""
        held, size = self._bytes[tag], len(original.query.call)
        endpoint = self._router.endpoint(original.endpoint)
        compare = endpoint.compares.get(tag) if endpoint is not None else None
        if compare is not None and original.backend == tag:
            return ()  # a shadow that has traffic, too: it would be compared with itself
        mirrored = None
        if not (original.query.follows or (held and held + size > MAX_MIRRORED_BYTES)):
            mirrored = self._router.mirrored(original, tag, now)
        if mirrored is None or endpoint is None:
            self._router.observers.dropped(Dropped(original.endpoint, tag))
            return ()
        self._bytes[tag] = held + size
        pairings = self._paired(mirrored, compare)
        effects += self._router.dispatch_mirrored(mirrored, now)
        return pairings

    def _paired(self, mirrored: Ticket, compare: tuple[str, Any] | None) -> tuple[Pairing, ...]:
        replicas = self._router.replicas_of(mirrored.backend)
        if compare is None or not replicas:
            return ()
        # Two by two: numbers go to a query and its mirrored query in turn.
        pairing = Pairing(mirrored.number, replicas[mirrored.number // 2 % len(replicas)])
        mirrored.compare = (pairing._replace(settings=compare),)
        return (pairing,)
