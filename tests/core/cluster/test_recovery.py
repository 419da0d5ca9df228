"""Whatever dies whenever, the cluster comes to what was asked for, and nothing is left behind."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from greenroom.core.cluster import status
from greenroom.core.errors import ConflictError
from greenroom.core.lifecycle.history import CODE_KEPT, digests as digests_of_entry
from greenroom.core.lifecycle.shown import table_of
from tests.core import requests as ask
from tests.core.worlds import BROKEN, CrashError, World

BACKENDS = st.sampled_from(["a", "b"])
REPLICAS = st.integers(1, 3)
CODES = st.sampled_from([b"one", b"two", b"three", BROKEN])
POINTS = st.sampled_from(["before save", "after save", "amid effects"])


class CrashingCluster(RuleBasedStateMachine):
    """Requests, deaths and restarts in any order; :meth:`at_rest` says what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(proxies=2)
        self.backends: dict[str, int] = {}  # acknowledged: tag -> replicas
        self.endpoints: dict[str, str] = {}
        self.app: tuple[bytes, int] | None = None  # the code asked for last, and its replicas

    # --- Requests -------------------------------------------------------------------------------

    @rule(tag=BACKENDS, replicas=REPLICAS)
    def create_or_scale(self, tag: str, replicas: int) -> None:
        change = ask.update if tag in self.backends else ask.create
        if tag not in self.backends and tag in self.world.cluster.state.backends:
            return  # still being deleted
        self.world.change(change(tag, num_replicas=replicas))
        self.backends[tag] = replicas

    @precondition(lambda self: self.backends)
    @rule(tag=BACKENDS, force=st.booleans())
    def delete_backend(self, tag: str, force: bool) -> None:
        if tag in self.backends and tag not in self.endpoints.values():
            self.world.change(ask.delete(tag, force=force))
            del self.backends[tag]

    @precondition(lambda self: self.backends)
    @rule(name=st.sampled_from(["x", "y"]), tag=BACKENDS)
    def put_endpoint(self, name: str, tag: str) -> None:
        if tag not in self.backends:
            return
        if name in self.endpoints:
            self.world.change(ask.traffic(name, {tag: 1.0}))
        else:
            self.world.change(ask.endpoint(name, tag, route=f"/{name}"))
        self.endpoints[name] = tag

    @rule(name=st.sampled_from(["x", "y"]))
    def delete_endpoint(self, name: str) -> None:
        self.world.change(ask.unname(name))
        self.endpoints.pop(name, None)

    @rule(code=CODES, replicas=REPLICAS)
    def deploy(self, code: bytes, replicas: int) -> None:
        self.world.change(ask.version(code, num_replicas=replicas))
        self.app = (code, replicas)

    @rule()
    def delete_application(self) -> None:
        self.world.change(ask.undeploy("app"))
        self.app = None

    @rule(back=st.integers(0, 3))
    def undo(self, back: int) -> None:
        entries = list(self.world.cluster.state.history)
        if len(entries) <= back:
            return
        entry = entries[-1 - back]
        try:
            self.world.change(ask.undo(entry.id))
        except ConflictError:
            return
        for (kind, name), definition in entry.before.items():
            if kind == "endpoint" and "#" not in name:
                self.endpoints.pop(name, None)
                if definition is not None:
                    self.endpoints[name] = next(iter(definition.traffic))
            elif kind == "backend" and "#" not in name:
                self.backends.pop(name, None)
                if definition is not None:
                    self.backends[name] = definition.config["num_replicas"]
            elif kind == "backend":
                self.app = None
                if definition is not None:
                    code = self.world.code[definition.code_digest]
                    self.app = (code, definition.config["num_replicas"])

    # --- Deaths ---------------------------------------------------------------------------------

    @rule(point=POINTS)
    def crash_soon(self, point: str) -> None:
        self.world.crash_at = point

    @rule()
    def crash(self) -> None:
        self.world.boot()

    @rule(index=st.integers(0, 9))
    def kill_replica(self, index: int) -> None:
        tags = list(self.world.processes)
        if tags:
            self.world.die(tags[index % len(tags)])

    @rule(index=st.integers(0, 9))
    def freeze_replica(self, index: int) -> None:
        running = [p for p in self.world.processes.values() if p.state == "running"]
        if running:
            running[index % len(running)].stuck = True

    @rule(index=st.integers(0, 1))
    def restart_proxy(self, index: int) -> None:
        self.world.restart_proxy(index)

    # --- Time -----------------------------------------------------------------------------------

    @rule()
    def deliver(self) -> None:
        self.world.deliver()

    @rule(seconds=st.floats(0.0, 8.0))
    def pass_time(self, seconds: float) -> None:
        try:
            self.world.now += seconds
            self.world.turn()
        except CrashError:
            pass
        self.world.work()

    @rule()
    def come_to_rest(self) -> None:
        self.at_rest()

    def teardown(self) -> None:
        self.at_rest()

    # --- What must hold -------------------------------------------------------------------------

    def at_rest(self) -> None:
        world = self.world
        world.crash_at = None
        world.thaw()
        world.converge(400.0)
        expected = dict(self.backends)
        if self.app is not None:
            expected |= self.application_expected(*self.app)
        assert set(world.cluster.state.backends) == set(expected)
        for tag, replicas in expected.items():
            if not world.cluster.state.backends[tag].record.failure:
                assert len(world.running(tag)) == replicas
            for process in world.running(tag):
                assert process.config_id == world.records["backend"][tag].newest.config_id
        self.check_tables()
        self.check_saved()

    def application_expected(self, code: bytes, replicas: int) -> dict[str, int]:
        backend = self.world.cluster.state.backends["app#d"]
        record = backend.record
        if code.startswith(BROKEN):
            assert record.failure or record.update_failure
            assert record.exception == b"pickled boom"
        else:
            assert (record.failure, record.update_failure) == ("", "")
            assert record.newest.config["num_replicas"] == replicas
        if not record.failure:
            running = {process.code for process in self.world.running("app#d")}
            assert running == {self.world.code[record.newest.code_digest]}
            assert BROKEN not in running
        assert len(record.releases) == 1
        return {"app#d": record.newest.config["num_replicas"]}

    def check_tables(self) -> None:
        world = self.world
        traffic = {name: {tag: 1.0} for name, tag in self.endpoints.items()}
        if self.app is not None:
            traffic["app#d"] = {"app#d": 1.0}
        for proxy in world.proxies:
            held = {
                key.removeprefix("endpoint/"): table.traffic
                for key, table in proxy.tables.items()
                if key.startswith("endpoint/")
            }
            assert held == traffic
            for tag in world.cluster.state.backends:
                table = proxy.tables[f"backend/{tag}"]
                assert {r.process for r in table.replicas} == set(world.running(tag))

    def check_saved(self) -> None:
        world = self.world
        before = self.picture()
        digests = {record.newest.code_digest for record in world.records["backend"].values()}
        for entry in list(world.cluster.state.history)[-CODE_KEPT:]:
            digests |= digests_of_entry(entry)
        assert set(world.code) == digests
        world.boot()
        world.converge()
        assert self.picture() == before

    def picture(self) -> Any:
        cluster = self.world.cluster
        applications = status.applications(cluster)
        for application in applications.values():
            for deployment in application["deployments"].values():
                deployment.pop("restarts", None)  # a controller's own count
        shown = [applications, status.endpoints(cluster)]
        shown.append({t: table_of(b) for t, b in cluster.state.backends.items()})
        shown.append(status.goals(cluster))
        return shown


TestCrashingCluster = CrashingCluster.TestCase
TestCrashingCluster.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
