"""How many tickets wait and how many replicas have, told in the ways that others ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from greenroom.core.tickets import Ticket
from greenroom.core.traffic import RoutedEndpoint

LoadByBackend = dict[str, tuple[int, int]]
LoadByEndpoint = dict[tuple[str, str], tuple[int, int]]


def by_backend(tickets: Iterable[Ticket]) -> LoadByBackend:
    """Return backend -> (queued, ongoing), of the backends that have any."""
    load: LoadByBackend = {}
    for ticket in tickets:
        queued, ongoing = load.get(ticket.backend, (0, 0))
        waits = ticket.replica is None
        load[ticket.backend] = (queued + waits, ongoing + (not waits))
    return load


def by_endpoint(
    endpoints: Mapping[str, RoutedEndpoint], tickets: Iterable[Ticket]
) -> tuple[LoadByEndpoint, LoadByEndpoint]:
    """Return (endpoint, backend) -> (queued, ongoing), of queries and of shadows' copies.

    All pairs that may have any are there, also those that have none.
    """
    queries: LoadByEndpoint = {}
    copies: LoadByEndpoint = {}
    for name, endpoint in endpoints.items():
        queries.update(dict.fromkeys([(name, tag) for tag in endpoint.split.tags], (0, 0)))
        copies.update(dict.fromkeys([(name, tag) for tag in endpoint.table.shadows], (0, 0)))
    for ticket in tickets:
        load, pair = copies if ticket.is_copy else queries, (ticket.endpoint, ticket.backend)
        queued, ongoing = load.get(pair, (0, 0))
        waits = ticket.replica is None
        load[pair] = (queued + waits, ongoing + (not waits))
    return queries, copies


def overdue(tickets: Iterable[Ticket], before: float) -> Counter[tuple[str, str]]:
    """Return how many queries of each (endpoint, backend) are here since before that time.

    Without open WebSockets, which are not slow.
    """
    return Counter(
        (ticket.endpoint, ticket.backend)
        for ticket in tickets
        if ticket.submitted_at < before and not (ticket.is_copy or ticket.is_open_socket)
    )
