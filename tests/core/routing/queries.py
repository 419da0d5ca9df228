"""Queries and tables for router tests, with what a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from greenroom.core.routing.load import busy
from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BackendTable, EndpointTable, ReplicaTable
from greenroom.core.routing.tickets import (
    Assign,
    Dropped,
    Ended as End,
    Observer,
    Retried as Retry,
    Ticket,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Query:
    """A query, as a caller sends it."""

    id: int
    endpoint: str | None = "e"
    path: str = ""
    http_method: str = ""
    timeout_s: float | None = None
    retryable: bool | None = True
    shard_key: str | None = None
    multiplexed_model_id: str = ""
    call: bytes = b"call"
    follows: str = ""
    session_id: str = ""
    with_headers: tuple[tuple[bytes, bytes], ...] = ()

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return self.with_headers


class Ended(NamedTuple):
    endpoint: str
    backend: str
    status: int
    seconds: float
    is_mirrored: bool = False


class Retried(NamedTuple):
    endpoint: str
    backend: str
    reason: str = "died"


class RetryRefused(NamedTuple):
    endpoint: str
    backend: str


class Starved(NamedTuple):
    backend: str


class Recorder(Observer):
    """Keeps the events of a router."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def starved(self, backend: str) -> None:
        self.events.append(Starved(backend))

    def ended(self, event: End) -> None:
        self.events += [Ended(*event[:3], took_s) for took_s in event.took_s]

    def mirrored_ended(self, ticket: Ticket) -> None:
        place = (ticket.endpoint, ticket.backend)
        ended = Ended(*place, ticket.status, ticket.took_s, is_mirrored=True)
        self.events.append(ended if ticket.attempts else Dropped(*place))

    def retried(self, event: Retry) -> None:
        ticket, reason = event
        self.events.append(Retried(ticket.endpoint, ticket.backend, reason))

    def retry_refused(self, ticket: Ticket) -> None:
        self.events.append(RetryRefused(ticket.endpoint, ticket.backend))

    def dropped(self, event: Dropped) -> None:
        self.events.append(event)


class _Watched:
    def __init__(self, of: Any, with_events: Callable[[list[Any] | None], list[Any]]) -> None:
        self._of = of
        self._with_events = with_events

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._of, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            result = attribute(*args, **kwargs)
            return self._with_events(result) if isinstance(result, list | None) else result

        return call


class WatchedRouter:
    """A router whose methods return the effects, and after them what observers hear."""

    def __init__(self, draw: Callable[[], float], own_host: str = "") -> None:
        self.router = Router(draw, own_host)
        self._recorder = Recorder()
        self.router.observers.add(self._recorder)

    @property
    def hosts(self) -> Any:
        """What hears of hosts; like the router's methods."""
        return _Watched(self.router.hosts, self._with_events)

    def next_due_at(self) -> float | None:
        return self.router.next_due_at()

    def mirror(self, now: float) -> list[Any]:
        """Make some of the mirrored queries that are due."""
        self.router.mirroring.make(now)
        return self._with_events(self.router.state.taken())

    def finished(self, tag: str, outcomes: list[tuple[int, int]], now: float) -> list[Any]:
        """Let a replica have done what no caller awaits any more."""
        return self._with_events(finished(self.router, tag, outcomes, now))

    @property
    def open_tickets(self) -> int:
        """How many of callers there are, answered ones included."""
        by_caller = self.router.state.tickets.by_caller
        return sum(len(tickets) for caller, tickets in by_caller.items() if caller is not None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of any query."""
        return not (
            busy(self.router.state)
            or self.open_tickets
            or self.router.next_due_at()
            or any(ongoing(self.router).values())
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(_Watched(self.router, self._with_events), name)

    def _with_events(self, effects: list[Any] | None) -> list[Any]:
        events, self._recorder.events = self._recorder.events, []
        return [*(effects or []), *events]


def ongoing(router: Any) -> dict[str, int]:
    """Return replica -> slots taken, of all that a router knows."""
    return {tag: each.load for tag, each in router.state.replicas.items()}


def finished(router: Router, tag: str, outcomes: list[tuple[int, int]], now: float) -> list[Any]:
    """Let a replica have done what no caller awaits any more; return the effects."""
    return router.answered(tag, outcomes, now, is_awaited=False)


def replica(tag: str, life: int = 1, host: str = "") -> ReplicaTable:
    return ReplicaTable(tag=tag, address=f"address of {tag}", process=(tag, life), host=host)


def backend(*replicas: str, tag: str = "b", limit: int = 2, **settings: Any) -> BackendTable:
    return BackendTable(
        tag=tag,
        replicas=tuple(replica(each) for each in replicas),
        max_ongoing_requests=limit,
        **settings,
    )


def endpoint(name: str = "e", to: str = "b", **settings: Any) -> EndpointTable:
    return EndpointTable(name=name, traffic={to: 1.0}, **settings)


def router(*tables: BackendTable) -> WatchedRouter:
    """Return a router with these backends, and endpoint "e" on backend "b"."""
    made = WatchedRouter(lambda: 0.5)
    for table in tables:
        made.set_backend(table.tag, table, 0.0)
    made.set_endpoint("e", endpoint(), 0.0)
    return made


def only(kind: type[T], effects: list[Any]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def assigned(effects: list[Any]) -> list[tuple[str, int]]:
    """Return (replica, query id) of each assignment."""
    return [(effect.replica, effect.ticket.query.id) for effect in only(Assign, effects)]


def numbers(effects: list[Any]) -> list[int]:
    return [effect.ticket.number for effect in only(Assign, effects)]
