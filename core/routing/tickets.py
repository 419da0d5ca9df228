"""Tickets: queries while a router has them, and the effects that the router asks its shell for."""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

from greenroom.core.routing.outliers import Trial
from greenroom.core.routing.retries import RetryBudget
from greenroom.core.routing.tables import BackendTable, EndpointTable

BODY = "body"  # see QueryLike.follows
SOCKET = "socket"
CANCELLED_STATUS = 499
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


class Pairing(NamedTuple):
    """The answers of a query and of its mirrored query meet at this replica of the shadow.

    ``settings`` is for the mirrored query, and says by which comparison, as (id, settings).
    """

    number: int  # the mirrored query's
    replica: str
    settings: tuple[str, Any] | None = None


@dataclass(slots=True, eq=False)
class Ticket:
    """One query while the router has it; a mirrored query's has no caller."""

    number: int
    caller: Hashable  # None for a mirrored query
    query: Any  # QueryLike; a mirrored query shares the original's
    endpoint: str
    route: str
    submitted_at: float
    backend: str = ""
    deadline_at: float | None = None
    replica: str | None = None  # None while it is queued
    assigned_at: float = -1.0  # the last time; below 0 is never
    budget: RetryBudget | None = None  # shared with all queries like it; None for a mirrored query
    attempts: int = 0  # replicas that may have begun to run it
    failed_at: str = ""  # one that did, and it is to be tried at another
    abandoned: int = 0  # the status it was ended with while its replica may still be busy with it
    begun: bool = False  # a part of its answer has left, so it cannot be retried
    answered: int = 0  # the status that its replica has answered with
    answered_at: float = 0.0
    ended: bool = False
    mirrored: tuple[Ticket, ...] = ()  # of an original
    session: Session | None = None
    home: str = ""  # the replica that it waits for; "" for any
    preference: Preference | None = None
    trial: Trial | None = None  # of a replica, that it is a part of
    # Where its answer is compared with others'; None until the mirrored queries are made.
    compare: tuple[Pairing, ...] | None = ()

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
    """Answer the caller with an error; ``kind`` is a class in core.errors."""

    caller: Hashable
    query_id: int
    kind: str
    text: str
    retry_after_s: float | None = None
    allowed: tuple[str, ...] = ()


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


class Grant(NamedTuple):
    """Tell the caller of its lease, or that the lease has more slots now."""

    lease: Lease


class Revoke(NamedTuple):
    """Tell the caller to return its lease."""

    lease: Lease


class Reclaim(NamedTuple):
    """Call :meth:`Router.reclaim` after WAIT_S: queries wait beside leases."""

    backend: str


Effect = Assign | Cancel | Compare | Refuse | Grant | Revoke | Reclaim
Effects = list[Effect]


class Observer:
    """Hears of each query's life from the router; override the events that you need.

    This is the one seam for whatever follows queries without deciding on them: metrics, load
    reports, tallies for rollouts, mirroring. An event comes before its effects are performed.
    Observers change nothing while they hear of an event.
    """

    def accepted(self, ticket: Ticket, endpoint: EndpointTable) -> None:
        """Hear of a caller's query that was let in: it is queued or dispatched."""

    def starved(self, backend: str) -> None:
        """Hear of a backend without a replica at which a query waits first in line."""

    def finished(self, ticket: Ticket, status: int, seconds: float) -> None:
        """Hear of a ticket that ended, and after how long; with status 408 if it expired."""

    def leased(self, endpoint: str, backend: str, status: int, took_s: Sequence[float]) -> None:
        """Hear of queries under a lease that ended with a status, and after how long each."""

    def retried(self, ticket: Ticket, reason: str) -> None:
        """Hear of a query that is sent to another replica.

        Its own has "died" or "failed", or the host of that is "silent".
        """

    def retry_refused(self, ticket: Ticket) -> None:
        """Hear of a query that ended with its replica, because there were too many retries."""

    def ejected(self, backend: str, replica: str, times: int) -> None:
        """Hear of a replica that fails where others do not: it gets no queries for a while.

        ``times`` is how often in a row; 0 when it gets queries again.
        """

    def dropped(self, endpoint: str, backend: str) -> None:
        """Hear of a mirrored query that was not made because the shadow could not follow."""


class Observers:
    """The observers of a router, by event: only those that override it are called."""

    def __init__(self) -> None:
        self.accepted: list[Callable[[Ticket, EndpointTable], None]] = []
        self.starved: list[Callable[[str], None]] = []
        self.finished: list[Callable[[Ticket, int, float], None]] = []
        self.leased: list[Callable[[str, str, int, Sequence[float]], None]] = []
        self.retried: list[Callable[[Ticket, str], None]] = []
        self.retry_refused: list[Callable[[Ticket], None]] = []
        self.ejected: list[Callable[[str, str, int], None]] = []
        self.dropped: list[Callable[[str, str], None]] = []

    def add(self, observer: Observer) -> None:
        """Tell an observer of all events from now on."""
        for event, called in vars(self).items():
            if getattr(type(observer), event) is not getattr(Observer, event):
                called.append(getattr(observer, event))


