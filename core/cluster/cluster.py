"""The cluster: its state, and the services that bring it closer to what is wanted.

Theory of operation. Operations (:mod:`greenroom.core.cluster.admin`) change records. Observations
change soft state only. :meth:`Cluster.advance` moves whatever was touched or is due one step closer
to what is wanted, and returns effects. The shell then saves :meth:`Cluster.take_changes`, and only
after that performs the effects, pushes the updates and answers.

What reconciling one thing touches is reconciled in the same step, until nothing is left:
replicas' hosts and loads first, backends, what is made of these, and goals last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from greenroom.core.agenda import HELD, NEVER, ROOM
from greenroom.core.autoscaling.decision import LOADS, Loads
from greenroom.core.cluster.autoscaler import SCALING, Autoscaler
from greenroom.core.cluster.hosts import HOST, HOST_EXPECTED_S, Hosts, HostState, prepare
from greenroom.core.comparing.comparing import AllDifferences, Place, Plain
from greenroom.core.effects import Effect
from greenroom.core.lifecycle import definitions, health, steps
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.goals import GOAL, Progress
from greenroom.core.lifecycle.placement import Placement, anywhere
from greenroom.core.lifecycle.replicas import ReplicaState, Report
from greenroom.core.lifecycle.shown import table_of
from greenroom.core.lifecycle.state import State
from greenroom.core.long_poll import LISTENER
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    CANARY,
    DEPLOYMENT,
    ENDPOINT,
    ROLLOUT,
    Changes,
    GoalRecord,
    Key,
    Records,
    TokenRecord,
    candidate_of,
)
from greenroom.core.rollouts.canaries import STEP_BY_STEP, Canaries
from greenroom.core.rollouts.rollouts import Rollouts
from greenroom.core.routing.tables import BACKEND_PREFIX, ENDPOINT_PREFIX
from greenroom.core.series import Pair, Series
from greenroom.core.tokens import TOKEN

RECOVERY_S = 2.0  # how long a new controller waits for replicas before it talks to proxies
RECOVERY = "recovery"  # the key of this
MIN_STEP_S = 0.01  # between two steps of a backend for which nothing has happened


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
        self.now = now  # of the last step
        placement = placement or anywhere()
        prepare(placement, hosts, own_host)
        self.state = state = State(records, epoch, now, placement, lost)
        self.hosts = Hosts(state, hosts, own_host, now)
        self.loads = Loads(now, state.agenda)
        self.differences = AllDifferences()
        self.series = Series(self._has_pair, self._is_inner)
        self._wall_now = 0.0
        self.autoscaler = Autoscaler(self.loads, state.agenda, state.backends)
        state.gone.proxy.append(self.loads.forget)
        state.gone.proxy.append(self._forget_ejections)
        self.rollouts = Rollouts(state, self.differences, records.get(ROLLOUT, {}))
        self.tokens: Records[TokenRecord] = Records(TOKEN, records.get(TOKEN, {}), state.changes)
        self.canaries = Canaries(state, self.rollouts, self.differences, records.get(CANARY, {}))
        self._recovering = {tag for tag, b in state.backends.items() if not b.recovered}
        if state.long_poll.closed:
            self.state.agenda.at(RECOVERY, "", now + (HOST_EXPECTED_S if hosts else RECOVERY_S))
        self._held_upto: int | None = None  # at the last step
        self._reconcile: dict[str, Callable[[str], Iterable[Effect] | None]] = {
            LISTENER: lambda name: state.long_poll.reconcile(name, self._is_there, self.now),
            HOST: lambda _: self.hosts.reconcile(self.now),
            LOADS: self.loads.reconcile,
            SCALING: lambda tag: self.autoscaler.reconcile(tag, self.now),
            BACKEND: self._reconcile_backend,
            APPLICATION: lambda name: definitions.advance_application(state, name),
            ROLLOUT: lambda name: self.rollouts.reconcile(name, self.now, self._wall_now),
            CANARY: lambda name: self.canaries.reconcile(name, self._wall_now),
            RECOVERY: lambda _: state.long_poll.open(),
            GOAL: self._reconcile_goal,
        }

    # --- Observations ---------------------------------------------------------------------------

    def replica_reported(self, report: Report, now: float) -> bool:
        """Take a replica's report; False when no such replica is known, so that it should go."""
        backend = self.backend_of(report.replica)
        if backend is None:
            return False
        due_at = health.reported(backend, report, now)
        if due_at <= now:
            self.state.agenda.touch(BACKEND, backend.record.tag)
        else:
            self.state.agenda.by(BACKEND, backend.record.tag, due_at)
        return True

    def replica_exited(self, tag: str, now: float, cause: str = "") -> None:
        """Record that a replica's process is gone, and how it ended where that is known."""
        backend = self.backend_of(tag)
        if backend is not None:
            health.exited(backend, tag, now, cause)
            self.state.agenda.touch(BACKEND, backend.record.tag)

    def replica_ejected(self, tag: str, proxy: str, times: int) -> None:
        """Note how often in a row a proxy has sent a replica no queries, as they fail there."""
        backend = self.backend_of(tag)
        if backend is not None and backend.replicas[tag].ejected(proxy, times):
            self.state.agenda.touch(BACKEND, backend.record.tag)

    def _forget_ejections(self, proxy: str) -> None:
        for backend in self.state.backends.values():
            for tag in backend.replicas:
                self.replica_ejected(tag, proxy, 0)

    def backend_of(self, replica: str) -> Backend | None:
        """Return the backend that a replica belongs to."""
        backend = self.state.backends.get(replica.rpartition("#")[0])
        return backend if backend is not None and replica in backend.replicas else None

    def _has_pair(self, pair: Pair) -> bool:
        endpoint, backend = pair
        return endpoint in self.state.endpoints and backend in self.state.backends

    def _is_inner(self, endpoint: str) -> bool:
        """Return whether it is of an application's deployment that is not the ingress."""
        name, _, deployment = endpoint.partition("#")
        application = self.state.applications.get(name) if deployment else None
        return application is not None and deployment != application.ingress

    def tallied(self, proxy: str, counted: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
        """Take what a proxy has counted for rollouts: by endpoint, the step's token and tallies."""
        for endpoint, (token, tallies) in counted.items():
            self.rollouts.reported(endpoint, token, proxy, tallies)

    def compared(self, replica: str, found: Mapping[Place, Plain]) -> None:
        """Keep what a shadow's replica has found by comparing."""
        self.differences.reported(replica, found)
        self.state.agenda.touch(ROLLOUT, *(endpoint for endpoint, _, _ in found))

    # --- Reconciliation -------------------------------------------------------------------------

    def advance(self, now: float, wall_now: float = 0.0) -> list[Effect]:
        """Take the next steps of what was touched or is due.

        ``wall_now``, in seconds since the epoch, is for the history and the time series.
        """
        self.now, self._wall_now = now, wall_now
        self.series.advance(wall_now)
        effects: list[Effect] = []
        while kind := self._next_kind():
            for name in self.state.agenda.take(kind, now):
                effects += self._reconcile[kind](name) or ()
                self.state.agenda.happened((kind, name))
        return effects

    def _next_kind(self) -> str:
        """Return of which kind the next keys are to be reconciled; "" when there is none."""
        if self.state.long_poll.held_upto != self._held_upto:
            self._held_upto = self.state.long_poll.held_upto
            self.state.agenda.happened(HELD)
        if self.state.placement.take_freed():
            self.state.agenda.happened(ROOM)
        return self.state.agenda.first(self._reconcile, self.now)

    def next_due_at(self) -> float | None:
        """Return when :meth:`advance` has something to do, if nothing happens before."""
        due_at = self.state.agenda.next_at()
        return due_at if due_at < NEVER else None

    def take_changes(self) -> Changes:
        """Return what to save before anything else is done."""
        return self.state.take_changes()

    def found_lost(self, lost: Iterable[Key]) -> bool:
        """Take which keys the store has lost by now; return whether any is to be saved again.

        Those are the records that are known here. The others are lost from now on.
        """
        state = self.state
        for kind, name in set(lost) - state.lost:
            if (record := state.changes.records.get(kind, {}).get(name)) is None:
                state.lost.add((kind, name))
            else:
                state.changes.put(kind, name, record)
        return bool(state.changes)

    def _is_there(self, host: str) -> bool:
        """Return whether a host can still be lost, and its proxies with it."""
        return self.hosts.state(host) is not HostState.LOST  # nor unknown

    def _reconcile_backend(self, tag: str) -> list[Effect]:
        backend, now = self.state.backends.get(tag), self.now
        if backend is None:
            return []
        before = backend.record.replicas
        effects = steps.reconcile(backend, self._publish, now)
        if backend.record.replicas is not before:
            for replica in before.keys() - backend.record.replicas.keys():
                self.state.gone.replica(replica)
        if backend.recovered and tag in self._recovering:
            self._recovering.discard(tag)
            self.state.agenda.by(RECOVERY, "", NEVER if self._recovering else now)
        self.autoscaler.watch(tag)
        self.series.scaled(tag, backend.running, self._wall_now)
        if backend.record.application:
            self.state.agenda.touch(APPLICATION, backend.record.application)
        elif backend.wanted and backend.converged:
            self.state.record_running(tag)
        if backend.record.deleting and not backend.replicas:
            self.state.remove_backend(tag)
            self.series.removed(tag)
            return effects
        self.state.save_backend(backend)
        self.state.agenda.at(BACKEND, tag, max(backend.due_at(), now + MIN_STEP_S))
        if backend.in_state(ReplicaState.SHOULD_STOP):
            self.state.agenda.upon(HELD, BACKEND, tag)
        if backend.waiting:
            self.state.agenda.upon(ROOM, BACKEND, tag)
        return effects

    def _publish(self, backend: Backend) -> bool:
        key = BACKEND_PREFIX + backend.record.tag
        self.state.long_poll.publish(key, table_of(backend))
        return self.state.long_poll.held_by_all(key)

    def _reconcile_goal(self, goal_id: str) -> None:
        goal = self.state.goals.get(goal_id)
        if goal is None or goal.state != "pending":
            return
        kind, name = goal.subject
        progress = self._progress(goal)
        self.state.goals.advance(goal, progress)
        if progress.done or progress.error:
            return
        events = {DEPLOYMENT: [(BACKEND, name)], ENDPOINT: []}.get(kind, [(kind, name)])
        if kind == APPLICATION and candidate_of(name) in self.state.applications:
            events.append((APPLICATION, candidate_of(name)))
        for event in (*events, *[HELD] * progress.unheld):
            self.state.agenda.upon(event, GOAL, goal_id)

    def _progress(self, goal: GoalRecord) -> Progress:
        kind, name = goal.subject
        if kind == APPLICATION:
            progress = self.canaries.progress(name) if goal.what == STEP_BY_STEP else None
            return progress or definitions.application_progress(self.state, name)
        if kind == ROLLOUT:
            return self.rollouts.progress(name)
        if kind == ENDPOINT:
            done = self.state.long_poll.held_by_all(ENDPOINT_PREFIX + name)
            return Progress(done=done, unheld=not done)
        return definitions.backend_progress(self.state, name)
