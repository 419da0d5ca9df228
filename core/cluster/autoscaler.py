"""Autoscaling of all backends: which step is due, what was decided, which policy to ask.

Theory of operation. A backend that has come to rest is skipped until its load changes, so an idle
cluster costs nothing. A user's policy is asked through an effect, and its answer completes the
step. Each backend has at most one open question; meanwhile its steps still record the load.

Each backend keeps a short history of decisions. A decision with another outcome or target adds an
entry, which is also logged; any other decision updates the last entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from greenroom.core.agenda import NEVER, Agenda
from greenroom.core.autoscaling.decision import Decision, Loads, Scaling
from greenroom.core.effects import AskPolicy, Effect
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.replicas import ReplicaState
from greenroom.core.records import BACKEND

SCALING, LOADS = "scaling", "loads"  # kinds of keys: by backend, and the only one
KEPT_DECISIONS = 20
MIN_STEP_S = 0.01  # between two steps, whatever happens
MAX_STATS = 1000  # numbers of replicas in a question
ASK_AGAIN_S = 120.0  # a question this old is asked again; the shell answers within its time limit


class Kept(NamedTuple):
    """A decision in the history, as last made; ``times`` counts how often it was made in a row."""

    decision: Decision
    since: float
    times: int


@dataclass(slots=True, eq=False)
class _Entry:
    backend: Backend
    scaling: Scaling
    history: deque[Kept] = field(default_factory=lambda: deque(maxlen=KEPT_DECISIONS))
    ask_id: int = 0
    asked_at: float | None = None


class Autoscaler:
    """All backends with an autoscaling_config. ``now`` is always monotonic seconds."""

    def __init__(self, loads: Loads, agenda: Agenda) -> None:
        self._loads = loads
        self._agenda = agenda
        self._entries: dict[str, _Entry] = {}
        self._log: list[tuple[str, Decision]] = []

    # --- Which backends, and what they have -----------------------------------------------------

    def watch(self, tag: str, backend: Backend) -> None:
        """Scale a backend as its settings say; to be called after each change of it; cheap."""
        entry, config = self._entries.get(tag), backend.autoscaled_by
        if config is None:
            self._entries.pop(tag, None)
        elif entry is None or entry.backend is not backend:
            self._entries[tag] = _Entry(backend, Scaling(config))
            self._agenda.touch(SCALING, tag)
        elif entry.scaling.config is not config:
            entry.scaling.reconfigure(config)
            self._agenda.touch(SCALING, tag)

    def expect(self, proxy: Hashable, now: float) -> None:
        """Expect a report of a proxy."""
        self._loads.expect(proxy, now)
        self._load_changed(set())

    def load_reported(
        self, proxy: Hashable, load: Mapping[str, tuple[int, int]], now: float
    ) -> None:
        """Take what a proxy has to do: backend -> (queued, ongoing)."""
        self._load_changed(self._loads.report(proxy, load, now))

    def proxy_gone(self, proxy: Hashable) -> None:
        """Stop counting what a proxy had to do."""
        self._load_changed(self._loads.forget(proxy))

    def expire_loads(self, now: float) -> None:
        """Stop counting what proxies had to do that report no more."""
        self._load_changed(self._loads.expire(now))

    # --- Steps ----------------------------------------------------------------------------------

    def reconcile(self, tag: str, now: float) -> list[Effect]:
        """Take a backend's step."""
        entry = self._entries.get(tag)
        if entry is None or self._step(tag, entry, now):
            return []
        if entry.asked_at is not None and now < entry.asked_at + ASK_AGAIN_S:
            return []
        entry.ask_id += 1
        entry.asked_at = now
        return [AskPolicy(tag, entry.ask_id, self._question(tag, entry))]

    def policy_answered(self, tag: str, ask_id: int, answer: Mapping[str, Any], now: float) -> None:
        """End a step with the policy's answer.

        ``answer`` has ``replicas`` and may have ``state``, or it has ``error``. It is ignored when
        the question is not open any more.
        """
        entry = self._entries.get(tag)
        if entry is None or entry.asked_at is None or entry.ask_id != ask_id:
            return
        entry.asked_at = None
        self._step(tag, entry, now, answer)

    def take_log(self) -> list[tuple[str, Decision]]:
        """Return the entries of all histories that are new since the last call."""
        log, self._log = self._log, []
        return log

    # --- For people -----------------------------------------------------------------------------

    def policy_failure(self, tag: str) -> str:
        """Return why a backend's policy had no usable answer when last asked; else ""."""
        entry = self._entries.get(tag)
        return entry.scaling.policy_failure if entry is not None else ""

    def describe(self, tag: str, now: float, wall_now: float) -> dict[str, Any]:
        """Return load and decisions of a backend as plain values; times as seconds of the epoch."""
        entry = self._entries.get(tag)
        if entry is None:
            return {}
        load = self._loads.of(tag)
        return {
            "queued": load.queued,
            "ongoing": load.ongoing,
            "average_load": entry.scaling.average,
            "policy_failures": entry.scaling.policy_failures,
            "decisions": [_shown(kept, wall_now - now) for kept in entry.history],
        }

    # --- Inside ---------------------------------------------------------------------------------

    def _step(
        self, tag: str, entry: _Entry, now: float, answer: Mapping[str, Any] | None = None
    ) -> bool:
        """Take a step; return False where the user's policy has to be asked first."""
        decision = entry.scaling.step(
            now,
            self._loads.of(tag),
            entry.backend.running,
            entry.backend.target,
            queues=self._loads.queues(tag),
            complete=self._loads.is_complete(now),
            answer=answer,
        )
        self._agenda.at(SCALING, tag, max(entry.scaling.due_at, now + MIN_STEP_S))
        if decision is None:
            return False
        self._keep(tag, entry, decision)
        if decision.target != decision.before:
            entry.backend.rescale(decision.target)
            self._agenda.touch(BACKEND, tag)
        return True

    def _question(self, tag: str, entry: _Entry) -> dict[str, Any]:
        backend, load, config = entry.backend, self._loads.of(tag), entry.scaling.config
        record = backend.record
        stats = {each.tag: each.stats for each in backend.in_state(ReplicaState.RUNNING)}
        return {
            "backend": tag,
            "deployment_name": record.deployment,
            "app_name": record.application,
            "current_num_replicas": backend.running,
            "target_num_replicas": backend.target,
            "total_num_requests": entry.scaling.average,
            "total_queued_requests": load.queued,
            "total_running_requests": load.ongoing,
            "queued_by_router": list(self._loads.queues(tag)),
            "capacity_adjusted_min_replicas": config.min_replicas,
            "capacity_adjusted_max_replicas": config.max_replicas,
            "policy_state": entry.scaling.policy_state,
            "aggregated_metrics": _by_name(stats),
            "running_replicas": sorted(stats)[:MAX_STATS],
            "config": config.model_dump(exclude={"policy"}),
        }

    def _keep(self, tag: str, entry: _Entry, decision: Decision) -> None:
        last = entry.history[-1] if entry.history else None
        same = (
            last is not None
            and decision.target == decision.before == last.decision.target
            and decision.outcome is last.decision.outcome
        )
        if last is not None and same:
            entry.history[-1] = Kept(decision, last.since, last.times + 1)
        else:
            entry.history.append(Kept(decision, decision.at, 1))
            self._log.append((tag, decision))

    def _load_changed(self, tags: set[str]) -> None:
        """Step backends whose load changed, if they rest or have no replica."""
        for tag in tags:
            entry = self._entries.get(tag)
            if entry is not None and (entry.scaling.due_at == NEVER or entry.backend.target == 0):
                self._agenda.touch(SCALING, tag)
        self._agenda.at(LOADS, "", self._loads.check_at)


def _by_name(stats: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return name -> replica -> number, of as many replicas as a question has room for."""
    by_name: dict[str, dict[str, float]] = {}
    left = MAX_STATS
    for replica, numbers in sorted(stats.items()):
        left -= len(numbers)
        if left < 0:
            break
        for name, number in numbers.items():
            by_name.setdefault(name, {})[replica] = number
    return by_name


def _shown(kept: Kept, offset: float) -> dict[str, Any]:
    decision = kept.decision
    return {
        "since": kept.since + offset,
        "at": decision.at + offset,
        "times": kept.times,
        "from": decision.before,
        "to": decision.target,
        "outcome": decision.outcome.value,
        "why": decision.why,
        "inputs": asdict(decision.inputs),
    }
