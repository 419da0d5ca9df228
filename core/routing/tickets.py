"""Tickets: queries while a router has them, and the effects that the router asks its shell for.

The life of a ticket is a table: its states, and which may follow which.

    NEW       it has no place: it has just come, has left its queue, or lost its replica
    QUEUED    at its backend (queues.py)
    RUNNING   at its replica
    DROPPED   still there, but nobody waits: its caller gave it up, or its time is up
    ANSWERED  it has no slot any more, but its answer may not have arrived; its replica may yet die
    ENDED     it is known no more
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, Protocol, TypeVar

from greenroom.core.errors import IllegalTransitionError
from greenroom.core.routing.outliers import Trial
from greenroom.core.routing.retries import RetryBudget
from greenroom.core.routing.tables import EndpointTable

BODY = "body"  # see QueryLike.follows
SOCKET = "socket"
Headers = Sequence[tuple[bytes, bytes]]


class Session(NamedTuple):
    """What a query says of its session; ``replica`` is the end of a replica's tag, or ""."""

    key: str
    replica: str = ""


class Preference(NamedTuple):
    """What a backend's request router said of a query: replicas in ranks, the best first.

    ``number`` is that of the question. A rank may be empty, and name replicas that are gone.
    """

    backend: str
    number: int
    ranks: tuple[tuple[str, ...], ...] = ()


class QueryLike(Protocol):
    """What the router reads of a query."""

    @property
    def id(self) -> int:
        """The caller's number for it, never used twice by that caller."""

    @property
    def endpoint(self) -> str | None:
        """The endpoint it is for; None where the path decides."""

    @property
    def path(self) -> str:
        """The path of an HTTP request."""

    @property
    def http_method(self) -> str:
        """The HTTP method in upper case; empty for a call through a handle."""

    @property
    def timeout_s(self) -> float | None:
        """Its own time limit; None for the backend's."""

    @property
    def retryable(self) -> bool | None:
        """Whether its caller allows to run it again; None where the caller does not say."""

    @property
    def shard_key(self) -> str | None:
        """The key that decides on the backend; None for chance."""

    @property
    def multiplexed_model_id(self) -> str:
        """The model that it needs and some replicas may have; empty for none."""

    @property
    def session_id(self) -> str:
        """The session that is to stay at one replica, by a handle's word; empty for none."""

    def headers(self) -> Headers:
        """Return the headers of an HTTP request, names in lower case."""

    @property
    def follows(self) -> str:
        """What its caller sends on to its replica: a BODY, the messages of a SOCKET, or nothing."""

    @property
    def call(self) -> Sized:
        """The pickled call; only its length matters here."""


class NewQuery(NamedTuple):
    """A query that has come, and what has become of it before.

    One that is ``resent`` was another router's, now dead, and may have run: it is refused unless it
    may be retried wherever it could have been. With one that was sent under a lease ``attempts``
    replicas have died, the last of them ``died``; if it ``is_refused``, a replica had no room for
    it, and it goes before all others. One that ``failed`` at a replica, after so many seconds, is
    tried at another.
    """

    caller: Hashable
    query: Any  # QueryLike
    resent: bool = False
    attempts: int = 0
    died: str = ""
    is_refused: bool = False
    failed: tuple[str, float] | None = None


class Pairing(NamedTuple):
    """The answers of a query and of its mirrored query meet at this replica of the shadow.

    ``settings`` is for the mirrored query, and says by which comparison, as (id, settings).
    """

    number: int  # the mirrored query's
    replica: str
    settings: tuple[str, Any] | None = None


class TicketState(enum.IntEnum):
    """Where a ticket is in its life; see the module."""

    NEW = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    DROPPED = enum.auto()
    ANSWERED = enum.auto()
    ENDED = enum.auto()


