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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from greenroom.core.autoscaling.autoscaler import Autoscaler
from greenroom.core.autoscaling.decision import Loads
from greenroom.core.cluster.changes import Changes
from greenroom.core.cluster.hosts import EXPECTED_S, HOST, Hosts
from greenroom.core.cluster.long_poll import LISTENER, Listeners, LongPoll
from greenroom.core.cluster.placement import Placement, anywhere
from greenroom.core.comparing.differences import AllDifferences
from greenroom.core.config import ActorOptions, BackendConfig, validated
from greenroom.core.effects import Effect
from greenroom.core.errors import ConflictError, InvalidRequestError, UnknownNameError
from greenroom.core.lifecycle import applications, releases
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.deployments import deployment_progress
from greenroom.core.lifecycle.endpoints import (
    Endpoints,
    check_free,
    check_known,
    check_weights,
    described,
    is_made_alike,
    new_endpoint,
    owner_of,
    table_of,
    users_of,
    with_shadow,
)
from greenroom.core.lifecycle.goals import Goals, Progress, Subject
from greenroom.core.lifecycle.history import Author, History
from greenroom.core.lifecycle.lost import tables_of_lost
from greenroom.core.lifecycle.releases import NOTHING, CodeUse
from greenroom.core.lifecycle.replicas import Report
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    ENDPOINT,
    ApplicationRecord,
    BackendRecord,
    Definition,
    EndpointRecord,
    GoalRecord,
    Key,
    Release,
    backend_definition,
)
from greenroom.core.rollouts.rollouts import ROLLOUT, Rollouts
from greenroom.core.routing.tables import BACKEND_PREFIX, ENDPOINT_PREFIX, BackendTable
from greenroom.core.validation import MAX_TAG_BYTES, wrong_with

# When each of many things is to be looked at again.


