"""What a router has to do, and what it lacks, read from its state: for reports and for pages."""

from __future__ import annotations

from collections import Counter

from greenroom.core.routing.dispatching import Dispatch, backends_of
from greenroom.core.routing.tickets import QUEUED

LoadByBackend = dict[str, tuple[int, int]]
LoadByEndpoint = dict[tuple[str, str], tuple[int, int]]


def busy(state: Dispatch) -> LoadByBackend:
    """Return backend -> (queued, ongoing) of those that have any, mirrored queries included."""
    load: LoadByBackend = {}
    for of_kind in by_endpoint(state):
        for (_, tag), (queued, ongoing) in of_kind.items():
            if queued or ongoing:
                others = load.get(tag, (0, 0))
                load[tag] = (others[0] + queued, others[1] + ongoing)
    return load


def by_endpoint(state: Dispatch) -> tuple[LoadByEndpoint, LoadByEndpoint]:
    """Return (endpoint, backend) -> (queued, ongoing), of queries and of mirrored queries.

    All pairs that may have any are there, also those that have none.
    """
    queries: LoadByEndpoint = {}
    mirrored: LoadByEndpoint = {}
    for name, endpoint in state.endpoints.items():
        queries.update({(name, tag): (0, 0) for tag in endpoint.split.tags})
        mirrored.update({(name, tag): (0, 0) for tag in endpoint.table.shadows})
    for ticket in state.tickets.unanswered():
        load = mirrored if ticket.is_mirrored else queries
        pair = (ticket.endpoint, ticket.backend)
        queued, ongoing = load.get(pair, (0, 0))
        waits = ticket.state is QUEUED
        load[pair] = (queued + waits, ongoing + (not waits))
    for lease in state.leases.values():
        queued, ongoing = queries.get((lease.endpoint, lease.backend), (0, 0))
        queries[lease.endpoint, lease.backend] = (queued, ongoing + lease.ongoing)
    return queries, mirrored


def overdue(state: Dispatch, before: float) -> Counter[tuple[str, str]]:
    """Return how many queries of each (endpoint, backend) are open since before that time.

    Open WebSockets do not count: they are not slow. Of those under leases the callers say.
    """
    found = Counter(
        (ticket.endpoint, ticket.backend)
        for ticket in state.tickets.unanswered()
        if ticket.submitted_at < before and not (ticket.is_mirrored or ticket.is_open_socket)
    )
    for lease in state.leases.values():
        if lease.overdue:
            found[lease.endpoint, lease.backend] += lease.overdue
    return found


def lacking(state: Dispatch) -> dict[str, dict[str, tuple[str, bool]] | None]:
    """Return each endpoint -> its backends that are to have replicas and have none.

    Of each: why, and whether it was in full service once. None for an endpoint that is lost.
    """
    return {
        name: None
        if endpoint.table.unavailable
        else {
            each.table.tag: (each.table.trouble, each.table.is_expected)
            for each in backends_of(state, endpoint)
            if each.table.is_wanted and not each.replicas
        }
        for name, endpoint in sorted(state.endpoints.items())
    }


def unready(state: Dispatch) -> dict[str, tuple[str, ...]]:
    """Return endpoint -> its backends that had replicas and have none; () if it is lost.

    Workers of the release before ask so.
    """
    found = {}
    for name, backends in lacking(state).items():
        missed = tuple(tag for tag, (_, was_there) in (backends or {}).items() if was_there)
        if missed or backends is None:
            found[name] = missed
    return found
