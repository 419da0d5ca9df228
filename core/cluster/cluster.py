"""The cluster: its state, and the services that bring it closer to what is wanted.

Theory of operation. Operations (:mod:`greenroom.core.cluster.admin`) change records. Observations
change soft state only. :meth:`Cluster.advance` moves whatever was touched or is due one step closer
to what is wanted, and returns effects. The shell then saves :meth:`Cluster.take_changes`, and only
after that performs the effects, pushes the news and answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from greenroom.core.autoscaling.decision import Loads
from greenroom.core.cluster.autoscaler import Autoscaler
from greenroom.core.cluster.hosts import EXPECTED_S, HOST, Hosts, prepare
from greenroom.core.comparing.comparing import AllDifferences
from greenroom.core.effects import Effect
from greenroom.core.lifecycle import definitions
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.goals import Progress, Subject
from greenroom.core.lifecycle.placement import Placement, anywhere
from greenroom.core.lifecycle.replicas import Report
from greenroom.core.lifecycle.state import State
from greenroom.core.long_poll import LISTENER, Listeners
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    DEPLOYMENT,
    ENDPOINT,
    Changes,
    Key,
    served_as,
)
from greenroom.core.rollouts.canaries import CANARY, Canaries
from greenroom.core.rollouts.rollouts import ROLLOUT, Rollouts
from greenroom.core.routing.tables import BACKEND_PREFIX, ENDPOINT_PREFIX, BackendTable
from greenroom.core.schedule import Schedule
from greenroom.core.series import Pair, Series
from greenroom.core.tokens import TOKEN, Tokens

RECOVERY_S = 2.0  # how long a new controller waits for replicas before it talks to proxies
MIN_STEP_S = 0.01  # between two looks at a backend for which nothing has happened


class Cluster:
    """The state and the services over it. ``now`` is always monotonic seconds."""

    def __init__(
        self,
        records: Mapping[str, Mapping[str, Any]],
        epoch: int,
        now: float,
        placement: Placement | None = None,
        own_host: str = "",
        lost: Iterable[Key] = (),
    ) -> None:
        hosts = records.get(HOST, {})
        self.now = now  # when it was last looked at
        self.placement = placement or anywhere()
        prepare(self.placement, hosts, own_host)
        self.state = state = State(records, epoch, now, self.placement, lost)
        self.backends = state.backends
        self.endpoints = state.endpoints
        self.applications = state.applications
        self.goals = state.goals
        self.history = state.history
        self.long_poll = state.long_poll
        self.listeners = Listeners(
            state.long_poll,
            state.changes,
            records.get(LISTENER, {}),
            now,
            changed=self._listener_changed,
            told_gone=state.proxy_gone,
        )
        self.hosts = Hosts(state, self.listeners, hosts, own_host, now)
        self.loads = Loads(now)
        self.differences = AllDifferences()
        self.series = Series(self._has_both, self._is_inner)
        self._wall_now = 0.0
        self.autoscaler = Autoscaler(self.loads)
        state.proxy_gone.append(lambda proxy: self.autoscaler.proxy_gone(proxy, self.now))
        state.proxy_gone.append(self._forget_ejections)
        self.rollouts = Rollouts(state, self.differences, records.get(ROLLOUT, {}))
        self.tokens = Tokens(records.get(TOKEN, {}), state.changes)
        self.canaries = Canaries(state, self.rollouts, self.differences, records.get(CANARY, {}))
        self._by_replica = {r: tag for tag, b in self.backends.items() for r in b.replicas}
        self._recovering = {tag for tag, b in self.backends.items() if not b.recovered}
        self._recovery_ends_at = now + (EXPECTED_S if hosts else RECOVERY_S)
        self._releasing: set[str] = set()  # backends with replicas that proxies have to let go
        self._waiting: set[str] = set()  # backends with replicas for which there is no room
        self._schedule = Schedule()  # of backends
        self._held_upto: int | None = None  # what waits for proxies was last looked at

    # --- Observations ---------------------------------------------------------------------------

    def replica_reported(self, tag: str, now: float, **report: Any) -> bool:
        """Take a replica's report; False when no such replica is known, so that it should go."""
        backend_tag = self._by_replica.get(tag)
        if backend_tag is None:
            return False
        due_at = self.backends[backend_tag].reported(tag, Report(**report), now)
        if due_at <= now:
            self.state.touched.add(backend_tag)
        else:
            self._schedule.put_earlier(backend_tag, due_at)
        return True

    def replica_exited(self, tag: str, now: float) -> None:
        """Take note that a replica's process is gone."""
        backend_tag = self._by_replica.get(tag)
        if backend_tag is not None:
            self.backends[backend_tag].exited(tag, now)
            self.state.touched.add(backend_tag)

    def replica_ejected(self, tag: str, proxy: str, times: int) -> None:
        """Note how often in a row a proxy has sent a replica no queries, as they fail there."""
        backend = self.backend_of(tag)
        if backend is not None and backend.ejected(tag, proxy, times):
            self.state.touched.add(backend.record.tag)

    def _forget_ejections(self, proxy: str) -> None:
        for tag in self._by_replica:
            self.replica_ejected(tag, proxy, 0)

    def backend_of(self, replica: str) -> Backend | None:
        """Return the backend that a replica belongs to."""
        return self.backends.get(self._by_replica.get(replica, ""))

    def _has_both(self, pair: Pair) -> bool:
        endpoint, backend = pair
        return endpoint in self.endpoints and backend in self.backends

    def _is_inner(self, endpoint: str) -> bool:
        """Return whether it is of an application's deployment that is not the ingress."""
        name, _, deployment = endpoint.partition("#")
        application = self.state.applications.get(name) if deployment else None
        return application is not None and deployment != application.ingress

    def _listener_changed(self) -> None:
        """Look again at what waits for proxies to hold the newest tables."""
        self.state.touched |= self._releasing

    # --- Reconciliation -------------------------------------------------------------------------

    def advance(self, now: float, wall_now: float = 0.0) -> list[Effect]:
        """Take the next steps of what was touched or is due.

        ``wall_now``, in seconds since the epoch, is for the history and the time series.
        """
        self.now, self._wall_now = now, wall_now
        self.series.advance(wall_now)
        state = self.state
        state.touched |= self._schedule.take(now)
        self.listeners.advance(now)
        self.hosts.advance(now)
        effects = self.autoscaler.advance(now)
        state.touched |= self.autoscaler.take_rescaled()
        self._advance_touched(effects, now)
        if self.long_poll.held_upto != self._held_upto:
            self._held_upto = self.long_poll.held_upto
            for waiting in (self.rollouts, self.canaries, self.goals):
                waiting.held()
        self.rollouts.advance(now, wall_now)
        for endpoint in self.rollouts.take_ended() & self.endpoints.keys():
            self.canaries.touch(self.endpoints[endpoint].application)
        self.canaries.advance(wall_now)
        self._advance_touched(effects, now)  # what canaries have changed
        if self.long_poll.closed and (not self._recovering or now >= self._recovery_ends_at):
            self.long_poll.open()
        self.goals.advance(self._progress)
        return effects

    def _advance_touched(self, effects: list[Effect], now: float) -> None:
        state = self.state
        while True:
            state.touched |= self._waiting if self.placement.take_freed() else set()
            if not (state.touched or state.touched_applications):
                return
            touched, state.touched = state.touched, set()
            for tag in sorted(touched):
                effects += self._advance_backend(tag, now)
            names, state.touched_applications = state.touched_applications, set()
            for name in sorted(names):
                definitions.advance_application(state, name)
                self.goals.touch((APPLICATION, name), (APPLICATION, served_as(name)))
                self.canaries.touch(name)

    def next_due_at(self) -> float | None:
        """Return when :meth:`advance` has something to do, if nothing happens before."""
        due_at = min(
            self._schedule.next_at(),
            self._recovery_ends_at if self.long_poll.closed else float("inf"),
            self.autoscaler.next_due_at(),
            self.rollouts.due_at(),
            self.canaries.due_at(),
            self.listeners.due_at(),
            self.hosts.due_at(),
        )
        return due_at if due_at < float("inf") else None

    def take_changes(self) -> Changes:
        """Return what to save before anything else is done."""
        return self.state.take_changes()

    def _advance_backend(self, tag: str, now: float) -> list[Effect]:
        backend = self.backends.get(tag)
        self.goals.touch((BACKEND, tag), (DEPLOYMENT, tag))
        self.rollouts.touch((BACKEND, tag))
        if backend is None:
            return []
        before = backend.record.replicas
        effects = backend.reconcile(lambda table: self._publish(tag, table), now)
        if backend.record.replicas != before:
            for replica in before.keys() - backend.record.replicas.keys():
                self._by_replica.pop(replica, None)
                self.state.replica_gone(replica)
            self._by_replica.update(dict.fromkeys(backend.record.replicas, tag))
        if backend.recovered:
            self._recovering.discard(tag)
        (self._releasing.add if backend.releasing else self._releasing.discard)(tag)
        (self._waiting.add if backend.waiting else self._waiting.discard)(tag)
        self.autoscaler.watch(tag, backend, now)
        self.series.scaled(tag, backend.running, self._wall_now)
        if backend.record.application:
            self.state.touched_applications.add(backend.record.application)
            self.rollouts.touch((APPLICATION, backend.record.application))
        elif backend.wanted and backend.settled and backend.note_running():
            self.state.touch(tag)  # routers are to know
        if backend.record.deleting and not backend.replicas:
            self._waiting.discard(tag)
            self.state.remove_backend(tag)
            self.series.removed(tag)
            return effects
        self.state.save_backend(backend)
        self._schedule.put(tag, max(backend.due_at(), now + MIN_STEP_S))
        return effects

    def _publish(self, tag: str, table: BackendTable) -> bool:
        self.long_poll.publish(BACKEND_PREFIX + tag, table)
        return self.long_poll.held_by_all(BACKEND_PREFIX + tag)

    def _progress(self, subject: Subject) -> Progress:
        kind, name = subject
        if kind == APPLICATION:
            progress = self.canaries.progress(name)
            return progress or definitions.application_progress(self.state, name)
        if kind == ROLLOUT:
            return self.rollouts.progress(name)
        if kind == ENDPOINT:
            done = self.long_poll.held_by_all(ENDPOINT_PREFIX + name)
            return Progress(done=done, unheld=not done)
        return definitions.backend_progress(self.state, name)
