"""Queries and tables for router tests, with what a test does not care about filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from greenroom.core.routing.router import Router
from greenroom.core.routing.tables import BackendTable, EndpointTable, ReplicaTable
from greenroom.core.routing.tickets import Assign, Effect

T = TypeVar("T", bound=Effect)


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


def replica(tag: str, life: int = 1) -> ReplicaTable:
    return ReplicaTable(tag=tag, address=f"address of {tag}", process=(tag, life))


def backend(*replicas: str, tag: str = "b", limit: int = 2, **settings: Any) -> BackendTable:
    return BackendTable(
        tag=tag,
        replicas=tuple(replica(each) for each in replicas),
        max_ongoing_requests=limit,
        **settings,
    )


def endpoint(name: str = "e", to: str = "b", **settings: Any) -> EndpointTable:
    return EndpointTable(name=name, traffic={to: 1.0}, **settings)


def router(*tables: BackendTable) -> Router:
    """Return a router with these backends, and endpoint "e" on backend "b"."""
    made = Router(lambda: 0.5)
    for table in tables:
        made.set_backend(table.tag, table, 0.0)
    made.set_endpoint("e", endpoint(), 0.0)
    return made


def only(kind: type[T], effects: list[Effect]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def assigned(effects: list[Effect]) -> list[tuple[str, int]]:
    """Return (replica, query id) of each assignment."""
    return [(effect.replica, effect.ticket.query.id) for effect in only(Assign, effects)]


def numbers(effects: list[Effect]) -> list[int]:
    return [effect.ticket.number for effect in only(Assign, effects)]


def load(made: Router) -> dict[str, tuple[int, int]]:
    """Return backend -> (queued, ongoing), counted where they are kept."""
    ongoing = dict.fromkeys(made._backends, 0)
    for each in made._holders.by_tag.values():
        ongoing[each.backend] = ongoing.get(each.backend, 0) + len(each.ongoing)
    return {tag: (b.queue.size + b.copies.size, ongoing[tag]) for tag, b in made._backends.items()}


def is_empty(made: Router) -> bool:
    """Tell whether nothing is left of any query."""
    made.next_deadline_at()
    return not (
        made._tickets
        or made.has_copies_due
        or made._tickets.copies._bytes
        or made._tickets.deadlines._heap
        or any(b.queue.size or b.copies.size for b in made._backends.values())
        or any(r.ongoing or r.unconfirmed or r.retired for r in made._holders.by_tag.values())
    )
