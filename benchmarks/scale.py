"""What a change, a reconcile pass and a proxy's update cost as the cluster grows.

The controller's own code (its requests, its core, its checkpoints) in one process, with replicas
and proxies that answer at once: ``python -m benchmarks.scale --svg docs/scale.svg``. The store is
in memory unless ``--disk`` gives a folder. What is told is CPU time, for nothing is waited for and
other work on the machine is not in it; with ``--disk`` it is wall time.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report, scale_plot
from benchmarks.scale_proxy import proxy_updates
from greenroom.actors.controller.requests import Requests
from greenroom.actors.messages import admin as am
from greenroom.core import operations as ops
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.config import ActorOptions, BackendConfig
from greenroom.core.effects import Check, Effect
from greenroom.core.records import BackendRecord, EndpointRecord, Release, ReplicaRecord
from greenroom.persistence.checkpoints import Checkpoints
from greenroom.persistence.filesystem import FileStore
from greenroom.persistence.memory import MemoryStore

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
    ) -> None:
        self.now = 1000.0
        self.clock = clock
        self.hosts = range(hosts)
        self.requests_made = 0
        store: Any = MemoryStore()
        if disk is not None:
            store = FileStore.open(disk / str(backends), namespace="controller")
        self.checkpoints = Checkpoints(store)
        self.checkpoints.save({}, code=[CODE])
        self.cluster = Cluster(_records(backends, replicas), 1, self.now)
        self.requests = Requests(self.cluster, {})
        self.turn()
        for number in range(backends):
            for replica in range(replicas):
                self.report(f"b{number}#{replica}")
        self.answer_checks(self.cluster.advance(self.now, 0.0))  # which tell them their ranks
        self.turn()
        self.cluster.advance(self.now + 2.5, 0.0)  # past its recovery
        for host in self.hosts:
            self.cluster.listeners.listen(host, (1, 1, host), 0)
        self.proxies_take_news()
        self.turn()

    def report(self, tag: str, check_id: int = 0) -> None:
        self.cluster.replica_reported(
            tag,
            self.now,
            state="running",
            address=tag,
            process=(tag, 1),
            config_id=10,
            check_id=check_id,
            ongoing=0,
            error="",
            exception=None,
        )

    def turn(self) -> list[Any]:
        """Do what the controller does in a turn; return the answers."""
        self.cluster.advance(self.now, 0.0)
        changes = self.cluster.take_changes()
        if changes:
            self.checkpoints.save(changes.puts, changes.deletes, code=changes.code.values())
        self.news = self.cluster.long_poll.take_news()
        return self.requests.take_answers()

    def proxies_take_news(self) -> None:
        """Have every proxy say that it holds the newest tables: one message of each."""
        upto = self.cluster.long_poll._last
        for host in self.hosts:
            self.cluster.listeners.listen(host, (1, 1, host), upto)

    def change(self, request: Any, **fields: Any) -> float:
        """Return the seconds from a request to its answer, all proxies' words included."""
        self.requests_made += 1
        made = am.request_of(request(**fields), f"r{self.requests_made}")
        began = self.clock()
        self.requests.take(made, Client())
        answers = self.turn()
        if not answers:
            self.proxies_take_news()
            answers = self.turn()
        seconds = self.clock() - began
        ((_, reply),) = answers
        assert not reply.error_kind, reply
        self.proxies_take_news()
        self.turn()
        return seconds

    def deleted(self) -> float:
        """Return the seconds of deleting a backend that is not used, after it was made."""
        self.change(ops.CreateBackend, tag="gone", code=CODE, code_hash="hash", config={})
        seconds = self.change(ops.DeleteBackend, tag="gone", force=True)
        for replica in list(self.cluster.backends["gone"].replicas):
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
            if isinstance(effect, Check):
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
