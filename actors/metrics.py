"""A proxy's metrics, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from understudy.core.counting import LoadByEndpoint

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counts queries by endpoint, backend and status, and how long they took in all.

    Copies for shadows are counted apart, so that a shadow's errors are nobody's errors.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._queries = _Family(self._registry, "understudy", "Queries")
        self._copies = _Family(self._registry, "understudy_shadow", "Copies for shadows")
        self._dropped = Counter(
            "understudy_shadow_dropped",
            "Copies for shadows that were not run, as the shadow could not follow",
            ["endpoint", "backend"],
            registry=self._registry,
        )

        self._repeated = Counter(
            "understudy_retries",
            "Queries that were sent to another replica because the one that had them died",
            ["endpoint", "backend"],
            registry=self._registry,
        )
        self._not_repeated = Counter(
            "understudy_retries_refused",
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


class _Family:
    """The metrics of queries, or of copies."""

    def __init__(self, registry: CollectorRegistry, prefix: str, what: str) -> None:
        labels = ["endpoint", "backend"]
        self._ended = Counter(
            f"{prefix}_requests",
            f"{what} ended, by HTTP status",
            [*labels, "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            f"{prefix}_request_seconds",
            f"{what}: from the query's arrival at the router to the outcome",
            labels,
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._queued = Gauge(
            f"{prefix}_queued_requests",
            f"{what} that wait for a replica",
            labels,
            registry=registry,
        )
        self._ongoing = Gauge(
            f"{prefix}_ongoing_requests",
            f"{what} that replicas are running",
            labels,
            registry=registry,
        )
        # labels() takes a lock and checks its arguments on each call: 2 us saved per query.
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def ended(self, endpoint: str, backend: str, status: int, seconds: float) -> None:
        key = (endpoint, backend, status)
        children = self._children.get(key)
        if children is None:
            counter = self._ended.labels(endpoint, backend, str(status))
            children = self._children[key] = (counter, self._seconds.labels(endpoint, backend))
        children[0].inc()
        children[1].observe(seconds)

    def set_load(self, load: LoadByEndpoint) -> None:
        self._queued.clear()
        self._ongoing.clear()
        for (endpoint, backend), (queued, ongoing) in load.items():
            self._queued.labels(endpoint, backend).set(queued)
            self._ongoing.labels(endpoint, backend).set(ongoing)
