"""Clients: each makes changes to things of its own, and to one that all share.

A client repeats a request, with its id, until it is answered, by the same way as a connection;
it keeps what the answers say has happened, and :mod:`tests.simulation.checks` compares that
with the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from greenroom.actors.controller.requests import FAILED
from greenroom.actors.messages import admin as am
from greenroom.actors.runtime.port import CONTROLLER, Finder, Port
from greenroom.core import operations as ops
from greenroom.core.config import BackendConfig
from tests.simulation.channels import Address
from tests.simulation.links import OUTSIDE, PORT
from tests.simulation.scripted_code import BROKEN, DEADLY, FAILING, FLAKY, MEMORY, PLAIN, SLOW

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

BACKENDS = 3  # of one client
SHARED = "shared"  # the deployment that all clients change
Script = Iterator[Any]  # yields requests, and gets their replies; or seconds to wait


class Client:
    """One client, on one process after the other."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.number = number
        self.simulation = simulation
        self.rng = simulation.world.rng
        self.checks = simulation.checks
        self.endpoint = f"c{number}e"
        self.backends = [f"c{number}b{i}" for i in range(BACKENDS)]
        self.deployment = f"c{number}d"
        self.done = False
        self._codes = 0
        self._requests = 0
        self._pending: am.Request | None = None
        self._goals: list[str] = []
        self._rollout_goals: list[str | None] = []
        self._script = self._work()
        self.process = simulation.spawn("client", OUTSIDE)
        simulation.world.run_as(self.process, self._begin)

    def _begin(self) -> None:
        loop: Any = self.process
        self._port = Port(PORT, self.process.identity, loop, machine=self.simulation.machine)
        gates = [Address(self.simulation.admin_number(n)) for n in range(self.simulation.size)]
        self._controller = Finder(self._port, CONTROLLER, lambda *_: None, gates=lambda: gates)
        self._controller.start()
        self._go_on(None)

    # --- Requests ---------------------------------------------------------------------------------

    def _go_on(self, reply: Any) -> None:
        try:
            wanted = self._script.send(reply)
        except StopIteration:
            self.done = True
            self._controller.stop()
            return
        if isinstance(wanted, float):
            self.process.call_later(wanted, lambda: self._go_on(None))
            return
        self._port.loop.start(self._ask(wanted))

    async def _ask(self, request: ops.Operation) -> None:
        self._requests += 1
        asked = self._pending = am.request_of(request, f"client {self.number}.{self._requests}")
        self.checks.asked(self.number, asked.request_id, request)
        asked_epoch = 0  # of the latest controller that has the request

        def target() -> Address | None:
            nonlocal asked_epoch
            self._controller.doubt()
            if self._controller.found is None:
                return None
            asked_epoch = max(asked_epoch, self._controller.epoch)
            return self._controller.found[0]

        def is_final(reply: am.RequestReply, sender: Address) -> bool:
            if reply.error_kind == "StateNotSavedError":  # its repeat, some time later, is the same
                if self._controller.is_latest(sender, asked_epoch):
                    self.checks.not_saved(request, reply)
                return False
            if reply.error_kind == "StateNotReadableError":  # a later repeat is answered
                self.checks.counts["not readable"] += 1
                return False
            if reply.error.startswith(FAILED):  # nor is it known here whether it was made
                self.checks.counts["request failed with its turn"] += 1
                return False
            return True

        reply = await self._port.ask(target, asked, None, is_final)
        self._pending = None
        self._answered(request, reply)

    def _answered(self, request: ops.Operation, reply: am.RequestReply) -> None:
        self.checks.answered(self.number, request, reply)
        if isinstance(request, ops.StartRollout):  # it may go on for as long as it is let
            self._rollout_goals.append(reply.value)
        elif isinstance(reply.value, str):
            self._goals.append(reply.value)
        elif isinstance(request, ops.UndoChange) and not reply.error_kind:
            self._goals.append(reply.value["goal"])
        self._go_on(reply)

    # --- What it asks for -------------------------------------------------------------------------

    def _work(self) -> Script:
        steps: list[Callable[[], Script]] = [
            self._create,
            self._create,
            self._update,
            self._delete,
            self._name,
            self._split,
            self._split,
            self._shadow,
            self._shadow,
            self._check,
            self._name,
            self._unname,
            self._deploy,
            self._deploy,
            self._undeploy,
            self._share,
            self._roll_out,
            self._roll_out,
            self._roll_out,
            self._end_rollout,
            self._undo,
            self._undo,
            self._await_goal,
            self._await_goal,
        ]
        for step in (self._create, self._create, self._name, self._deploy):
            yield from step()
        while not self.simulation.quiet:
            yield from self.rng.choice(steps)()
            if self.rng.random() < 0.5:
                yield self.rng.expovariate(1.0)
        if self.rng.random() < 0.3:
            yield from self._leave()
        yield from self._end_rollout()
        while self._goals:
            yield from self._await_goal()

    def _leave(self) -> Script:
        yield ops.DeleteEndpoint(name=self.endpoint)
        yield ops.DeleteDeployment(name=self.deployment)
        for tag in self.backends:
            yield ops.DeleteBackend(tag=tag, force=self.rng.random() < 0.3)

    def _tag(self, *, there: bool) -> str:
        """Pick a backend, mostly one that is there, or is not."""
        owned = self.checks.owned(self.number).backends
        fitting = [tag for tag in self.backends if (tag in owned) == there]
        return self.rng.choice(fitting if fitting and self.rng.random() < 0.9 else self.backends)

    def _code(self) -> bytes:
        self._codes += 1
        kind = self.rng.choice([PLAIN, PLAIN, PLAIN, SLOW, FLAKY, DEADLY, BROKEN, FAILING])
        return kind + b" %d.%d" % (self.number, self._codes)

    def _settings(self) -> BackendConfig:
        rng = self.rng
        given = {
            "num_replicas": rng.randint(1, 3),
            "user_config": rng.choice([None, {"x": rng.randint(0, 9)}]),
            "max_ongoing_requests": rng.choice([1, 2, 3, 4, 12]),
            "max_queued_requests": rng.choice([-1, -1, -1, 0, 2]),
            "request_timeout_s": rng.choice([None, 3.0]),
            "graceful_shutdown_timeout_s": rng.choice([0.0, 0.5, 5.0]),
            "health_check_period_s": rng.choice([0.5, 3.0]),
            "health_check_timeout_s": rng.choice([1.0, 5.0]),
            "max_constructor_retry_count": rng.choice([2, 5]),  # more take minutes
            "max_memory_bytes": rng.choice([None, 2 * MEMORY]),
        }
        return BackendConfig(**given)

    def _create(self) -> Script:
        tag, code = self._tag(there=False), self._code()
        yield ops.CreateBackend(
            tag=tag,
            code=code,
            code_hash=f"hash of {code.decode()}",
            config=self._settings(),
        )

    def _update(self) -> Script:
        settings = self._settings()
        fields = self.rng.sample(["num_replicas", "user_config", "max_ongoing_requests"], 2)
        yield ops.UpdateBackendConfig(
            tag=self._tag(there=True),
            changes={field: getattr(settings, field) for field in fields},
        )

    def _delete(self) -> Script:
        force = self.rng.random() < 0.3
        yield ops.DeleteBackend(tag=self._tag(there=True), force=force)

    def _name(self) -> Script:
        yield ops.CreateEndpoint(
            name=self.endpoint,
            backend=self._tag(there=True),
            route=f"/{self.endpoint}",
            methods=("GET", "POST"),
        )

    def _split(self) -> Script:
        some = sorted({self._tag(there=True) for _ in range(self.rng.randint(1, 3))})
        weights = dict.fromkeys(some, 1.0 / len(some))
        if len(some) > 1 and self.rng.random() < 0.3:
            weights |= {some[0]: 0.0, some[1]: weights[some[1]] + weights[some[0]]}
        yield ops.SetTraffic(endpoint=self.endpoint, weights=weights)

    def _shadow(self) -> Script:
        yield ops.ShadowTraffic(
            endpoint=self.endpoint,
            backend=self._tag(there=True),
            proportion=self.rng.choice([0.0, 0.5, 1.0]),
            compare=self.rng.choice([None, {"how": "status"}, {"how": "json"}]),
        )

    def _check(self) -> Script:
        yield ops.GetDifferences(endpoint=self.endpoint)

    def _unname(self) -> Script:
        yield ops.DeleteEndpoint(name=self.endpoint)

    def _deploy(self) -> Script:
        yield self._deploying(self.deployment, self._code(), None)

    def _deploying(self, name: str, code: bytes, prev_version: str | None) -> ops.Deploy:
        spec = ops.DeploymentSpec(
            name=name,
            code=code,
            code_hash=f"hash of {code.decode()}",
            version=code.decode(),
            config=self._settings(),
        )
        return ops.Deploy(spec=spec, route_prefix=f"/{name}", prev_version=prev_version)

    def _undeploy(self) -> Script:
        yield ops.DeleteDeployment(name=self.deployment)
        if self.rng.random() < 0.5:  # while the replicas of the old one are about to go
            yield from self._deploy()

    def _share(self) -> Script:
        """Change what others change too, on top of what is there."""
        reply = yield ops.GetDeployment(name=SHARED)
        version = None if reply.error_kind else reply.value["version"]
        self._codes += 1
        code = b"plain %d.%d" % (self.number, self._codes)
        yield self._deploying(SHARED, code, version)

    def _roll_out(self) -> Script:
        rng = self.rng
        rules = [{"error_rate": 0.2}, {"error_rate_increase": 0.0}, {"p95_latency_s": 1.0}]
        some = rng.sample(rules, rng.randint(1, 2))
        yield ops.StartRollout(
            endpoint=self.endpoint,
            to=self._tag(there=True),
            steps=rng.choice([(0.37, 1.0), (0.13, 0.61, 1.0), (1.0,)]),
            hold_s=rng.choice([0.2, 1.0, 3.0]),
            abort_if={name: limit for rule in some for name, limit in rule.items()},
            alpha=rng.choice([0.01, 0.5]),
            min_samples=rng.choice([1, 3]),
            ready_timeout_s=rng.choice([1.0, 10.0]),
        )
        if rng.random() < 0.7:
            yield rng.uniform(1.0, 5.0)

    def _end_rollout(self) -> Script:
        kind = self.rng.choice([ops.AbortRollout, ops.AbortRollout, ops.PromoteRollout])
        yield kind(endpoint=self.endpoint)
        self._goals += [goal for goal in self._rollout_goals if goal is not None]
        self._rollout_goals.clear()

    def _undo(self) -> Script:
        """Undo one of the last changes of things of its own."""
        reply = yield ops.ListHistory()
        mine = [
            entry["id"]
            for entry in reply.value
            if all(change["name"].startswith(f"c{self.number}") for change in entry["changes"])
        ]
        if mine:
            yield ops.UndoChange(change_id=self.rng.choice(mine[-6:]))

    def _await_goal(self) -> Script:
        if self._goals:
            yield ops.WaitForGoal(goal_id=self._goals.pop())