# --- Open tickets and their deadlines -------------------------------------------------------------

# A ticket that has ended leaves the heap of deadlines when its time comes, or when most of the heap
# has ended: thousands of cancelled queries may have hours left.
SPARE = 100  # ended ones that are not worth cleaning up after

LoadByBackend = dict[str, tuple[int, int]]
LoadByEndpoint = dict[tuple[str, str], tuple[int, int]]


class OpenTickets:
    """The tickets of a router that have not ended: whose they are, and by when they must end."""

    def __init__(self) -> None:
        self.by_caller: dict[Hashable, dict[int, Ticket]] = {}  # by caller and key
        self._numbers = itertools.count(1)
        self._timed: dict[int, Ticket] = {}  # by number
        self._heap: list[tuple[float, int]] = []  # of deadlines

    def __len__(self) -> int:
        return sum(map(len, self.by_caller.values()))

    def open(
        self, caller: Hashable, query: QueryLike, endpoint: EndpointTable, now: float
    ) -> Ticket:
        """Make a query's ticket."""
        route = endpoint.route or "/"
        ticket = Ticket(next(self._numbers), caller, query, endpoint.name, route, now)
        tickets = self.by_caller.get(caller)
        if tickets is None:
            tickets = self.by_caller[caller] = {}
        tickets[ticket.number if caller is None else query.id] = ticket
        return ticket

    def renumber(self, ticket: Ticket) -> None:
        """Give a caller's ticket another number: what is still said of the old one is ignored."""
        is_timed = self._timed.pop(ticket.number, None) is not None
        ticket.number = next(self._numbers)
        if is_timed and ticket.deadline_at is not None:
            self._timed[ticket.number] = ticket
            heapq.heappush(self._heap, (ticket.deadline_at, ticket.number))

    def end(self, ticket: Ticket) -> None:
        """Forget a ticket."""
        ticket.ended = True
        self._timed.pop(ticket.number, None)
        tickets = self.by_caller[ticket.caller]
        del tickets[ticket.number if ticket.caller is None else ticket.query.id]
        if not tickets:
            del self.by_caller[ticket.caller]

    def find(self, caller: Hashable, query_id: int) -> Ticket | None:
        """Return the ticket of a query, if it has not ended."""
        tickets = self.by_caller.get(caller)
        return None if tickets is None else tickets.get(query_id)

    def of(self, caller: Hashable) -> list[Ticket]:
        """Return all tickets of a caller, the oldest first."""
        return list(self.by_caller.get(caller, {}).values())

    # --- Deadlines ------------------------------------------------------------------------------

    def limit(self, ticket: Ticket, table: BackendTable) -> None:
        """Set a ticket's deadline, where its query or its backend has one; the first set stays.

        The shorter of both holds: a query's is how long its caller waits, a backend's how long an
        answer of it may take, and neither is a reason to go on past the other.
        """
        timeout_s, own_s = ticket.query.timeout_s, table.request_timeout_s
        if timeout_s is None or (own_s is not None and own_s < timeout_s):
            timeout_s = own_s
        if timeout_s is None or ticket.deadline_at is not None:
            return
        ticket.deadline_at = ticket.submitted_at + timeout_s
        self._take_time(ticket, ticket.deadline_at)

    def limit_wait(self, ticket: Ticket, wait_s: float) -> None:
        """Set by when a ticket that waits has to have a replica."""
        self._take_time(ticket, ticket.submitted_at + wait_s)

    def _take_time(self, ticket: Ticket, at: float) -> None:
        self._timed[ticket.number] = ticket
        if len(self._heap) > 2 * len(self._timed) + SPARE:
            self._heap = [each for each in self._heap if each[1] in self._timed]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (at, ticket.number))

    def limit_no_more(self, ticket: Ticket) -> None:
        """Let a ticket take as long as it likes from now on."""
        self._timed.pop(ticket.number, None)

    def take_due(self, now: float) -> Iterator[Ticket]:
        """Return the tickets whose time is up, or that of their wait, the first due first."""
        while self._heap and self._heap[0][0] <= now:
            ticket = self._timed.get(heapq.heappop(self._heap)[1])
            if ticket is not None:
                yield ticket

    def next_deadline_at(self) -> float | None:
        """Return when the next ticket's time is up."""
        while self._heap and self._heap[0][1] not in self._timed:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    # --- Load -----------------------------------------------------------------------------------

    def unanswered(self) -> Iterator[Ticket]:
        """Return all tickets that wait or run, those of mirrored queries included."""
        for tickets in self.by_caller.values():
            for ticket in tickets.values():
                if not ticket.answered:
                    yield ticket
