"""A proxy's metrics, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from greenroom.core.routing.tickets import LoadByEndpoint, Observer, Ticket

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BOUNDS = [*(str(float(each)) for each in BUCKETS_S), "+Inf"]


class Metrics(Observer):
    """Counts queries by endpoint, backend and status, and how long they took in all.

    Mirrored queries are counted apart, so that a shadow's errors do not count as errors of its
    endpoint.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._queries = _Family(self._registry, "greenroom", "Queries")
        self._mirrored = _Family(self._registry, "greenroom_shadow", "Mirrored queries")
        self._dropped = Counter(
            "greenroom_shadow_dropped",
            "Mirrored queries that were not run, as the shadow could not follow",
            ["endpoint", "backend"],
            registry=self._registry,
        )

        self._retried = Counter(
            "greenroom_retries",
            "Queries that were sent to another replica because the one that had them died",
            ["endpoint", "backend"],
            registry=self._registry,
        )
        self._retries_refused = Counter(
            "greenroom_retries_refused",
            "Queries that were not, as there were as many retries as queries",
            ["endpoint", "backend"],
            registry=self._registry,
        )

    def finished(self, ticket: Ticket, status: int, seconds: float) -> None:
        """See Observer."""
        if ticket.caller is not None:
            self._queries.finished(ticket, status, seconds)
        elif ticket.attempts:
            self._mirrored.finished(ticket, status, seconds)
        else:
            self.dropped(ticket.endpoint, ticket.backend)

    def dropped(self, endpoint: str, backend: str) -> None:
        """See Observer."""
        self._dropped.labels(endpoint, backend).inc()

    def retried(self, ticket: Ticket) -> None:
        """See Observer."""
        self._retried.labels(ticket.endpoint, ticket.backend).inc()

    def retry_refused(self, ticket: Ticket) -> None:
        """See Observer."""
        self._retries_refused.labels(ticket.endpoint, ticket.backend).inc()

    def text(self, queries: LoadByEndpoint, mirrored: LoadByEndpoint) -> bytes:
        """Return all metrics; given (endpoint, backend) -> (queued, ongoing)."""
        self._queries.set_load(queries)
        self._mirrored.set_load(mirrored)
        return generate_latest(self._registry)


class _Outcomes:
    """What is counted of one endpoint's queries, or mirrored ones, at one backend."""

    __slots__ = ("by_status", "counts", "seconds")

    def __init__(self) -> None:
        self.by_status: dict[int, int] = {}
        self.counts = [0] * (len(BUCKETS_S) + 1)  # per bucket; the last one has no bound
        self.seconds = 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Return the buckets as Prometheus has them: each counts those before it, too."""
        return list(zip(BOUNDS, map(float, accumulate(self.counts)), strict=True))


class _Family(Collector):
    """The metrics of queries, or of mirrored queries.

    The library's own counters take locks and many calls for each query: 2 us of the router's 25.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str, what: str) -> None:
        self._prefix = prefix
        self._what = what
        self._outcomes: dict[tuple[str, str], _Outcomes] = {}
        self._load: LoadByEndpoint = {}
        registry.register(self)

    def finished(self, ticket: Ticket, status: int, seconds: float) -> None:
        pair = (ticket.endpoint, ticket.backend)
        outcomes = self._outcomes.get(pair)
        if outcomes is None:
            outcomes = self._outcomes[pair] = _Outcomes()
        outcomes.by_status[status] = outcomes.by_status.get(status, 0) + 1
        outcomes.counts[bisect_left(BUCKETS_S, seconds)] += 1
        outcomes.seconds += seconds

    def set_load(self, load: LoadByEndpoint) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        prefix, what = self._prefix, self._what
        labels = ("endpoint", "backend")
        ended = CounterMetricFamily(
            f"{prefix}_requests", f"{what} ended, by HTTP status", labels=[*labels, "status"]
        )
        text = f"{what}: from the query's arrival at the router to the outcome"
        seconds = HistogramMetricFamily(f"{prefix}_request_seconds", text, labels=labels)
        for pair, outcomes in self._outcomes.items():
            for status, count in outcomes.by_status.items():
                ended.add_metric((*pair, str(status)), count)
            seconds.add_metric(pair, outcomes.buckets(), outcomes.seconds)
        text = f"{what} that wait for a replica"
        queued = GaugeMetricFamily(f"{prefix}_queued_requests", text, labels=labels)
        text = f"{what} that replicas are running"
        ongoing = GaugeMetricFamily(f"{prefix}_ongoing_requests", text, labels=labels)
        for pair, (waiting, running) in self._load.items():
            queued.add_metric(pair, waiting)
            ongoing.add_metric(pair, running)
        yield from (ended, seconds, queued, ongoing)
