"""Runs of the checker: a cluster, clients on each host, faults meanwhile, and the verdict after."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.checker import clients, defects
from tests.checker.faults import HEALED_S, Faults
from tests.checker.histories import UNKNOWN, History, Journal, read_history
from tests.checker.judge import violations
from tests.support.cluster import Cluster, ClusterHost, cluster_of
from tests.support.namespaces import Host

QUIET_S = 1.0  # at the end of a round, without faults
ENDPOINTS = 3


@dataclass(kw_only=True)
class Plan:
    """What a run is to be."""

    folder: Path
    hosts: int = 1
    seed: int = 1
    round_s: float = 30.0
    connections: int = 6  # of HTTP clients, on each host
    changers: int = 2
    pause_s: float = 0.02  # of an HTTP client, between two requests
    fault_pause_s: float = 1.5
    faults: tuple[str, ...] = ()  # which kinds; all
    roles: tuple[str, ...] = ()  # of processes that are killed and stopped; all
    healed_s: float = HEALED_S
    planted: str = ""  # of .defects


@dataclass(kw_only=True)
class Verdict:
    """What became of a round."""

    history: History
    faults: list[str]
    violations: list[str] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        """Return how much there was of each kind."""
        history = self.history
        return Counter(
            {
                "changes and reads": len(history.operations),
                "of them without an answer": sum(o.outcome == UNKNOWN for o in history.operations),
                "requests": len(history.requests),
                "answered by a version": sum(each.status == 200 for each in history.requests),
                "faults": len(self.faults),
                "violations": len(self.violations),
            }
        )


class Run:
    """A cluster to have rounds on; use :func:`running`."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self._cluster, self._plan = cluster, plan
        self._environ = {"GREENROOM_HTTP_WORKERS": "2" if plan.hosts == 1 else "1"}
        if plan.planted:
            self._environ |= defects.planted(plan.planted, cluster.folder)
        self._faults = Faults(
            cluster,
            plan.seed,
            self._start,
            self._begin_clients,
            kinds=plan.faults,
            roles=plan.roles,
            healed_s=plan.healed_s,
        )
        self._clients: dict[str, Host] = {}  # by host
        self.rounds = self._begun = 0

    def _start(self, host: ClusterHost) -> None:
        host.start(**self._environ)

    def begin(self) -> None:
        """Start all hosts, and make the versions."""
        for host in self._cluster.hosts:
            self._start(host)
        self._runs_folder = self._cluster.folder / "runs"
        self._runs_folder.mkdir()
        first = self._cluster.hosts[0]
        self._on(first).call(
            clients.make_backends, first.environ, self._runs_folder, self._plan.hosts + 1
        )

    def _on(self, host: ClusterHost) -> Host:
        """Return the process of a host's clients."""
        if host.label not in self._clients:
            self._clients[host.label] = host.another()
            self._faults.spared.add(self._clients[host.label].pid)
        return self._clients[host.label]

    def _begin_clients(self, host: ClusterHost) -> None:
        self._clients.pop(host.label, None)  # it has died with the host
        self._begun += 1
        plan = self._plan
        work = clients.Work(
            name=f"{host.label}{self._begun}",
            host=host.label,
            port=int(host.environ["GREENROOM_HTTP_PORT"]),
            environ=host.environ,
            folder=self._folder,
            endpoints=tuple(f"r{self.rounds}e{number}" for number in range(ENDPOINTS)),
            changers=plan.changers,
            connections=plan.connections,
            pause_s=plan.pause_s,
            seed=plan.seed,
        )
        self._on(host).call(clients.begin, work)

    def round(self) -> Verdict:
        """Have clients at work and faults for so long; return what is wrong with the history."""
        self.rounds += 1
        self._folder = self._cluster.folder / f"round-{self.rounds}"
        self._folder.mkdir()
        begun_at = time.monotonic()  # the first clients ask before the last have begun
        for host in self._cluster.hosts:
            self._begin_clients(host)
        until = begun_at + self._plan.round_s
        journal = Journal(self._folder / "isolations")
        faults = list(self._faults.run(journal, until, self._plan.fault_pause_s))
        journal.close()
        are_back = self._faults.has_healed and self._faults.heal()
        found = [] if are_back else [f"not all hosts run again: {self._faults.trouble}"]
        time.sleep(QUIET_S)
        for label, host in list(self._clients.items()):
            host.call(clients.end)
            host.end()
            del self._clients[label]
        history = read_history(self._folder, self._runs_folder, clients.LIMIT)
        history.runs = [each for each in history.runs if each.ended_at > begun_at]
        return Verdict(history=history, faults=faults, violations=found + violations(history))


@contextlib.contextmanager
def running(plan: Plan) -> Iterator[Run]:
    """Make a cluster, of which two hosts may lead if there are three."""
    with cluster_of(plan.hosts, plan.folder, leaders=2 if plan.hosts > 1 else 0) as cluster:
        run = Run(cluster, plan)
        run.begin()
        yield run
