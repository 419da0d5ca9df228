"""A proxy's metrics, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counts queries by endpoint, backend and status, and how long they took in all."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "understudy_requests",
            "Queries ended, by HTTP status",
            ["endpoint", "backend", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "understudy_request_seconds",
            "From the query's arrival at the router to its outcome",
            ["endpoint", "backend"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._queued = Gauge(
            "understudy_queued_requests",
            "Queries that wait for a replica",
            ["backend"],
            registry=self._registry,
        )
        self._ongoing = Gauge(
            "understudy_ongoing_requests",
            "Queries that replicas are running",
            ["backend"],
            registry=self._registry,
        )
        # labels() takes a lock and checks its arguments on each call: 2 us saved per query.
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def ended(self, endpoint: str, backend: str, status: int, seconds: float) -> None:
        """Count one query."""
        key = (endpoint, backend, status)
        children = self._children.get(key)
        if children is None:
            counter = self._requests.labels(endpoint, backend, str(status))
            children = self._children[key] = (counter, self._seconds.labels(endpoint, backend))
        children[0].inc()
        children[1].observe(seconds)

    def text(self, load: dict[str, tuple[int, int]]) -> bytes:
        """Return all metrics; ``load`` is backend -> (queued, ongoing)."""
        self._queued.clear()
        self._ongoing.clear()
        for backend, (queued, ongoing) in load.items():
            self._queued.labels(backend).set(queued)
            self._ongoing.labels(backend).set(ongoing)
        return generate_latest(self._registry)
