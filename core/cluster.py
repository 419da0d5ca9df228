"""The whole hard state and its reconciliation: what the controller decides.

Theory of operation. A request validates first and changes records only then, so a refused request
changes nothing. Observations change soft state only. :meth:`Cluster.advance` brings what was
touched or is due one step nearer to what is wanted. The shell then saves
:meth:`Cluster.take_changes`, and only after that performs the effects, pushes the news and answers:
whatever anybody has seen is on disk.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from understudy.core import applications
from understudy.core.backends import Backend
from understudy.core.changes import Changes
from understudy.core.config import ActorOptions, BackendConfig, validated
from understudy.core.effects import Effect
from understudy.core.endpoints import (
    check_free,
    check_methods,
    check_route,
    check_traffic,
    table_of,
    users_of,
)
from understudy.core.errors import ConflictError, InvalidRequestError, UnknownNameError
from understudy.core.goals import Goals, Progress, Subject
from understudy.core.long_poll import LongPoll
from understudy.core.names import MAX_TAG_BYTES, wrong_with
from understudy.core.records import ApplicationRecord, BackendRecord, EndpointRecord, GoalRecord
from understudy.core.tables import BACKEND_PREFIX, ENDPOINT_PREFIX, BackendTable

RECOVERY_S = 2.0  # how long a new controller waits for replicas before it talks to proxies
MIN_STEP_S = 0.01  # between two looks at a backend for which nothing has happened


class Cluster:
    """Backends, endpoints, applications and goals. ``now`` is always monotonic seconds."""

    def __init__(self, records: Mapping[str, Mapping[str, Any]], epoch: int, now: float) -> None:
        self.endpoints: dict[str, EndpointRecord] = dict(records.get("endpoint", {}))
        self.applications: dict[str, ApplicationRecord] = dict(records.get("application", {}))
        self.goals = Goals(records.get("goal", {}))
        self.backends = {
            tag: Backend(record, now) for tag, record in records.get("backend", {}).items()
        }
        self._by_replica = {r: tag for tag, b in self.backends.items() for r in b.replicas}
        self._recovering = {tag for tag, b in self.backends.items() if not b.recovered}
        self._recovery_ends_at = now + RECOVERY_S
        self._releasing: set[str] = set()  # backends with replicas that proxies have to let go
        self.long_poll = LongPoll(epoch, closed=bool(self._recovering))
        self._touched = set(self.backends)
        self._touched_applications = set(self.applications)
        self._due: list[tuple[float, str]] = []
        self._due_at: dict[str, float] = {}
        self._changes = Changes()
        self.lost_code: set[str] = set()  # digests that the store was asked for in vain
        for name, endpoint in self.endpoints.items():
            self.long_poll.publish(ENDPOINT_PREFIX + name, table_of(endpoint))

    # --- Requests: backends ---------------------------------------------------------------------

    def create_backend(
        self,
        tag: str,
        *,
        code: bytes,
        code_hash: str,
        config: Mapping[str, Any],
        actor_options: Mapping[str, Any],
        version: str | None,
        wall_now: float,
    ) -> str | None:
        """Run code under a tag; the same call again is a no-op, another one a ConflictError."""
        if wrong := wrong_with(tag, MAX_TAG_BYTES):
            raise InvalidRequestError(f"backend tag {tag!r}: {wrong}")
        settings = validated(BackendConfig, config)
        options = validated(ActorOptions, actor_options)
        present = self.backends.get(tag)
        if present is not None and not present.record.deleting:
            record = present.record
            made_of = (record.code_hash, present.config, record.actor_options)
            if made_of != (code_hash, settings, options.model_dump()):
                raise ConflictError(
                    f"backend {tag!r} exists with other code or settings; use "
                    "update_backend_config, or delete it first"
                )
            self.keep_code(record, code)
            if not record.failure:
                return self.goals.pending_for(("backend", tag))
            present.try_again()
            self.touch(tag)
            return self.goals.create(("backend", tag), "create backend", wall_now)
        if present is not None:
            raise ConflictError(f"backend {tag!r} is being deleted; wait for that goal first")
        record = BackendRecord(
            tag=tag,
            code_hash=code_hash,
            code_digest=hashlib.sha256(code).hexdigest(),
            config=settings.model_dump(),
            actor_options=options.model_dump(),
            version=version,
        )
        self.add_backend(record, code)
        return self.goals.create(("backend", tag), "create backend", wall_now)

    def update_backend_config(
        self, tag: str, changes: Mapping[str, Any], wall_now: float
    ) -> str | None:
        """Change the given settings; the goal is reached when every replica has them."""
        backend = self._backend(tag)
        if not backend.set_config(backend.config.updated(changes)):
            return self.goals.pending_for(("backend", tag))
        self.touch(tag)
        return self.goals.create(("backend", tag), "update backend config", wall_now)

    def delete_backend(self, tag: str, *, force: bool, wall_now: float) -> str | None:
        """Stop and forget a backend; ConflictError naming the endpoints that use it."""
        backend = self.backends.get(tag)
        if backend is None:
            return None
        users = users_of(self.endpoints, tag)
        if users:
            raise ConflictError(
                f"backend {tag!r} has traffic of endpoint {', '.join(users)}; delete the endpoint "
                "or set its traffic elsewhere first"
            )
        if backend.record.application:
            raise ConflictError(
                f"backend {tag!r} belongs to application {backend.record.application!r}; delete "
                "or redeploy that"
            )
        if backend.record.deleting and (backend.record.force or not force):
            return self.goals.pending_for(("backend", tag))
        backend.delete(force=force)
        self.touch(tag)
        return self.goals.create(("backend", tag), "delete backend", wall_now)

    def backend_config(self, tag: str) -> dict[str, Any]:
        """Return a backend's settings."""
        return self._backend(tag).config.model_dump()

    # --- Requests: endpoints --------------------------------------------------------------------

    def create_endpoint(
        self, name: str, *, backend: str, route: str | None, methods: tuple[str, ...]
    ) -> None:
        """Name a backend; the same call again is a no-op, another one a ConflictError."""
        if wrong := wrong_with(name, MAX_TAG_BYTES):
            raise InvalidRequestError(f"endpoint name {name!r}: {wrong}")
        record = EndpointRecord(
            name=name,
            route=check_route(route),
            methods=check_methods(methods),
            traffic={backend: 1.0},
        )
        self._backend(backend)
        self._check_traffic(record, record.traffic)
        present = self.endpoints.get(name)
        if present == record:
            return
        if present is not None:
            raise ConflictError(
                f"endpoint {name!r} exists with other settings: route {present.route!r}, methods "
                f"{present.methods}, traffic {dict(present.traffic)}; delete it first"
            )
        check_free(self.endpoints, name, record.route)
        self.put_endpoint(record)

    def delete_endpoint(self, name: str) -> None:
        """Forget an endpoint; its backend stays. Harmless when there is none."""
        present = self.endpoints.get(name)
        if present is None:
            return
        if present.application:
            raise ConflictError(
                f"endpoint {name!r} belongs to application {present.application!r}; delete that"
            )
        self.drop_endpoint(name)

    def set_traffic(self, name: str, weights: Mapping[str, float]) -> None:
        """Send an endpoint's traffic to a backend."""
        present = self.endpoints.get(name)
        if present is None:
            raise UnknownNameError(f"no endpoint is named {name!r}")
        self._check_traffic(present, weights)
        if dict(present.traffic) != dict(weights):
            self.put_endpoint(replace(present, traffic=dict(weights)))

    def _check_traffic(self, endpoint: EndpointRecord, weights: Mapping[str, float]) -> None:
        # An application deletes its backends when it is redeployed, whoever else may use them.
        known = [
            tag
            for tag, backend in self.backends.items()
            if not backend.record.deleting and backend.record.application == endpoint.application
        ]
        check_traffic(endpoint.name, weights, known)

    # --- Requests: applications -----------------------------------------------------------------

    def deploy_application(
        self,
        name: str,
        *,
        ingress: str,
        route_prefix: str | None,
        deployments: tuple[Any, ...],
        wall_now: float,
    ) -> str | None:
        """Bring an application to these deployments; see :mod:`understudy.core.applications`."""
        changed = applications.deploy(self, name, ingress, route_prefix, deployments)
        self._touched_applications.add(name)
        subject = ("application", name)
        if not changed:
            return self.goals.pending_for(subject)
        return self.goals.create(subject, "deploy application", wall_now)

    def delete_application(self, name: str, wall_now: float) -> str | None:
        """Delete an application's endpoints and deployments; harmless when there is none."""
        if name not in self.applications:
            return None
        subject = ("application", name)
        if self.applications[name].deleting:
            return self.goals.pending_for(subject)
        applications.delete(self, name)
        self._touched_applications.add(name)
        return self.goals.create(subject, "delete application", wall_now)

    def goal(self, goal_id: str) -> GoalRecord:
        """Return a goal, or raise UnknownNameError."""
        goal = self.goals.get(goal_id)
        if goal is None:
            raise UnknownNameError(f"no goal has the id {goal_id!r} (any more)")
        return goal

    # --- Observations ---------------------------------------------------------------------------

    def replica_reported(self, tag: str, now: float, **report: Any) -> bool:
        """Take a replica's report; False when no such replica is known, so that it should go."""
        backend_tag = self._by_replica.get(tag)
        if backend_tag is None:
            return False
        self.backends[backend_tag].reported(tag, now=now, **report)
        self.touch(backend_tag)
        return True

    def replica_exited(self, tag: str, now: float) -> None:
        """Take note that a replica's process is gone."""
        backend_tag = self._by_replica.get(tag)
        if backend_tag is not None:
            self.backends[backend_tag].exited(tag, now)
            self.touch(backend_tag)

    def backend_of(self, replica: str) -> Backend | None:
        """Return the backend that a replica belongs to."""
        return self.backends.get(self._by_replica.get(replica, ""))

    def listener_changed(self) -> None:
        """Look again at what waits for proxies to hold the newest tables."""
        self._touched |= self._releasing

    # --- Reconciliation -------------------------------------------------------------------------

    def advance(self, now: float) -> list[Effect]:
        """Take the next steps of everything that was touched or is due."""
        while self._due and self._due[0][0] <= now:
            due_at, tag = heapq.heappop(self._due)
            if self._due_at.get(tag) == due_at:
                del self._due_at[tag]
                self.touch(tag)
        effects: list[Effect] = []
        while self._touched or self._touched_applications:
            touched, self._touched = self._touched, set()
            for tag in sorted(touched):
                effects += self._advance_backend(tag, now)
            names, self._touched_applications = self._touched_applications, set()
            for name in sorted(names):
                applications.advance(self, name)
        if self.long_poll.closed and (not self._recovering or now >= self._recovery_ends_at):
            self.long_poll.open()
        self.goals.advance(self._progress)
        for goal_id, goal in self.goals.take_changed().items():
            if goal is None:
                self._changes.delete("goal", goal_id)
            else:
                self._changes.put("goal", goal_id, goal)
        return effects

    def next_due_at(self) -> float | None:
        """Return when :meth:`advance` has something to do, if nothing happens before."""
        times = [self._due[0][0]] if self._due else []
        if self.long_poll.closed:
            times.append(self._recovery_ends_at)
        return min(times, default=None)

    def take_changes(self) -> Changes:
        """Return what to save before anything else is done."""
        changes, self._changes = self._changes, Changes()
        return changes

    def _advance_backend(self, tag: str, now: float) -> list[Effect]:
        backend = self.backends.get(tag)
        if backend is None:
            return []
        before = backend.record.replicas
        effects = backend.reconcile(lambda table: self._publish(tag, table), now)
        if backend.record.replicas != before:
            for replica in before:
                self._by_replica.pop(replica, None)
            self._by_replica.update(dict.fromkeys(backend.record.replicas, tag))
        if backend.recovered:
            self._recovering.discard(tag)
        (self._releasing.add if backend.releasing else self._releasing.discard)(tag)
        if backend.record.application:
            self._touched_applications.add(backend.record.application)
        if backend.record.deleting and not backend.replicas:
            self._remove_backend(tag)
            return effects
        if backend.changed:
            backend.changed = False
            self._changes.put("backend", tag, backend.record)
        self._schedule(tag, max(backend.due_at(), now + MIN_STEP_S))
        return effects

    def _publish(self, tag: str, table: BackendTable) -> bool:
        self.long_poll.publish(BACKEND_PREFIX + tag, table)
        return self.long_poll.held_by_all(BACKEND_PREFIX + tag)

    def _schedule(self, tag: str, due_at: float) -> None:
        if due_at < float("inf") and self._due_at.get(tag) != due_at:
            self._due_at[tag] = due_at  # an entry of the heap with another time counts no more
            heapq.heappush(self._due, (due_at, tag))

    def _remove_backend(self, tag: str) -> None:
        removed = self.backends.pop(tag).record
        self.long_poll.publish(BACKEND_PREFIX + tag, None)
        self._changes.delete("backend", tag)
        if all(b.record.code_digest != removed.code_digest for b in self.backends.values()):
            self._changes.delete_code(removed.code_digest)

    def _progress(self, subject: Subject) -> Progress:
        kind, name = subject
        if kind == "application":
            return applications.progress(self, name)
        backend = self.backends.get(name)
        if backend is None:
            return Progress(done=True)
        if backend.record.deleting:
            return Progress()
        if backend.record.failure:
            return Progress(error=backend.record.failure, exception=backend.record.exception)
        held = self.long_poll.held_by_all(BACKEND_PREFIX + name)
        return Progress(done=backend.settled and held)

    # --- For the applications module ------------------------------------------------------------

    def touch(self, backend: str) -> None:
        """Have a backend looked at in the next :meth:`advance`."""
        self._touched.add(backend)

    def add_backend(self, record: BackendRecord, code: bytes) -> None:
        """Add a backend and its code."""
        self.backends[record.tag] = Backend(record, 0.0)
        self._changes.put("backend", record.tag, record)
        self._changes.put_code(record.code_digest, code)
        self.touch(record.tag)

    def keep_code(self, record: BackendRecord, code: bytes) -> None:
        """Have a backend's code saved again, if the store has lost it and this is it."""
        digest = record.code_digest
        if digest in self.lost_code and hashlib.sha256(code).hexdigest() == digest:
            self._changes.put_code(digest, code)
            self.lost_code.discard(digest)

    def put_endpoint(self, record: EndpointRecord) -> None:
        """Add or replace an endpoint."""
        self.endpoints[record.name] = record
        self._changes.put("endpoint", record.name, record)
        self.long_poll.publish(ENDPOINT_PREFIX + record.name, table_of(record))

    def drop_endpoint(self, name: str) -> None:
        """Remove an endpoint."""
        if self.endpoints.pop(name, None) is not None:
            self._changes.delete("endpoint", name)
            self.long_poll.publish(ENDPOINT_PREFIX + name, None)

    def put_application(self, record: ApplicationRecord) -> None:
        """Add or replace an application."""
        if self.applications.get(record.name) != record:
            self.applications[record.name] = record
            self._changes.put("application", record.name, record)

    def drop_application(self, name: str) -> None:
        """Remove an application's record."""
        del self.applications[name]
        self._changes.delete("application", name)

    def _backend(self, tag: str) -> Backend:
        backend = self.backends.get(tag)
        if backend is None or backend.record.deleting:
            known = ", ".join(sorted(self.backends)) or "none"
            raise UnknownNameError(f"no backend is named {tag!r}; there are: {known}")
        return backend
