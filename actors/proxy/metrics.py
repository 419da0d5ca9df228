"""What a proxy counts of the queries that its router has."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.metrics import Family, Registry
from greenroom.core.routing.tickets import LoadByEndpoint, Observer, Ticket

_PAIR = ("endpoint", "backend")


class Metrics(Observer):
    """Counts queries by endpoint, backend and status, and how long they took in all.

    Mirrored queries are counted apart, so that a shadow's errors do not count as errors of its
    endpoint.
    """

    def __init__(self) -> None:
        self._registry = registry = Registry()
        self._queries = _Kind(registry, "greenroom", "Queries")
        self._mirrored = _Kind(registry, "greenroom_shadow", "Mirrored queries")
        self._waits = registry.histogram(
            "greenroom_queue_seconds",
            "Queries: from their arrival at the router until a replica had room",
            *_PAIR,
        )
        self._dropped = registry.counter(
            "greenroom_shadow_dropped_total",
            "Mirrored queries that were not run, as the shadow could not follow",
            *_PAIR,
        )
        self._retried = registry.counter(
            "greenroom_retries_total",
            "Queries that were sent to another replica because the one that had them died",
            *_PAIR,
        )
        self._retries_refused = registry.counter(
            "greenroom_retries_refused_total",
            "Queries that were not, as there were as many retries as queries",
            *_PAIR,
        )
        self._asked = registry.counter(
            "greenroom_request_router_questions_total",
            "Queries of which a request router was to be asked, by what came of it: chosen, none, "
            "late, failed, or unavailable",
            *("backend", "outcome"),
        )
        self._asked_seconds = registry.histogram(
            "greenroom_request_router_seconds",
            "How long queries waited for a request router's answer",
            "backend",
        )
        self._deaths = registry.counter(
            "greenroom_replica_deaths_total",
            "Replicas of this host whose process has ended without being told to",
            "backend",
        )

    def finished(self, ticket: Ticket, status: int, seconds: float) -> None:
        """See Observer."""
        if ticket.caller is not None:
            self._queries.ended(ticket.endpoint, ticket.backend, status, (seconds,))
            if ticket.assigned_at >= 0:
                waited_s = ticket.assigned_at - ticket.submitted_at
                self._waits.observe(waited_s, ticket.endpoint, ticket.backend)
        elif ticket.attempts:
            self._mirrored.ended(ticket.endpoint, ticket.backend, status, (seconds,))
        else:
            self.dropped(ticket.endpoint, ticket.backend)

    def leased(self, endpoint: str, backend: str, status: int, took_s: Sequence[float]) -> None:
        """See Observer. Under a lease no query waits."""
        self._queries.ended(endpoint, backend, status, took_s)
        for _ in took_s:
            self._waits.observe(0.0, endpoint, backend)

    def dropped(self, endpoint: str, backend: str) -> None:
        """See Observer."""
        self._dropped.add(1, endpoint, backend)

    def retried(self, ticket: Ticket) -> None:
        """See Observer."""
        self._retried.add(1, ticket.endpoint, ticket.backend)

    def retry_refused(self, ticket: Ticket) -> None:
        """See Observer."""
        self._retries_refused.add(1, ticket.endpoint, ticket.backend)

    def asked(self, backend: str, outcome: str, seconds: float) -> None:
        """Count a query of which a request router was to be asked."""
        self._asked.add(1, backend, outcome)
        self._asked_seconds.observe(seconds, backend)

    def replica_died(self, backend: str) -> None:
        """Count a replica of this host that has ended without being told to."""
        self._deaths.add(1, backend)

    def forget(self, label: str, name: str) -> None:
        """Drop what was counted of an endpoint or backend that is gone."""
        self._registry.forget(label, name)

    def families(self, queries: LoadByEndpoint, mirrored: LoadByEndpoint) -> list[Family]:
        """Return all metrics; given (endpoint, backend) -> (queued, ongoing)."""
        self._queries.set_load(queries)
        self._mirrored.set_load(mirrored)
        return self._registry.families()


class _Kind:
    """The metrics of queries, or of mirrored queries."""

    def __init__(self, registry: Registry, prefix: str, what: str) -> None:
        self._ended = registry.counter(
            f"{prefix}_requests_total", f"{what} ended, by HTTP status", *_PAIR, "status"
        )
        self._seconds = registry.histogram(
            f"{prefix}_request_seconds",
            f"{what}: from the query's arrival at the router to the outcome",
            *_PAIR,
        )
        self._queued = registry.gauge(
            f"{prefix}_queued_requests", f"{what} that wait for a replica", *_PAIR
        )
        self._ongoing = registry.gauge(
            f"{prefix}_ongoing_requests", f"{what} that replicas are running", *_PAIR
        )

    def ended(self, endpoint: str, backend: str, status: int, took_s: Sequence[float]) -> None:
        self._ended.add(len(took_s), endpoint, backend, str(status))
        for seconds in took_s:
            self._seconds.observe(seconds, endpoint, backend)

    def set_load(self, load: LoadByEndpoint) -> None:
        for metric, place in ((self._queued, 0), (self._ongoing, 1)):
            metric.forget(lambda pair: pair not in load)
            for pair, counts in load.items():
                metric.set(counts[place], *pair)
