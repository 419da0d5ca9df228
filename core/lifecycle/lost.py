"""Records that are damaged beyond repair: what is known of them, and what is done in their place.

What a lost endpoint or backend would have served is refused, and never served by another: its route
is still known from its application, or from the last change in the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    ENDPOINT,
    ApplicationRecord,
    EndpointRecord,
    HistoryRecord,
    Key,
)
from greenroom.core.routing.tables import (
    BACKEND_PREFIX,
    ENDPOINT_PREFIX,
    BackendTable,
    EndpointTable,
)

if TYPE_CHECKING:
    from greenroom.core.lifecycle.history import History

SOFT = ("goal", "history", "rollout", "listener", "host")
"""Kinds that nobody can save again: they are done without, and a note tells of it."""
DAMAGED = "its record in the store is damaged; deploy it again"


def tables_of_lost(
    lost: Iterable[Key], applications: Mapping[str, ApplicationRecord], history: History
) -> Iterator[tuple[str, BackendTable | EndpointTable]]:
    """Return the long poll's keys and what proxies are told of endpoints and backends."""
    for kind, name in lost:
        if kind == BACKEND:
            yield (
                BACKEND_PREFIX + name,
                BackendTable(tag=name, unavailable=DAMAGED, is_expected=True),
            )
        elif kind == ENDPOINT:
            route = _route_of(name, applications.values(), history)
            yield ENDPOINT_PREFIX + name, EndpointTable(name=name, route=route, unavailable=DAMAGED)


def _route_of(
    name: str, applications: Iterable[ApplicationRecord], history: Iterable[HistoryRecord]
) -> str | None:
    for application in applications:
        if name == f"{application.name}#{application.ingress}":
            return application.route_prefix
    for entry in reversed(tuple(history)):
        for side in (entry.after, entry.before):
            record = side.get((ENDPOINT, name))
            if isinstance(record, EndpointRecord):
                return record.route
    return None


def parts_of(application: str, keys: Iterable[Key]) -> set[Key]:
    """Return the keys that are an application's."""
    return {
        (kind, name)
        for kind, name in keys
        if (kind == APPLICATION and name == application)
        or (kind in {BACKEND, ENDPOINT} and name.startswith(f"{application}#"))
    }
