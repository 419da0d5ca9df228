"""A query while a router has it, and what the router asks its shell to do about it."""

from __future__ import annotations

from collections.abc import Hashable, Sized
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

BODY = "body"  # see QueryLike.follows
SOCKET = "socket"


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
        """Whether it may be run again, by its caller's word; None where that is not said."""

    @property
    def shard_key(self) -> str | None:
        """What decides on the backend; None for chance."""

    @property
    def multiplexed_model_id(self) -> str:
        """The model that it needs, and some replicas may have; empty for none."""

    @property
    def follows(self) -> str:
        """What its caller sends on to its replica: a BODY, the messages of a SOCKET, or nothing."""

    @property
    def call(self) -> Sized:
        """What is called with what; of interest for its length alone."""


class Pairing(NamedTuple):
    """A query's and its copy's answers are to meet at a replica of the shadow.

    ``settings`` is for the copy, and says by which comparison, as (id, settings).
    """

    number: int  # the copy's
    replica: str
    settings: tuple[str, Any] | None = None


@dataclass(slots=True, eq=False)
class Ticket:
    """One query while the router has it, or a copy of one for a shadow, which has no caller."""

    number: int
    caller: Hashable  # None for a copy
    query: Any  # QueryLike; a copy shares the original's
    endpoint: str
    route: str
    submitted_at: float
    backend: str = ""
    deadline_at: float | None = None
    replica: str | None = None  # which has it; None while it is queued
    assigned_at: float = -1.0  # the last time; below 0 is never
    budget: Any = None  # core.repeats.RepeatBudget, of all like it; None for a copy
    attempts: int = 0  # replicas that may have begun to run it
    abandoned: int = 0  # the status it was ended with while its replica may still be busy with it
    begun: bool = False  # a part of its answer has left, so it cannot be repeated
    answered: int = 0  # the status that its replica has answered with
    answered_at: float = 0.0
    copies: tuple[Ticket, ...] = ()  # of an original: those made of it, some of them ended perhaps
    # Where its answer is compared with others'; None until that is known, when the copies are made.
    compare: tuple[Pairing, ...] | None = ()

    @property
    def time_limit_s(self) -> float:
        """How long it may take in all."""
        return inf if self.deadline_at is None else self.deadline_at - self.submitted_at

    def left_s(self, now: float) -> float:
        """Return how much of that is left."""
        return inf if self.deadline_at is None else self.deadline_at - now

    @property
    def is_copy(self) -> bool:
        """Whether it is for a shadow, so that nobody hears of its end."""
        return self.caller is None

    @property
    def is_open_socket(self) -> bool:
        """Whether it is a WebSocket that was accepted: answered, but for its slot."""
        return self.begun and self.query.follows == SOCKET


class Assign(NamedTuple):
    """Send the ticket to the replica."""

    replica: str
    ticket: Ticket


class Cancel(NamedTuple):
    """Tell the replica to drop the ticket, which keeps its slot until the outcome comes."""

    replica: str
    ticket: Ticket


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


class Ended(NamedTuple):
    """For the metrics: a ticket ended with this HTTP status after this many seconds."""

    endpoint: str
    backend: str
    status: int
    seconds: float
    is_copy: bool = False


class Dropped(NamedTuple):
    """For the metrics: a copy for a shadow ended before it was run."""

    endpoint: str
    backend: str


class Repeated(NamedTuple):
    """For metrics and rollouts: a replica died with a query, which is sent to another."""

    endpoint: str
    backend: str


class NotRepeated(NamedTuple):
    """For the metrics: a query ended as its replica died and there were too many repeats."""

    endpoint: str
    backend: str


class Starved(NamedTuple):
    """For whoever starts replicas: a query waits first in line at a backend that has none."""

    backend: str


Effect = Assign | Cancel | Compare | Refuse | Ended | Dropped | Repeated | NotRepeated | Starved
Effects = list[Effect]
