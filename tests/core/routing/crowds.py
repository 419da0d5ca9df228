"""A router under load, with a clock of its own: what is asked, run and answered."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BackendTable
from greenroom.core.routing.tickets import Assign, Refuse, Ticket
from tests.core.routing.queries import Query, endpoint, replica


class Outcome(NamedTuple):
    """How a query ended, and after how long; ``kind`` is empty for an answer."""

    kind: str
    seconds: float
    retry_after_s: float | None = None


class Crowd:
    """Queries at given rates to one backend, whose replicas run as many as the router lets them.

    ``run_s`` returns how long a query of an endpoint takes; ``paces`` has how many times as long it
    takes at each replica. What is past its time is run to its end all the same, as sync code is.
    """

    def __init__(
        self,
        slots: int,
        run_s: Callable[[str], float],
        *,
        paces: Sequence[float] = (1.0, 1.0),
        seed: int = 1,
        **settings: Any,
    ) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.router = Router(self.random.random)
        self._settings = settings
        self.outcomes: dict[str, list[Outcome]] = defaultdict(list)
        self.paces = {f"r{number}": pace for number, pace in enumerate(paces, 1)}
        self.began_at: list[str] = []  # the replicas at which queries have begun
        self.run_late = 0  # queries that were given to a replica past their time
        self._run_s = run_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._asked: dict[int, tuple[str, float]] = {}
        self._until = 0.0
        self.set_slots(slots)

    def set_slots(self, slots: int) -> None:
        """Let the replicas run so many queries at a time."""
        table = BackendTable(
            tag="b",
            replicas=tuple(map(replica, self.paces)),
            max_ongoing_requests=slots // len(self.paces),
            **self._settings,
        )
        self._take(self.router.set_backend("b", table, self.now))

    def asks(self, name: str, rate: float, timeout_s: float | None = None) -> None:
        """Send an endpoint's queries at this rate, at random times."""
        self.router.set_endpoint(name, endpoint(name), self.now)

        def come() -> None:
            query = Query(next(self._order), name, timeout_s=timeout_s)
            self._asked[query.id] = (name, self.now)
            self._take(self.router.submit("c", query, self.now))
            self._at(self.now + self.random.expovariate(rate), come)

        self._at(self.now, come)

    def run(self, seconds: float) -> None:
        """Let so much time pass; then no more queries come."""
        self._until = self.now + seconds
        while self._events and self._events[0][0] <= self._until:
            self.now, _, what = heapq.heappop(self._events)
            self._take(self.router.expire(self.now))
            what()

    def answered(self, name: str, since: float = 0.0) -> list[float]:
        """Return how long those took that were answered, the quickest first."""
        return sorted(o.seconds for o in self.outcomes[name] if not o.kind)

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def _take(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Assign):
                self._begin(effect.replica, effect.ticket)
            elif isinstance(effect, Refuse):
                self._end(effect.query_id, effect.kind, effect.retry_after_s)

    def _begin(self, tag: str, ticket: Ticket) -> None:
        self.began_at.append(tag)
        self.run_late += ticket.deadline_at is not None and self.now >= ticket.deadline_at

        def done() -> None:
            self._end(ticket.query.id, "")
            self._take(self.router.answered(tag, [(ticket.number, 200)], self.now))
            self.router.delivered(tag, [ticket.number])

        self._at(self.now + self._run_s(ticket.endpoint) * self.paces[tag], done)

    def _end(self, query_id: int, kind: str, retry_after_s: float | None = None) -> None:
        name, asked_at = self._asked.pop(query_id, ("", 0.0))
        if name:  # else its caller has been told already
            self.outcomes[name].append(Outcome(kind, self.now - asked_at, retry_after_s))


def quantile(values: list[float], share: float) -> float:
    """Return what this share of the sorted values does not exceed."""
    return values[min(int(share * len(values)), len(values) - 1)]
