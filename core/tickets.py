"""A query while a router has it, and what the router asks its shell to do about it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


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
    def repeatable(self) -> bool:
        """Whether it may be sent again where it may have run already."""

    @property
    def shard_key(self) -> str | None:
        """What decides on the backend; None for chance."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One query while the router has it."""

    number: int
    caller: Hashable
    query: Any  # QueryLike
    endpoint: str
    route: str
    submitted_at: float
    backend: str = ""
    deadline_at: float | None = None
    replica: str | None = None  # which has it; None while it is queued
    attempts: int = 0  # replicas that may have begun to run it
    abandoned: int = 0  # the status it was ended with while its replica may still be busy with it


class Assign(NamedTuple):
    """Send the ticket to the replica."""

    replica: str
    ticket: Ticket


class Cancel(NamedTuple):
    """Tell the replica to drop the ticket, which keeps its slot until the outcome comes."""

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


Effect = Assign | Cancel | Refuse | Ended
Effects = list[Effect]
