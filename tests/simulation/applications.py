"""An application of two deployments that call each other: its deploys, its canaries, its answers.

The ingress, ``front``, answers a query with what ``inner`` says, which it calls as handles do:
within its own application, or the candidate's where it is of one. What must hold: an acknowledged
deploy is on disk, a canary that goes back leaves the version that there was with all traffic, one
whose every query fails is never promoted, and no query is answered by two versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from greenroom.actors.caller.caller import Caller
from greenroom.actors.messages import admin as am, queries as m
from greenroom.actors.runtime.port import PROXY, Finder, Port
from greenroom.core import operations as ops
from greenroom.core.config import BackendConfig
from greenroom.core.operations import Canary
from greenroom.core.records import served_as
from greenroom.core.rollouts.canaries import ROLLING_OUT, WENT_BACK
from tests.simulation.clients import Client, Script
from tests.simulation.links import PORT
from tests.simulation.scripted_code import COMPOSED, FAILING, PLAIN

if TYPE_CHECKING:
    from tests.simulation.checks import Checks
    from tests.simulation.world import SimProcess

APP = "app"
FRONT, INNER = f"{APP}#front", f"{APP}#inner"
CHECK_S = 0.5


def is_of_application(name: str) -> bool:
    """Return whether a backend, or an endpoint, is the application's, or its candidate's."""
    return served_as(name.partition("#")[0]) == APP


class Deployer(Client):
    """Deploys one version of the application after the other, some as canaries."""

    def _work(self) -> Script:
        version = 0
        while not self.simulation.quiet:
            version += 1
            canary = self._canary() if self.rng.random() < 0.8 else None
            kind = FAILING if canary and self.rng.random() < 0.4 else COMPOSED
            reply = yield self._deploying(kind, version, canary)
            if reply.error_kind:
                continue
            yield self.rng.uniform(0.5, 3.0)
            if (
                canary and self.rng.random() < 0.5
            ):  # else by what its rules find, while there are queries
                yield from self._end()
            yield from self._ended(reply.value["goals"].get(APP))

    def _ended(self, goal: str | None) -> Script:
        """Wait for a goal; without queries, as in the end, no rule lets a canary go on."""
        while goal is not None:
            canary = self.checks.on_disk.get(("canary", APP))
            if canary is None or canary.state != ROLLING_OUT:
                yield ops.WaitForGoal(goal_id=goal)
                return
            if self.simulation.quiet:
                yield from self._end()
            yield CHECK_S

    def _end(self) -> Script:
        kind = self.rng.choice([ops.AbortRollout, ops.PromoteRollout])
        yield kind(endpoint=FRONT)

    def _deploying(
        self, kind: bytes, version: int, canary: Canary | None
    ) -> ops.DeployApplications:
        config = BackendConfig(num_replicas=self.rng.randint(1, 2), health_check_period_s=3.0)
        specs = tuple(
            ops.DeploymentSpec(name=name, code=code, code_hash=code.decode(), config=config)
            for name, code in (
                ("front", kind + b" front %d" % version),
                ("inner", PLAIN + b" inner %d" % version),
            )
        )
        application = ops.ApplicationSpec(
            name=APP, ingress="front", route_prefix=f"/{APP}", deployments=specs
        )
        return ops.DeployApplications(applications=(application,), keep_others=True, canary=canary)

    def _canary(self) -> Canary:
        compare = self.rng.choice([None, None, {"how": "status"}])
        differences = {} if compare is None else {"difference_rate": 0.3}
        return Canary(
            steps=self.rng.choice([(0.2, 1.0), (0.5, 1.0), (1.0,)]),
            hold_s=self.rng.choice([0.2, 1.0]),
            abort_if={"error_rate": 0.4} | differences,
            min_samples=self.rng.choice([1, 5]),
            ready_timeout_s=10.0,
            compare=compare,
        )


class ApplicationChecks:
    """Follows the application from save to save, and its answers."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._versions: dict[str, str] = {}  # by the code's digest
        self._ran: dict[str, str] = {}  # by query of an inner deployment: the last version
        self._stable = ""  # the version, while nothing changes it

    def asked(self, request: ops.DeployApplications) -> None:
        """The deployer is about to ask for this."""
        for spec in request.applications[0].deployments:
            self._versions[hashlib.sha256(spec.code).hexdigest()] = spec.code.decode()

    def saved(self, before: Mapping[tuple[str, str], Any]) -> None:
        """Some things have changed, which were so before."""
        for key, record in before.items():
            now = self._checks.on_disk.get(key)
            if key in {("backend", FRONT), ("backend", INNER)}:
                if record is None or now is None or record.newest != now.newest:
                    self._stable = ""
            elif key == ("canary", APP) and now is not None and now.state != WENT_BACK:
                fails = self._wanted(now, FRONT).startswith(FAILING.decode())
                is_judged = len(now.settings["steps"]) > 1 and now.state != ROLLING_OUT
                asked = "by request" in self._checks.on_disk["rollout", FRONT].reason
                message = f"every query of the new version fails, and it takes over: {now}"
                self._checks.expect(asked or not (fails and is_judged), message)
                self._checks.counts[f"canary {now.state}"] += (
                    record is None or record.state != now.state
                )

    def answered(self, request: ops.Operation, reply: am.RequestReply) -> None:
        """The deployer has its answer: what it was answered is on disk."""
        if not isinstance(request, ops.DeployApplications) or reply.error_kind:
            return
        canary = self._checks.on_disk.get(("canary", APP))
        for spec, name in zip(request.applications[0].deployments, (FRONT, INNER), strict=True):
            wanted = spec.code.decode()
            is_there = wanted in {self._version(name), self._wanted(canary, name)}
            self._checks.expect(is_there, f"{wanted} was acknowledged, and {canary} is on disk")

    def goal_ended(self, reply: am.RequestReply) -> None:
        """The deployer hears that a deploy has succeeded, or failed."""
        canary = self._checks.on_disk.get(("canary", APP))
        endpoint = self._checks.on_disk["endpoint", FRONT]
        is_own = dict(endpoint.traffic) == {FRONT: 1.0}
        self._checks.expect(is_own, f"a deploy has ended with {reply}, and {endpoint}")
        front, inner = self._version(FRONT), self._version(INNER)
        if not reply.error_kind:
            is_pair = front.split()[2] == inner.split()[2]
            self._checks.expect(is_pair, f"a deploy has succeeded, with {front} and {inner}")
            self._stable = front.split()[2]
        elif canary is not None:
            self._checks.expect(canary.state == WENT_BACK, f"{reply}: {canary}")
            self._checks.counts["canary went back"] += 1

    def _version(self, name: str) -> str:
        record = self._checks.on_disk.get(("backend", name))
        return "" if record is None else self._versions[record.newest.code_digest]

    def _wanted(self, canary: Any, name: str) -> str:
        return "" if canary is None else self._versions[canary.wanted["backend", name].code_digest]

    # --- Answers ----------------------------------------------------------------------------------

    def ran(self, uid: str, digest: str) -> None:
        """An inner deployment runs a query."""
        if digest in self._versions:
            self._ran[uid] = self._versions[digest].split()[2]

    def composer(self, process: SimProcess, digest: str) -> Composer:
        return Composer(self._checks, process, self._versions[digest].split()[2])

    def begun(self) -> str:
        """Return what :meth:`composed` wants to know of when the query began."""
        return self._stable

    def composed(self, composer: Composer, uid: str, stable: str) -> None:
        """The ingress has the answer of the other deployment."""
        mine, other = composer.version, self._ran[uid]
        is_stable = mine == stable == self._stable
        if composer.is_candidate or is_stable:  # deploys in place may mix versions meanwhile
            message = f"{composer.application} of version {mine} is answered by {other}"
            self._checks.expect(mine == other or composer.is_lost(), message)
            self._checks.counts["composed answer"] += 1


