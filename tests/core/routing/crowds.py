"""A router under load, with a clock of its own: what is asked, run and answered."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BackendTable
from greenroom.core.routing.tickets import Assign, NewQuery, Refuse, Ticket
from tests.core.routing.queries import Query, endpoint, replica


class Outcome(NamedTuple):
    """How a query ended, and after how long; ``kind`` is empty for an answer."""

    kind: str
    seconds: float
    retry_after_s: float | None = None


class Crowd:
    """Queries at given rates to one backend, whose replicas run as many as the router lets them.

    ``run_s`` returns how long a query of an endpoint takes; ``paces`` has how many times as long it
    takes at each replica. With ``processors``, a replica runs no more than so many at full speed:
    more of them share it. What is past its time is run to its end all the same, as sync code is.
    """

    def __init__(
        self,
        slots: int,
        run_s: Callable[[str], float],
        *,
        paces: Sequence[float] = (1.0, 1.0),
        seed: int = 1,
        processors: int | None = None,
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
        self._shared = {tag: Shared(self, tag, processors) for tag in self.paces if processors}
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
            self._take(self.router.submit(NewQuery("c", query), self.now))
            self.at(self.now + self.random.expovariate(rate), come)

        self.at(self.now, come)

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

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something happen then."""
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

        run_s = self._run_s(ticket.endpoint)
        if tag in self._shared:
            self._shared[tag].begin(run_s, done)
        else:
            self.at(self.now + run_s * self.paces[tag], done)

    def _end(self, query_id: int, kind: str, retry_after_s: float | None = None) -> None:
        name, asked_at = self._asked.pop(query_id, ("", 0.0))
        if name:  # else its caller has been told already
            self.outcomes[name].append(Outcome(kind, self.now - asked_at, retry_after_s))


class Shared:
    """The processors of one replica, which its queries share alike."""

    def __init__(self, crowd: Crowd, tag: str, processors: int) -> None:
        self._crowd = crowd
        self._tag = tag
        self._processors = processors
        self._ends: list[tuple[float, int, Callable[[], None]]] = []  # by ``_done_s``
        self._order = itertools.count()
        self._done_s = 0.0  # what each query that has been here all the time has got
        self._at = 0.0
        self._version = 0

    def begin(self, run_s: float, done: Callable[[], None]) -> None:
        """Run one more, which takes so long at full speed."""
        self._go_on()
        heapq.heappush(self._ends, (self._done_s + run_s, next(self._order), done))
        self._expect()

    @property
    def _speed(self) -> float:
        share = min(self._processors / max(len(self._ends), 1), 1.0)
        return share / self._crowd.paces[self._tag]

    def _go_on(self) -> None:
        self._done_s += (self._crowd.now - self._at) * self._speed
        self._at = self._crowd.now

    def _expect(self) -> None:
        self._version += 1
        if self._ends:
            left_s = max(self._ends[0][0] - self._done_s, 0.0) / self._speed
            self._crowd.at(self._crowd.now + left_s, partial(self._ended, self._version))

    def _ended(self, version: int) -> None:
        if version == self._version:  # else more have come
            self._go_on()
            _, _, done = heapq.heappop(self._ends)
            self._expect()
            done()


def quantile(values: list[float], share: float) -> float:
    """Return what this share of the sorted values does not exceed."""
    return values[min(int(share * len(values)), len(values) - 1)]
