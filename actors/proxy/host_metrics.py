"""The metrics that a proxy shows: of its router's queries, and of the processes of its host.

Each process shows what it counts itself in shared memory (runtime/shared_metrics.py); the proxy
reads that when it is asked for a scrape, with what the kernel says of the process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.processes import stat_fields
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.shared_metrics import OtherMetrics
from greenroom.core.metrics import Family, Group, Kind, Registry
from greenroom.core.routing.load import LoadByEndpoint
from greenroom.core.routing.tickets import Dropped, Ejected, Ended, Observer, Retried, Ticket

_PAIR = ("endpoint", "backend")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UTIME, _STIME, _START, _RSS = 11, 12, 19, 21  # of proc(5), counted after the command


class Metrics(Observer):
    """Counts queries by endpoint, backend and status, and how long they took in all.

    Mirrored queries are counted apart, so that a shadow's errors do not count as errors of its
    endpoint.
    """

    def __init__(self) -> None:
        self._registry = registry = Registry()
        self._queries = _Queries(registry, "greenroom", "Queries")
        self._mirrored = _Queries(registry, "greenroom_shadow", "Mirrored queries")
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
            "Queries that were sent to another replica, by what became of the one that had them: "
            "died, failed, or silent",
            *(*_PAIR, "reason"),
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
        self._ejections = registry.counter(
            "greenroom_replica_ejections_total",
            "Times that a replica got no queries for a while, as it failed where others did not",
            "backend",
        )

    def ended(self, event: Ended) -> None:
        """See Observer."""
        endpoint, backend, status, took_s, waited_s = event
        self._queries.ended(endpoint, backend, status, took_s)
        self._waits.observe_all(waited_s, endpoint, backend)

    def mirrored_ended(self, ticket: Ticket) -> None:
        """See Observer."""
        if ticket.attempts:
            took_s = (ticket.took_s,)
            self._mirrored.ended(ticket.endpoint, ticket.backend, ticket.status, took_s)
        else:
            self._dropped.add(1, ticket.endpoint, ticket.backend)

    def dropped(self, event: Dropped) -> None:
        """See Observer."""
        self._dropped.add(1, *event)

    def retried(self, event: Retried) -> None:
        """See Observer."""
        self._retried.add(1, event.ticket.endpoint, event.ticket.backend, event.reason)

    def retry_refused(self, ticket: Ticket) -> None:
        """See Observer."""
        self._retries_refused.add(1, ticket.endpoint, ticket.backend)

    def ejected(self, event: Ejected) -> None:
        """See Observer."""
        if event.times:
            self._ejections.add(1, event.backend)

    def asked(self, backend: str, outcome: str, seconds: float) -> None:
        """Count a query of which a request router was to be asked."""
        self._asked.add(1, backend, outcome)
        self._asked_seconds.observe(seconds, backend)

    def forget(self, label: str, name: str) -> None:
        """Drop what was counted of an endpoint or backend that is gone."""
        self._registry.forget(label, name)

    def families(self, queries: LoadByEndpoint, mirrored: LoadByEndpoint) -> list[Family]:
        """Return all metrics; given (endpoint, backend) -> (queued, ongoing).

        Counters of failures are 0 before the first, or ``increase()`` would not see that one.
        """
        for endpoint, backend in queries:
            self._queries.ended(endpoint, backend, 500, ())
            self._retried.add(0, endpoint, backend, "died")
            self._retries_refused.add(0, endpoint, backend)
            self._ejections.add(0, backend)
        self._queries.set_load(queries)
        self._mirrored.set_load(mirrored)
        return self._registry.families()


class _Queries:
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
        self._seconds.observe_all(took_s, endpoint, backend)

    def set_load(self, load: LoadByEndpoint) -> None:
        for metric, place in ((self._queued, 0), (self._ongoing, 1)):
            metric.forget(lambda pair: pair not in load)
            for pair, counts in load.items():
                metric.set(counts[place], *pair)


class HostMetrics:
    """Gathers all metrics of one host: the router's, and those of its processes.

    Reading a process costs a few system calls and asks it nothing.
    """

    def __init__(self, records: RunRecords, host_name: str) -> None:
        self._records = records
        self._host = {"host": host_name}
        self._shown = OtherMetrics()
        self._booted_at = _booted_at()
        self._version = version("greenroom")

    def groups(self, router: list[Family]) -> list[Group]:
        """Return all metrics of this host, given the router's."""
        processes = self._records.described()
        self._shown.keep({process for process, _, _ in processes})
        groups: list[Group] = [(self._host, [*router, *self._of_processes(processes)])]
        for process, _, _ in processes:
            for labels, families in self._shown.read(process):
                groups.append(({**labels, **self._host}, families))
        return groups

    def _of_processes(self, processes: list[tuple[Process, str, dict[str, str]]]) -> list[Family]:
        starts = _family("gauge", "start_time_seconds", "When it started, since the epoch")
        cpu = _family("counter", "cpu_seconds_total", "CPU time that it has used")
        memory = _family(
            "gauge", "resident_memory_bytes", "Its memory, with what it shares with others"
        )
        for process, role, more in processes:
            fields = stat_fields(process.pid)
            if fields:
                values = (role, str(process.pid), more.get("tag", ""))
                used = int(fields[_UTIME]) + int(fields[_STIME])
                starts.samples[values] = self._booted_at + int(fields[_START]) / _TICKS_PER_S
                cpu.samples[values] = used / _TICKS_PER_S
                memory.samples[values] = float(int(fields[_RSS]) * _PAGE_BYTES)
        build = Family(
            "greenroom_build_info",
            "gauge",
            "1; its label says which version runs",
            ("version",),
            (),
            {(self._version,): 1.0},
        )
        return [build, starts, cpu, memory]


def _family(kind: Kind, name: str, description: str) -> Family:
    labels = ("role", "pid", "replica")
    return Family(f"greenroom_process_{name}", kind, description, labels, (), {})


def _booted_at() -> float:
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