class Composer:
    """What a handle is for the ingress' code: it calls the inner deployment of its application."""

    def __init__(self, checks: Checks, process: SimProcess, version: str) -> None:
        self.version = version
        self.application = process.actor.tag.partition("#")[0]
        self.is_candidate = self.application != APP
        self._checks = checks
        self._process = process
        loop: Any = process
        # Beside that of the replica's handles, as user code connects to the system itself.
        identity = process.identity._replace(incarnation=f"{process.identity.incarnation}+")
        port = Port(PORT, identity, loop, machine=checks.simulation.machine)
        self._caller = caller = Caller(port.loop, identity)
        caller.listen(port.on)
        Finder(port, PROXY, caller.met_proxy, caller.proxy_gone).start()

    def is_lost(self) -> bool:
        """Return whether the host may be cut off, with tables of before."""
        return self._checks.is_lost(self._process)

    def call(self, answered: Callable[[bool], None]) -> None:
        """Ask the inner deployment; ``answered`` gets whether it has answered."""
        query_id = self._caller.next_id()
        uid = f"{self._process.pid}.{query_id}"
        query = m.Query(
            id=query_id,
            endpoint=f"{self.application}#inner",
            path="/",
            http_method="",
            call_method="",
            call=uid.encode(),
            request_id=uid,
            timeout_s=5.0,
            retryable=True,
            shard_key=None,
        )
        applications = self._checks.applications
        stable = applications.begun()

        def done(answer: Any) -> None:
            self._checks.queries.answered(uid, answer)
            is_answer = isinstance(answer, m.ValueAnswer)
            if is_answer:
                applications.composed(self, uid, stable)
            answered(is_answer)

        self._checks.queries.submitted(uid, query, self._process)
        self._caller.submit(query, done)