NEW, QUEUED, RUNNING, DROPPED, ANSWERED, ENDED = TicketState
_NEXT: dict[TicketState, tuple[TicketState, ...]] = {
    NEW: (RUNNING, QUEUED, ENDED),
    QUEUED: (NEW,),
    RUNNING: (ANSWERED, ENDED, DROPPED, NEW),
    DROPPED: (ENDED,),
    ANSWERED: (ENDED, NEW),
    ENDED: (),
}


@dataclass(slots=True, eq=False)
class Ticket:
    """One query while the router has it; a mirrored query's has no caller."""

    number: int  # another one when it is taken from a replica that may still run it
    caller: Hashable  # None for a mirrored query
    query: Any  # QueryLike; a mirrored query shares the original's
    endpoint: str
    route: str
    submitted_at: float
    opened_as: int = 0  # the number that it had first
    backend: str = ""
    deadline_at: float | None = None
    state: TicketState = NEW
    replica: str | None = None  # that runs it, or did last; None before, and while it is queued
    assigned_at: float = -1.0  # the last time; below 0 is never
    budget: RetryBudget | None = None  # shared with all queries like it; None for a mirrored query
    attempts: int = 0  # replicas that may have begun to run it
    waits_as: int = -1  # how many those were when it was last queued for a limited time
    failed_at: str = ""  # one that did, and it is to be tried at another
    begun: bool = False  # a part of its answer has left, so it cannot be retried
    status: int = 0  # that it ends with, once that is known, which is not until it is DROPPED
    status_at: float = 0.0
    mirrored: tuple[Ticket, ...] = ()  # of an original
    session: Session | None = None
    home: str = ""  # the only replica that it may run at; "" for any
    preference: Preference | None = None
    trial: Trial | None = None  # of a replica, that it is a part of
    # Where its answer is compared with others'; None until the mirrored queries are made.
    compare: tuple[Pairing, ...] | None = ()

    def become(self, state: TicketState) -> None:
        """Take a transition; raise IllegalTransitionError where the table has none."""
        if state not in _NEXT[self.state]:
            text = f"a ticket that is {self.state.name} cannot become {state.name}"
            raise IllegalTransitionError(text)
        self.state = state

    @property
    def took_s(self) -> float:
        """From its arrival to its outcome, once that is known."""
        return self.status_at - self.submitted_at

    @property
    def line(self) -> Hashable:
        """The line of a queue that it waits in."""
        return (self.endpoint, self.home) if self.home else self.endpoint

    @property
    def time_limit_s(self) -> float:
        """How long it may take in all."""
        return inf if self.deadline_at is None else self.deadline_at - self.submitted_at

    def left_s(self, now: float) -> float:
        """Return how much of that is left."""
        return inf if self.deadline_at is None else self.deadline_at - now

    @property
    def is_mirrored(self) -> bool:
        """Whether it is for a shadow, so that no caller hears of its end."""
        return self.caller is None

    @property
    def is_open_socket(self) -> bool:
        """Whether it is a WebSocket that was accepted: answered, but it keeps its slot."""
        return self.begun and bool(self.query.follows == SOCKET)


class Assign(NamedTuple):
    """Send the ticket to the replica."""

    replica: str
    ticket: Ticket


class Cancel(NamedTuple):
    """Tell the replica to drop what it has by this number; its slot is taken until it has."""

    replica: str
    number: int


class Compare(NamedTuple):
    """Tell the replica that has, or had, the ticket where its answer is to be compared."""

    replica: str
    ticket: Ticket


class Refuse(NamedTuple):
    """Answer the caller with an error; ``kind`` is a class in core.errors.

    ``died`` is the replica that died with the query, for the shell to say why.
    """

    caller: Hashable
    query_id: int
    kind: str
    text: str
    retry_after_s: float | None = None
    allowed: tuple[str, ...] = ()
    died: str = ""


class LeaseState(enum.Enum):
    """See leases.py."""

    GRANTED = enum.auto()
    REVOKED = enum.auto()
    RETURNED = enum.auto()


