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

from greenroom.core.routing.router import LoadByEndpoint

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BOUNDS = [*(str(float(each)) for each in BUCKETS_S), "+Inf"]


class Metrics:
    """Counts queries by endpoint, backend and status, and how long they took in all.

    Copies for shadows are counted apart, so that a shadow's errors are nobody's errors.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._queries = _Family(self._registry, "greenroom", "Queries")
        self._copies = _Family(self._registry, "greenroom_shadow", "Copies for shadows")
        self._dropped = Counter(
            "greenroom_shadow_dropped",
            "Copies for shadows that were not run, as the shadow could not follow",
            ["endpoint", "backend"],
            registry=self._registry,
        )

        self._repeated = Counter(
            "greenroom_retries",
            "Queries that were sent to another replica because the one that had them died",
            ["endpoint", "backend"],
            registry=self._registry,
        )
        self._not_repeated = Counter(
            "greenroom_retries_refused",
            "Queries that were not, as there were as many retries as queries",
            ["endpoint", "backend"],
            registry=self._registry,
        )
        self._dropped_children: dict[tuple[str, str], Counter] = {}

    def ended(
        self, endpoint: str, backend: str, status: int, seconds: float, is_copy: bool
    ) -> None:
        """Count one query or copy."""
        (self._copies if is_copy else self._queries).ended(endpoint, backend, status, seconds)

    def dropped(self, endpoint: str, backend: str) -> None:
        """Count one copy that was not run."""
        child = self._dropped_children.get((endpoint, backend))
        if child is None:
            child = self._dropped_children[endpoint, backend] = self._dropped.labels(
                endpoint, backend
            )
        child.inc()

    def repeated(self, endpoint: str, backend: str) -> None:
        """Count one query that is sent again."""
        self._repeated.labels(endpoint, backend).inc()

    def not_repeated(self, endpoint: str, backend: str) -> None:
        """Count one query that is not, because of its budget."""
        self._not_repeated.labels(endpoint, backend).inc()

    def text(self, queries: LoadByEndpoint, copies: LoadByEndpoint) -> bytes:
        """Return all metrics; what is given is (endpoint, backend) -> (queued, ongoing)."""
        self._queries.set_load(queries)
        self._copies.set_load(copies)
        return generate_latest(self._registry)


class _Outcomes:
    """What is counted of one endpoint's queries, or copies, at one backend."""

    __slots__ = ("by_status", "counts", "seconds")

    def __init__(self) -> None:
        self.by_status: dict[int, int] = {}
        self.counts = [0] * (len(BUCKETS_S) + 1)  # per bucket; the last one has no bound
        self.seconds = 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Return the buckets as Prometheus has them: each counts those before it, too."""
        return list(zip(BOUNDS, map(float, accumulate(self.counts)), strict=True))


class _Family(Collector):
    """The metrics of queries, or of copies.

    The library's own counters take locks and many calls for each query: 2 us of the router's 25.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str, what: str) -> None:
        self._prefix = prefix
        self._what = what
        self._outcomes: dict[tuple[str, str], _Outcomes] = {}
        self._load: LoadByEndpoint = {}
        registry.register(self)

    def ended(self, endpoint: str, backend: str, status: int, seconds: float) -> None:
        outcomes = self._outcomes.get((endpoint, backend))
        if outcomes is None:
            outcomes = self._outcomes[endpoint, backend] = _Outcomes()
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