class Schedule:
    """Names by the time at which they are due; setting a name's time anew replaces it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due_at: dict[str, float] = {}

    def put(self, name: str, due_at: float) -> None:
        """Have a name due at a time; infinity leaves it as it is."""
        if due_at < float("inf") and self._due_at.get(name) != due_at:
            self._due_at[name] = due_at  # an entry of the heap with another time counts no more
            heapq.heappush(self._heap, (due_at, name))

    def take(self, now: float) -> set[str]:
        """Return, and drop, what is due."""
        names = set()
        while self._heap and self._heap[0][0] <= now:
            due_at, name = heapq.heappop(self._heap)
            if self._due_at.get(name) == due_at:
                del self._due_at[name]
                names.add(name)
        return names

    def next_at(self) -> float:
        """Return when :meth:`take` may have something, at the earliest; infinity for never."""
        return self._heap[0][0] if self._heap else float("inf")


# Which backends a request may name.


class Present(Collection[str]):
    """The backends among these that are not being deleted; to ask for one takes no look at all."""

    def __init__(self, backends: Mapping[str, Backend], tags: Collection[str]) -> None:
        self._backends = backends
        self._tags = tags

    def __contains__(self, tag: object) -> bool:
        return tag in self._tags and not self._backends[str(tag)].record.deleting

    def __iter__(self) -> Iterator[str]:
        return (tag for tag in self._tags if not self._backends[tag].record.deleting)

    def __len__(self) -> int:
        return sum(1 for _ in self)


RECOVERY_S = 2.0  # how long a new controller waits for replicas before it talks to proxies
MIN_STEP_S = 0.01  # between two looks at a backend for which nothing has happened


class Cluster:
    """Backends, endpoints, applications and goals. ``now`` is always monotonic seconds."""

    def __init__(
        self,
        records: Mapping[str, Mapping[str, Any]],
        epoch: int,
        now: float,
        placement: Placement | None = None,
        own_host: str = "",
        lost: Iterable[Key] = (),
    ) -> None:
        self.placement = placement or anywhere()
        self.now = now  # when it was last looked at
        Hosts.prepare(self, records.get(HOST, {}), own_host)
        self.endpoints = Endpoints(records.get("endpoint", {}))
        self.applications: dict[str, ApplicationRecord] = dict(records.get("application", {}))
        self.goals = Goals(records.get("goal", {}))
        self.history = History(records.get("history", {}))
        self.backends = {
            tag: Backend(record, now, self.placement)
            for tag, record in records.get("backend", {}).items()
        }
        self._of_application: dict[str, set[str]] = {}
        self._by_replica = {r: tag for tag, b in self.backends.items() for r in b.replicas}
        self._recovering = {tag for tag, b in self.backends.items() if not b.recovered}
        self._recovery_ends_at = now + (EXPECTED_S if records.get(HOST) else RECOVERY_S)
        self._releasing: set[str] = set()  # backends with replicas that proxies have to let go
        self._waiting: set[str] = set()  # backends with replicas for which there is no room
        self.long_poll = LongPoll(epoch, closed=bool(self._recovering))
        self.listeners = Listeners(self, records.get(LISTENER, {}), now)
        self.hosts = Hosts(self, records.get(HOST, {}), own_host, now)
        self.loads = Loads(now)
        self.differences = AllDifferences()
        self.autoscaler = Autoscaler(self.loads)
        self._touched = set(self.backends)
        self._touched_applications = set(self.applications)
        self._schedule = Schedule()  # of backends
        self._changes = Changes()
        self.code_use = CodeUse()
        self.code_use.hold("history", self.history.digests())
        for tag, backend in self.backends.items():
            self._count(backend.record)
            # A change that is not under way has succeeded, or was taken back.
            subjects = (BACKEND, tag), ("deployment", tag), (APPLICATION, backend.names[1])
            backend.proven = not any(map(self.goals.pending_for, subjects))
        self._before: dict[Key, Definition | None] | None = None  # in a change: what it found
        self.is_torn = False  # a change failed when a part of it was made
        for name, record in self.endpoints.items():
            self.long_poll.publish(ENDPOINT_PREFIX + name, table_of(record))
        self.lost = set(lost)  # whose records are damaged; of those nothing is in the above
        self.code_use.lost.update(name for kind, name in self.lost if kind == "code")
        for key, table in tables_of_lost(sorted(self.lost), self.applications, self.history):
            self.long_poll.publish(key, table)
        rollouts = dict(records.get(ROLLOUT, {}))
        for name in rollouts.keys() - self.endpoints.keys():  # of a lost endpoint
            del rollouts[name]
            self._changes.delete(ROLLOUT, name)
        self.rollouts = Rollouts(self, rollouts)

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
        folders: Mapping[str, bytes] = NOTHING,
    ) -> str | None:
        """Run code under a tag; the same call again is a no-op, another one a ConflictError."""
        if wrong := wrong_with(tag, MAX_TAG_BYTES):
            raise InvalidRequestError(f"backend tag {tag!r}: {wrong}")
        settings = validated(BackendConfig, config)
        options = validated(ActorOptions, actor_options)
        present = self.backends.get(tag)
        if present is not None and not present.record.deleting:
            newest = present.record.newest
            made_of = (newest.code_hash, present.config, newest.actor_options)
            if made_of != (code_hash, settings, options.model_dump()):
                raise ConflictError(
                    f"backend {tag!r} exists with other code or settings; use "
                    "update_backend_config, or delete it first"
                )
            if hashlib.sha256(code).hexdigest() == newest.code_digest:
                self.keep_code(newest.code_digest, code)
            if not present.record.failure:
                return self.goals.pending_for(("backend", tag))
            present.try_again()
            self.touch(tag)
            return self.goals.create(("backend", tag), "create backend", wall_now)
        if present is not None:
            raise ConflictError(f"backend {tag!r} is being deleted; wait for that goal first")
        release = Release(
            code_hash=code_hash,
            code_digest=hashlib.sha256(code).hexdigest(),
            config=settings.model_dump(),
            actor_options=options.model_dump(),
            version=version,
        )
        for digest, content in folders.items():
            self.keep_code(digest, content)
        self.add_backend(BackendRecord(tag=tag, releases=(release,)), code)
        return self.goals.create(("backend", tag), "create backend", wall_now)

    def update_backend_config(
        self, tag: str, changes: Mapping[str, Any], wall_now: float
    ) -> str | None:
        """Change the given settings; the goal is reached when every replica has them."""
        backend = self._backend(tag)
        self.note((BACKEND, tag))
        if not backend.set_config(backend.config.updated(changes)):
            return self.goals.pending_for(("backend", tag))
        self.touch(tag)
        return self.goals.create(("backend", tag), "update backend config", wall_now)

    def delete_backend(self, tag: str, *, force: bool, wall_now: float) -> str | None:
        """Stop and forget a backend; ConflictError naming the endpoints that use it."""
        backend = self.backends.get(tag)
        if backend is None:
            self.forget_lost({(BACKEND, tag)})
            return None
        if owner := owner_of(backend.record):
            raise ConflictError(f"backend {tag!r} belongs to {owner}; delete or redeploy that")
        self.rollouts.check_unused(tag)
        users = users_of(self.endpoints.using(tag), tag)
        if users:
            uses = ", ".join(f"{use} of endpoint {name!r}" for name, use in users.items())
            raise ConflictError(
                f"backend {tag!r} has {uses}; delete the endpoint, set its traffic elsewhere, or "
                "end the shadow first"
            )
        if backend.record.deleting and (backend.record.force or not force):
            return self.goals.pending_for(("backend", tag))
        self.note((BACKEND, tag))
        backend.delete(force=force)
        self.touch(tag)
        return self.goals.create(("backend", tag), "delete backend", wall_now)

    def backend_config(self, tag: str) -> dict[str, Any]:
        """Return a backend's settings."""
        return self._backend(tag).config.model_dump()

    # --- Requests: endpoints --------------------------------------------------------------------

    def create_endpoint(
        self,
        name: str,
        *,
        backend: str,
        route: str | None,
        methods: tuple[str, ...],
        retryable: bool | None = None,
    ) -> None:
        """Name a backend; the same call again is a no-op, another one a ConflictError.

        It is the same call, too, when the endpoint's traffic was moved meanwhile: scripts that set
        up an endpoint and then its traffic may run again.
        """
        record = new_endpoint(name, backend, route, methods, retryable)
        present = self.endpoints.get(name)
        if present is not None and is_made_alike(present, record):
            return
        self._backend(backend)
        if present is not None:
            raise ConflictError(
                f"endpoint {name!r} exists with other settings: {described(present)}; "
                "delete it first"
            )
        check_known(f"endpoint {name!r}", "backend", [backend], self.usable_backends(""))
        check_free(self.endpoints.at(record.route), name, record.route)
        self.put_endpoint(record)

    def delete_endpoint(self, name: str) -> None:
        """Forget an endpoint; its backends stay. Harmless when there is none."""
        if (present := self.endpoints.get(name)) is None:
            self.forget_lost({(ENDPOINT, name)})
            return
        if owner := owner_of(present):
            raise ConflictError(f"endpoint {name!r} belongs to {owner}; delete that")
        self.drop_endpoint(name)

    def set_traffic(self, name: str, weights: Mapping[str, float]) -> None:
        """Give an endpoint's traffic to backends by weight; refused while a rollout decides."""
        present = self.endpoint(name)
        weights = check_weights(name, weights)
        known = self.usable_backends(present.application)
        check_known(f"traffic of endpoint {name!r}", "weights", weights, known)
        if present.traffic != weights:
            self.rollouts.check_traffic(name)
            self.put_endpoint(replace(present, traffic=weights))

    def shadow_traffic(
        self, name: str, backend: str, proportion: float, compare: object = None
    ) -> None:
        """Have a proportion of an endpoint's queries copied to a backend; 0 ends it."""
        known = self.usable_backends("")
        changed = with_shadow(self.endpoint(name), backend, proportion, known, compare)
        if changed != self.endpoints[name]:
            self.put_endpoint(changed)

    def endpoint(self, name: str) -> EndpointRecord:
        """Return an endpoint, or raise UnknownNameError."""
        if name not in self.endpoints:
            known = ", ".join(sorted(self.endpoints)) or "none"
            raise UnknownNameError(f"no endpoint is named {name!r}; there are: {known}")
        return self.endpoints[name]

    def usable_backends(self, application: str) -> Collection[str]:
        """Return where an application's queries may go: others' backends go when those like."""
        return Present(self.backends, self.backends_of(application))

    # --- Changes --------------------------------------------------------------------------------

    def change(self, author: Author, what: str, make: Callable[[], Any], wall_now: float) -> Any:
        """Make a change and its entry in the history; a repeat of the request makes none.

        One that raises when it has changed something leaves the cluster torn: nothing of it may be
        saved, and the last state that was is to be loaded again.
        """
        if self._before is not None:
            return make()  # a part of the change that is being made
        repeated = self.history.answered(author.request_id)
        if repeated is not None:
            return repeated.answer
        before = self._before = {}
        changes = self._changes.size
        try:
            answer = make()
        except Exception:
            is_changed = any(self.definition(key) != each for key, each in before.items())
            self.is_torn = is_changed or self._changes.size != changes
            raise
        finally:
            self._before = None
        after = {key: self.definition(key) for key in before}
        if after != before:
            self.history.add(author, what, answer, before, after, wall_now, self._changes)
            self.code_use.hold("history", self.history.digests())
        return answer

    def definition(self, key: Key) -> Definition | None:
        """Return what the last change has made of something; None where there is none."""
        kind, name = key
        if kind == ENDPOINT:
            return self.endpoints.get(name)
        if kind == APPLICATION:
            application = self.applications.get(name)
            return None if application is None or application.deleting else application
        backend = self.backends.get(name)
        return None if backend is None else backend_definition(backend.record)

    def note(self, key: Key) -> None:
        """Keep for the history what is about to be changed; to be called before each change."""
        if self._before is not None and key not in self._before:
            self._before[key] = self.definition(key)

    def goal(self, goal_id: str) -> GoalRecord:
        """Return a goal, or raise UnknownNameError."""
        if (goal := self.goals.get(goal_id)) is None:
            raise UnknownNameError(f"no goal has the id {goal_id!r} (any more)")
        return goal

    # --- Observations ---------------------------------------------------------------------------

    def replica_reported(self, tag: str, now: float, **report: Any) -> bool:
        """Take a replica's report; False when no such replica is known, so that it should go."""
        backend_tag = self._by_replica.get(tag)
        if backend_tag is None:
            return False
        self.backends[backend_tag].reported(tag, Report(**report), now)
        self._touched.add(backend_tag)
        return True

    def replica_exited(self, tag: str, now: float) -> None:
        """Take note that a replica's process is gone."""
        backend_tag = self._by_replica.get(tag)
        if backend_tag is not None:
            self.backends[backend_tag].exited(tag, now)
            self._touched.add(backend_tag)

    def backend_of(self, replica: str) -> Backend | None:
        """Return the backend that a replica belongs to."""
        return self.backends.get(self._by_replica.get(replica, ""))

    def listener_changed(self) -> None:
        """Look again at what waits for proxies to hold the newest tables."""
        self._touched |= self._releasing

    # --- Reconciliation -------------------------------------------------------------------------

    def advance(self, now: float, wall_now: float = 0.0) -> list[Effect]:
        """Take the next steps of what was touched or is due; ``wall_now`` is for the history."""
        self.now = now
        self._touched |= self._schedule.take(now)
        self.listeners.advance(now)
        self.hosts.advance(now)
        effects = self.autoscaler.advance(now)
        self._touched |= self.autoscaler.take_rescaled()
        while self._touched or self._touched_applications:
            touched, self._touched = self._touched, set()
            for tag in sorted(touched):
                effects += self._advance_backend(tag, now)
            self._touched |= self._waiting if self.placement.take_freed() else set()
            names, self._touched_applications = self._touched_applications, set()
            for name in sorted(names):
                applications.advance(self, name)
        self.rollouts.advance(now, wall_now)
        if self.long_poll.closed and (not self._recovering or now >= self._recovery_ends_at):
            self.long_poll.open()
        self.goals.advance(self._progress)
        for goal_id, goal in self.goals.take_changed().items():
            self.save("goal", goal_id, goal)
        return effects

    def next_due_at(self) -> float | None:
        """Return when :meth:`advance` has something to do, if nothing happens before."""
        due_at = min(
            self._schedule.next_at(),
            self._recovery_ends_at if self.long_poll.closed else float("inf"),
            self.autoscaler.next_due_at(),
            self.rollouts.due_at(),
            self.listeners.due_at(),
            self.hosts.due_at(),
        )
        return due_at if due_at < float("inf") else None

    def take_changes(self) -> Changes:
        """Return what to save before anything else is done."""
        changes, self._changes = self._changes, Changes()
        for digest in sorted(self.code_use.take_freed()):
            changes.delete_code(digest)
        self.lost -= changes.puts.keys() | changes.deletes | {("code", d) for d in changes.code}
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
        (self._waiting.add if backend.waiting else self._waiting.discard)(tag)
        self.autoscaler.watch(tag, backend, now)
        if backend.record.application:
            self._touched_applications.add(backend.record.application)
        elif backend.wanted and backend.settled and backend.note_running():
            self.touch(tag)  # routers are to know
        if backend.record.deleting and not backend.replicas:
            self._remove_backend(tag)
            return effects
        if backend.changed:
            backend.changed = False
            self._changes.put("backend", tag, backend.record)
            self._count(backend.record)
        self._schedule.put(tag, max(backend.due_at(), now + MIN_STEP_S))
        return effects

    def _publish(self, tag: str, table: BackendTable) -> bool:
        self.long_poll.publish(BACKEND_PREFIX + tag, table)
        return self.long_poll.held_by_all(BACKEND_PREFIX + tag)

    def _remove_backend(self, tag: str) -> None:
        removed = self.backends.pop(tag).record
        self._waiting.discard(tag)
        self.long_poll.publish(BACKEND_PREFIX + tag, None)
        self._changes.delete("backend", tag)
        self.code_use.hold(("backend", tag), ())
        self._of_application[removed.application].discard(tag)
        if not self._of_application[removed.application]:
            del self._of_application[removed.application]

    def _progress(self, subject: Subject) -> Progress:
        kind, name = subject
        if kind == APPLICATION:
            return applications.progress(self, name)
        if kind == ROLLOUT:
            return self.rollouts.progress(name)
        if kind == ENDPOINT:
            return Progress(done=self.long_poll.held_by_all(ENDPOINT_PREFIX + name))
        return deployment_progress(self, name)  # a backend alone is one without an endpoint

    def _count(self, record: BackendRecord) -> None:
        self._of_application.setdefault(record.application, set()).add(record.tag)
        self.code_use.hold(("backend", record.tag), releases.digests(record))

    # --- For the other modules of the core ------------------------------------------------------

    def backends_of(self, application: str) -> set[str]:
        """Return the tags of an application's backends, those that are being deleted too."""
        return self._of_application.get(application, set())

    @property
    def is_empty(self) -> bool:
        """Whether nothing is deployed, or lost."""
        return not (self.backends or self.endpoints or self.applications or self.lost)

    def touch(self, backend: str) -> None:
        """Have a changed backend looked at in the next :meth:`advance`."""
        self._touched.add(backend)
        self._count(self.backends[backend].record)

    def add_backend(self, record: BackendRecord, code: bytes | None) -> None:
        """Add a backend and its code, None where that is stored already."""
        self.note((BACKEND, record.tag))
        self.backends[record.tag] = Backend(record, 0.0, self.placement)
        self._changes.put("backend", record.tag, record)
        if code is not None:
            self.keep_code(record.newest.code_digest, code)
        self.touch(record.tag)

    def keep_code(self, digest: str, code: bytes) -> None:
        """Have code saved, unless it is stored already and not lost."""
        if not self.code_use.is_stored(digest):
            self._changes.put_code(digest, code)
            self.code_use.lost.discard(digest)

    def put_endpoint(self, record: EndpointRecord) -> None:
        """Add or replace an endpoint."""
        self.note((ENDPOINT, record.name))
        self.endpoints[record.name] = record
        self._changes.put("endpoint", record.name, record)
        self.long_poll.publish(ENDPOINT_PREFIX + record.name, table_of(record))

    def drop_endpoint(self, name: str) -> None:
        """Remove an endpoint."""
        self.note((ENDPOINT, name))
        if self.endpoints.pop(name, None) is not None:
            self.rollouts.forget(name)
            self._changes.delete("endpoint", name)
            self.long_poll.publish(ENDPOINT_PREFIX + name, None)

    def put_application(self, record: ApplicationRecord) -> None:
        """Add or replace an application."""
        self._touched_applications.add(record.name)
        self.note((APPLICATION, record.name))
        if self.applications.get(record.name) != record:
            self.applications[record.name] = record
            self._changes.put("application", record.name, record)

    def forget_lost(self, keys: AbstractSet[Key]) -> None:
        """Delete records that are damaged beyond repair, of those that are."""
        for kind, name in sorted(self.lost & keys):
            self._changes.delete(kind, name)
            if kind in {BACKEND, ENDPOINT}:
                self.long_poll.publish(f"{kind}/{name}", None)

    def save(self, kind: str, name: str, record: Any) -> None:
        """Have a record saved that another module keeps; None has it deleted."""
        self._changes.put(kind, name, record)

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
