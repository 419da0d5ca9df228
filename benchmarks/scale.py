"""What a change, a reconcile pass and a proxy's update cost as the cluster grows.

The controller's own code (its requests, its core, its checkpoints) in one process, with replicas
and proxies that answer at once: ``python -m benchmarks.scale --svg docs/scale.svg``. The store is
in memory unless ``--disk`` gives a folder. It reports CPU time, for nothing is waited for and
other work on the machine is not in it; with ``--disk`` it is wall time.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import report, scale_plot
from benchmarks.scale_proxy import proxy_updates
from greenroom.actors.controller.requests import Requests
from greenroom.actors.messages import admin as am
from greenroom.core import operations as ops
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.config import ActorOptions, BackendConfig
from greenroom.core.effects import CheckReplica, Effect
from greenroom.core.lifecycle.history import CODE_KEPT
from greenroom.core.lifecycle.replicas import Report
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    ApplicationRecord,
    BackendDefinition,
    BackendRecord,
    CanaryRecord,
    EndpointRecord,
    HistoryRecord,
    Release,
    ReplicaRecord,
    backend_definition,
)
from greenroom.core.routing.tables import ROLLOUT_PREFIX
from greenroom.persistence.checkpoints import Checkpoints, code_digest
from greenroom.persistence.filesystem import FileLocation
from greenroom.persistence.kv import MemoryStore

SIZES = (10, 1_000, 10_000)
HOSTS = 500
ROUNDS = 40
CODE = b"code"


class Client:
    """Whoever asks."""

    host = "127.0.0.1"

    @property
    def addressDetails(self) -> Client:
        return self


class Bench:
    """A cluster of so many backends, so many replicas and one endpoint each, that is at rest."""

    def __init__(
        self,
        backends: int,
        hosts: int,
        disk: Path | None,
        clock: Callable[[], float],
        replicas: int = 1,
        more: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.now = time.monotonic() + 1e6  # later than all that requests wait for
        self.clock = clock
        self.hosts = range(hosts)
        self.requests_made = 0
        store: Any = MemoryStore()
        if disk is not None:
            store = FileLocation(disk / str(backends), "controller").open()
        self.checkpoints = Checkpoints(store)
        self.checkpoints.save({("code", code_digest(CODE)): CODE})
        records = _records(backends, replicas)
        for kind, added in (more or {}).items():
            records.setdefault(kind, {}).update(added)
        self.cluster = Cluster(records, 1, self.now)
        self.requests = Requests(self.cluster, {})
        self.turn()
        for number in range(backends):
            for replica in range(replicas):
                self.report(f"b{number}#{replica}")
        self.answer_checks(self.cluster.advance(self.now, 0.0))  # which tell them their ranks
        self.turn()
        self.cluster.advance(self.now + 2.5, 0.0)  # past its recovery
        for host in self.hosts:
            self.cluster.state.long_poll.listen(host, (1, 1, host), 0, host)
        self.proxies_take_updates()
        self.turn()

    def report(self, tag: str, check_id: int = 0) -> None:
        report = Report(
            replica=tag,
            process=(tag, 1),
            state="running",
            queries_at=tag,
            config_id=10,
            check_id=check_id,
        )
        self.cluster.replica_reported(report, self.now)

    def turn(self) -> list[Any]:
        """Do what the controller does in a turn; return the answers."""
        self.cluster.advance(self.now, 0.0)
        changes = self.cluster.take_changes()
        if changes:
            self.checkpoints.save(changes.puts, changes.deletes)
        self.cluster.state.long_poll.take_updates()
        return self.requests.take_answers()

    def proxies_take_updates(self) -> None:
        """Have every proxy say that it holds the newest tables: one message of each."""
        upto = self.cluster.state.long_poll._last
        for host in self.hosts:
            self.cluster.state.long_poll.listen(host, (1, 1, host), upto, host)

    def change(self, request: Any, **fields: Any) -> float:
        """Return the seconds from a request to its answer, all proxies' words included."""
        self.requests_made += 1
        made = am.request_of(request(**fields), f"r{self.requests_made}")
        began = self.clock()
        self.requests.take(made, Client())
        answers = self.turn()
        if not answers:
            self.proxies_take_updates()
            answers = self.turn()
        seconds = self.clock() - began
        ((_, reply),) = answers
        assert not reply.error_kind, reply
        self.proxies_take_updates()
        self.turn()
        return seconds

    def wait_for_goals(self, number: int) -> None:
        """Create so many backends whose replicas never report, and let clients wait for them."""
        for each in range(number):
            fields = {"tag": f"w{each}", "code": CODE, "code_hash": "hash", "config": {}}
            self.requests.take(am.request_of(ops.CreateBackend(**fields), f"w{each}"), Client())
        for _, reply in self.turn():
            wait = ops.WaitForGoal(goal_id=reply.value)
            self.requests.take(am.request_of(wait, f"wait {reply.request_id}"), Client())
        self.turn()

    def roll_out(self) -> str:
        """Begin a rollout that all proxies count for; return the token of its step."""
        rules = {"error_rate": 0.5, "p95_latency_s": 20.0}
        self.change(ops.StartRollout, endpoint="e0", to="b1", hold_s=1e6, abort_if=rules)
        token = ""
        while not token:
            self.turn()
            self.proxies_take_updates()
            token = str(self.cluster.state.long_poll._values.get(f"{ROLLOUT_PREFIX}e0") or "")
        for host in self.hosts:
            self.tally(host, token)
        return token

    def tally(self, host: int, token: str, queries: int = 100) -> float:
        """Return the seconds of a proxy's report for the rollout."""
        counted = {
            tag: (queries, queries // 100, 0, dict.fromkeys(range(20, 60), queries // 40))
            for tag in ("b0", "b1")
        }
        began = self.clock()
        self.cluster.rollouts.reported("e0", token, str(host), counted)
        self.turn()
        return self.clock() - began

    def deleted(self) -> float:
        """Return the seconds of deleting a backend that is not used, after it was made."""
        self.change(ops.CreateBackend, tag="gone", code=CODE, code_hash="hash", config={})
        seconds = self.change(ops.DeleteBackend, tag="gone", force=True)
        for replica in list(self.cluster.state.backends["gone"].replicas):
            self.cluster.replica_exited(replica, self.now)
        self.now += 0.02
        self.turn()
        return seconds

    def idle_pass(self) -> float:
        """Return the seconds of a pass for which there is nothing to do."""
        began = self.clock()
        self.turn()
        return self.clock() - began

    def checks(self) -> float:
        """Return the seconds of the health checks of all replicas; each answer takes a turn."""
        self.now += BackendConfig().health_check_period_s
        began = self.clock()
        self.answer_checks(self.cluster.advance(self.now, 0.0))
        return self.clock() - began

    def answer_checks(self, effects: list[Effect]) -> None:
        """Report of each replica that was asked that it is well."""
        for effect in effects:
            if isinstance(effect, CheckReplica):
                self.report(effect.replica, effect.check_id)
                self.turn()


def _records(backends: int, replicas: int = 1) -> dict[str, dict[str, Any]]:
    config = BackendConfig(num_replicas=replicas).model_dump()
    options = ActorOptions().model_dump()
    digest = hashlib.sha256(CODE).hexdigest()
    release = Release(
        code_hash="hash", code_digest=digest, config=config, actor_options=options, ran=True
    )
    return {
        "backend": {
            f"b{number}": BackendRecord(
                tag=f"b{number}",
                releases=(release,),
                replicas={f"b{number}#{each}": ReplicaRecord() for each in range(replicas)},
            )
            for number in range(backends)
        },
        "endpoint": {
            f"e{number}": EndpointRecord(
                name=f"e{number}",
                route=f"/r{number}",
                methods=("GET",),
                traffic={f"b{number}": 1.0},
                made_with=f"b{number}",
            )
            for number in range(backends)
        },
    }


def _history(definitions: int) -> dict[str, HistoryRecord]:
    """Return as many changes as keep their code, one of which has so many definitions."""
    release = _records(1)["backend"]["b0"].newest
    definition = BackendDefinition(
        code_hash=release.code_hash,
        code_digest=release.code_digest,
        config=release.config,
        actor_options=release.actor_options,
    )
    after = {(BACKEND, f"b{number}"): definition for number in range(definitions)}
    entry = HistoryRecord(
        id=1,
        at=1.0,
        user="",
        address="",
        what="deploy",
        request_id="",
        answer=None,
        before=dict.fromkeys(after),
        after=after,
    )
    return {f"{entry.id:010d}": entry}


def _canaries(number: int) -> dict[str, dict[str, Any]]:
    """Return so many applications whose new versions take over."""
    release = _records(1)["backend"]["b0"].newest
    made: dict[str, dict[str, Any]] = {"backend": {}, "application": {}, "canary": {}}
    for each in range(number):
        name, tag = f"a{each}", f"a{each}#d"
        backend = BackendRecord(tag=tag, releases=(release,), application=name, deployment="d")
        application = ApplicationRecord(
            name=name, ingress="d", route_prefix=None, deployments=("d",)
        )
        made["backend"][tag], made["application"][name] = backend, application
        made["canary"][name] = CanaryRecord(
            application=name,
            wanted={(BACKEND, tag): backend_definition(backend), (APPLICATION, name): application},
            before={},
            settings={},
            endpoint=tag,
            to=f"a{each}~new#d",
            state="taking over",
        )
    return made


def crowded(backends: int, hosts: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return what a turn costs amid what waits, in milliseconds."""

    def median(call: Callable[[int], float]) -> float:
        return statistics.median(call(number) for number in range(ROUNDS)) * 1e3

    def settings(bench: Bench, number: int) -> float:
        return (
            statistics.median(
                bench.change(
                    ops.UpdateBackendConfig, tag="b1", changes={"max_queued_requests": i + 1}
                )
                for i in range(number)
            )
            * 1e3
        )

    waiting = Bench(10, hosts, None, clock)
    waiting.wait_for_goals(backends)
    rolling = Bench(10, backends, None, clock)
    token = rolling.roll_out()
    changed = Bench(10, hosts, None, clock, more={"history": _history(backends)})
    taking_over = Bench(10, hosts, None, clock, more=_canaries(backends))
    return {
        "a pass amid as many goals that clients wait for": median(lambda _: waiting.idle_pass()),
        "a tally of a rollout, with as many proxies": median(
            lambda i: rolling.tally(i % backends, token, 200 + i)
        ),
        # The entry must stay among those whose code is kept.
        "a setting after a deploy of as many": settings(changed, CODE_KEPT - 2),
        "a setting amid as many canaries": settings(taking_over, ROUNDS),
    }


def measure(backends: int, hosts: int, disk: Path | None) -> dict[str, float]:
    """Return what each thing costs, in milliseconds, the median of :data:`ROUNDS`."""
    clock = time.thread_time if disk is None else time.perf_counter
    began = clock()
    bench = Bench(backends, hosts, disk, clock)
    start_ms = (clock() - began) * 1e3
    split = [{"b0": 1.0}, {"b0": 0.5, "b1": 0.5}]
    times = iter(range(1_000_000))

    def median(call: Callable[[int], float]) -> float:
        return statistics.median(call(next(times)) for _ in range(ROUNDS)) * 1e3

    figures = {
        "set_traffic": median(
            lambda i: bench.change(ops.SetTraffic, endpoint="e0", weights=split[(i + 1) % 2])
        ),
        "update_backend_config": median(
            lambda i: bench.change(
                ops.UpdateBackendConfig, tag="b1", changes={"max_queued_requests": i + 1}
            )
        ),
        "create_backend": median(
            lambda i: bench.change(
                ops.CreateBackend, tag=f"n{i}", code=CODE, code_hash="hash", config={}
            )
        ),
        "create_endpoint": median(
            lambda i: bench.change(
                ops.CreateEndpoint, name=f"n{i}", backend="b2", route=f"/n{i}", methods=("GET",)
            )
        ),
        "deploy_deployment": median(
            lambda i: bench.change(
                ops.Deploy,
                spec=ops.DeploymentSpec(name=f"d{i}", code=CODE, code_hash="hash", version="1"),
                route_prefix=f"/d{i}",
            )
        ),
        "delete_endpoint": median(lambda i: bench.change(ops.DeleteEndpoint, name=f"e{9 - i % 5}")),
        "delete_backend": median(lambda _: bench.deleted()),
        "idle pass": median(lambda _: bench.idle_pass()),
    }
    figures["health checks of all"] = bench.checks() * 1e3
    figures["start, recovery included"] = start_ms
    alone = Bench(1, 1, None, clock, replicas=backends)
    figures["health checks of as many replicas of one backend"] = alone.checks() * 1e3
    figures |= proxy_updates(backends, ROUNDS)
    figures |= crowded(backends, hosts, clock)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--disk", type=Path, help="a folder for the store")
    parser.add_argument("--svg", type=Path, help="draw the figures here")
    options = parser.parse_args()
    by_size = {size: measure(size, options.hosts, options.disk) for size in options.sizes}
    print(f"{options.hosts} proxies; {report.machine()}")
    print(report.by_size(by_size))
    if options.svg:
        options.svg.write_text(scale_plot.drawn(by_size), encoding="utf-8")


if __name__ == "__main__":
    main()