@dataclass(slots=True, eq=False)
class Lease:
    """A lease as its router has it."""

    number: int
    caller: Hashable
    endpoint: str
    backend: str
    slots: dict[str, int]  # replica -> leased, and once it is returned: in use
    state: LeaseState = LeaseState.GRANTED
    ongoing: int = 0  # by the last report, as is the next
    overdue: int = 0  # of those, the ones that are older than OVERDUE_S


@dataclass(slots=True, eq=False)
class Lending:
    """Who has leased of a backend, and who would."""

    leases: dict[tuple[Hashable, str], Lease] = field(default_factory=dict)  # caller, endpoint
    asked_at: dict[Hashable, float] = field(default_factory=dict)  # by caller, as is the next
    used_at: dict[Hashable, float] = field(default_factory=dict)
    paused_until: float = 0.0
    is_watched: bool = False  # queries wait, and soon it is seen whether they still do


class Grant(NamedTuple):
    """Tell the caller of its lease, or that the lease has more slots now."""

    lease: Lease


class Revoke(NamedTuple):
    """Tell the caller to return its lease."""

    lease: Lease


Effect = Assign | Cancel | Compare | Refuse | Grant | Revoke
Effects = list[Effect]


class Ended(NamedTuple):
    """Queries of callers that ended with a status: one, or some that were under a lease.

    After how long each, in seconds, and how long each had to wait for a replica, if it got one.
    """

    endpoint: str
    backend: str
    status: int
    took_s: Sequence[float]
    waited_s: Sequence[float]


class Retried(NamedTuple):
    """A query is sent to another replica: its own has "died" or "failed", or is "silent"."""

    ticket: Ticket
    reason: str


class Ejected(NamedTuple):
    """A replica fails where others do not, and gets no queries for a while.

    ``times`` is how often in a row; 0 when it gets queries again.
    """

    backend: str
    replica: str
    times: int


class Dropped(NamedTuple):
    """A mirrored query was not made because the shadow could not follow."""

    endpoint: str
    backend: str


class Observer:
    """Hears of each query's life from the router; override the events that you need.

    This is the one seam for whatever follows queries without deciding on them: metrics, load
    reports, tallies for rollouts, mirroring. An event comes before its effects are performed.
    Observers change nothing while they hear of an event, which is one value.
    """

    def accepted(self, ticket: Ticket) -> None:
        """Hear of a caller's query that was let in: it is queued or dispatched."""

    def starved(self, backend: str) -> None:
        """Hear of a backend without a replica at which a query waits first in line."""

    def ended(self, event: Ended) -> None:
        """See Ended; the status is 408 of what expired."""

    def mirrored_ended(self, ticket: Ticket) -> None:
        """Hear of a mirrored query that ended."""

    def retried(self, event: Retried) -> None:
        """See Retried."""

    def retry_refused(self, ticket: Ticket) -> None:
        """Hear of a query that ended with its replica, because there were too many retries."""

    def ejected(self, event: Ejected) -> None:
        """See Ejected."""

    def dropped(self, event: Dropped) -> None:
        """See Dropped."""


T = TypeVar("T")


class Heard(list[Callable[[T], None]]):
    """What hears of one kind of event; call it with the event."""

    def __call__(self, event: T) -> None:
        """Tell all of them."""
        for hear in self:
            hear(event)


class Observers:
    """The observers of a router, by event: only those that override it are called."""

    def __init__(self) -> None:
        self.accepted: Heard[Ticket] = Heard()
        self.starved: Heard[str] = Heard()
        self.ended: Heard[Ended] = Heard()
        self.mirrored_ended: Heard[Ticket] = Heard()
        self.retried: Heard[Retried] = Heard()
        self.retry_refused: Heard[Ticket] = Heard()
        self.ejected: Heard[Ejected] = Heard()
        self.dropped: Heard[Dropped] = Heard()

    def add(self, observer: Observer) -> None:
        """Tell an observer of all events from now on."""
        for event, heard in vars(self).items():
            if getattr(type(observer), event) is not getattr(Observer, event):
                heard.append(getattr(observer, event))


# --- Open tickets, and what happens at a time -----------------------------------------------------

# What is to happen to a ticket that has ended leaves the heap when its time comes, or when most of
# the heap is of such: thousands of cancelled queries may have hours left.
SPARE = 100  # entries that are not worth cleaning up after


Happening = Callable[[Any, float], None]
"""What happens to a ticket, or to another subject; gets the time."""


class OpenTickets:
    """The tickets of a router that have not ended: whose they are, and what happens to them when.

    What is due of a ticket counts by the number that it had first.
    """

    def __init__(self) -> None:
        self.by_caller: dict[Hashable, dict[int, Ticket]] = {}  # by caller and key
        self._numbers = itertools.count(1)
        self._entries = itertools.count(1)
        self._timed: dict[int, Any] = {}  # tickets by number, and other subjects below 0
        self._heap: list[tuple[float, int, int, Happening]] = []  # the second number breaks ties

    def open(
        self, caller: Hashable, query: QueryLike, endpoint: EndpointTable, now: float
    ) -> Ticket:
        """Make a query's ticket."""
        route, number = endpoint.route or "/", next(self._numbers)
        ticket = Ticket(number, caller, query, endpoint.name, route, now, number)
        tickets = self.by_caller.get(caller)
        if tickets is None:
            tickets = self.by_caller[caller] = {}
        tickets[number if caller is None else query.id] = ticket
        return ticket

    def renumber(self, ticket: Ticket) -> None:
        """Give a caller's ticket another number: what is still said of the old one is ignored."""
        ticket.number = next(self._numbers)

    def end(self, ticket: Ticket) -> None:
        """Forget a ticket."""
        ticket.become(ENDED)
        self._timed.pop(ticket.opened_as, None)
        tickets = self.by_caller[ticket.caller]
        del tickets[ticket.number if ticket.caller is None else ticket.query.id]
        if not tickets:
            del self.by_caller[ticket.caller]

    def find(self, caller: Hashable, query_id: int) -> Ticket | None:
        """Return the ticket of a query, if it has not ended."""
        return self.by_caller.get(caller, {}).get(query_id)

    def of(self, caller: Hashable) -> list[Ticket]:
        """Return all tickets of a caller, the oldest first."""
        return list(self.by_caller.get(caller, {}).values())

    def unanswered(self) -> Iterator[Ticket]:
        """Return all tickets that wait or run, those of mirrored queries included."""
        for tickets in self.by_caller.values():
            for ticket in tickets.values():
                if ticket.state is not ANSWERED:
                    yield ticket

    # --- What happens when ----------------------------------------------------------------------

    def at(self, time: float, ticket: Ticket, happening: Happening) -> None:
        """Have something happen to a ticket at a time, unless it has ended."""
        self._at(time, ticket.opened_as, ticket, happening)

    def once(self, time: float, subject: Any, happening: Happening) -> int:
        """Have something happen to what is no ticket; return a number for :meth:`never`."""
        number = -next(self._entries)
        self._at(time, number, subject, happening)
        return number

    def _at(self, time: float, number: int, subject: Any, happening: Happening) -> None:
        self._timed[number] = subject
        if len(self._heap) > 4 * len(self._timed) + SPARE:
            self._heap = [each for each in self._heap if each[2] in self._timed]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (time, next(self._entries), number, happening))

    def never(self, number: int) -> None:
        """Have nothing more happen to a ticket, by the number that it had first."""
        self._timed.pop(number, None)

    def happen(self, now: float) -> None:
        """Have happen what is due, the first first."""
        while self._heap and self._heap[0][0] <= now:
            *_, number, happening = heapq.heappop(self._heap)
            subject = self._timed.get(number) if number > 0 else self._timed.pop(number, None)
            if subject is not None:
                happening(subject, now)

    def next_at(self) -> float | None:
        """Return when something is due next."""
        while self._heap and self._heap[0][2] not in self._timed:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
