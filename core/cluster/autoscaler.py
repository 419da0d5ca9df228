"""Autoscaling of all backends: which step is due, what was decided, which policy to ask.

Theory of operation. A backend that has come to rest is skipped until its load changes, so an idle
cluster costs nothing. A user's policy is asked through an effect, and its answer completes the
step. Each backend has at most one open question; meanwhile its steps still record the load.

Each backend keeps a short history of decisions. A decision with another outcome or target adds an
entry, which is also logged; any other decision updates the last entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from greenroom.core.agenda import NEVER, Agenda
from greenroom.core.autoscaling.decision import LOADS, Decision, Kept, Loads, Scaling
from greenroom.core.effects import AskPolicy, Effect
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.replicas import ReplicaState
from greenroom.core.records import BACKEND

SCALING = "scaling"  # the kind of the keys of backends
MIN_STEP_S = 0.01  # between two steps, whatever happens
MAX_STATS = 1000  # numbers of replicas in a question
ASK_AGAIN_S = 120.0  # a question this old is asked again; the shell answers within its time limit


class Autoscaler:
    """All backends with an autoscaling_config. ``now`` is always monotonic seconds."""

    def __init__(self, loads: Loads, agenda: Agenda, backends: Mapping[str, Backend]) -> None:
        self._loads = loads
        self._agenda = agenda
        self._backends = backends
        self._scalings: dict[str, Scaling] = {}
        self._log: list[tuple[str, Decision]] = []

    def watch(self, tag: str) -> None:
        """Scale a backend as its settings say; to be called after each change of it; cheap."""
        scaling, config = self._scalings.get(tag), self._backends[tag].autoscaled_by
        if config is None:
            if self._scalings.pop(tag, None) is not None:
                self._agenda.drop(SCALING, tag, (LOADS, tag))
        elif scaling is None:
            self._scalings[tag] = Scaling(config)
            self._agenda.touch(SCALING, tag)
        elif scaling.config is not config:
            scaling.reconfigure(config)
            self._agenda.touch(SCALING, tag)

    # --- Steps ----------------------------------------------------------------------------------

    def reconcile(self, tag: str, now: float) -> list[Effect]:
        """Take a backend's step."""
        scaling = self._scalings.get(tag)
        if scaling is None or self._step(tag, scaling, now):
            return []
        if scaling.asked_at is not None and now < scaling.asked_at + ASK_AGAIN_S:
            return []
        scaling.asked += 1
        scaling.asked_at = now
        return [AskPolicy(tag, scaling.asked, self._question(tag, scaling))]

    def policy_answered(self, tag: str, ask_id: int, answer: Mapping[str, Any], now: float) -> None:
        """End a step with the policy's answer.

        ``answer`` has ``replicas`` and may have ``state``, or it has ``error``. It is ignored when
        the question is not open any more.
        """
        scaling = self._scalings.get(tag)
        if scaling is not None and scaling.asked_at is not None and scaling.asked == ask_id:
            scaling.asked_at = None
            self._step(tag, scaling, now, answer)

    def take_log(self) -> list[tuple[str, Decision]]:
        """Return the entries of all histories that are new since the last call."""
        log, self._log = self._log, []
        return log

    # --- For people -----------------------------------------------------------------------------

    def policy_failure(self, tag: str) -> str:
        """Return why a backend's policy had no usable answer when last asked; else ""."""
        return self._scalings[tag].policy_failure if tag in self._scalings else ""

    def describe(self, tag: str, now: float, wall_now: float) -> dict[str, Any]:
        """Return load and decisions of a backend as plain values; times as seconds of the epoch."""
        scaling = self._scalings.get(tag)
        if scaling is None:
            return {}
        load = self._loads.of(tag)
        return {
            "queued": load.queued,
            "ongoing": load.ongoing,
            "average_load": scaling.average,
            "policy_failures": scaling.policy_failures,
            "decisions": [_shown(kept, wall_now - now) for kept in scaling.history],
        }

    # --- Inside ---------------------------------------------------------------------------------

    def _step(
        self, tag: str, scaling: Scaling, now: float, answer: Mapping[str, Any] | None = None
    ) -> bool:
        """Take a step; return False where the user's policy has to be asked first."""
        backend = self._backends[tag]
        decision = scaling.step(
            now,
            self._loads.of(tag),
            backend.running,
            backend.target,
            complete=self._loads.is_complete(now),
            answer=answer,
        )
        self._agenda.at(SCALING, tag, max(scaling.due_at, now + MIN_STEP_S))
        if scaling.due_at == NEVER or 0 in (backend.target, decision and decision.target):
            self._agenda.upon((LOADS, tag), SCALING, tag)
        if decision is None:
            return False
        if scaling.keep(decision):
            self._log.append((tag, decision))
        if decision.target != decision.before:
            backend.rescale(decision.target)
            self._agenda.touch(BACKEND, tag)
        return True

    def _question(self, tag: str, scaling: Scaling) -> dict[str, Any]:
        backend, load, config = self._backends[tag], self._loads.of(tag), scaling.config
        record = backend.record
        stats = {each.tag: each.stats for each in backend.in_state(ReplicaState.RUNNING)}
        return {
            "backend": tag,
            "deployment_name": record.deployment,
            "app_name": record.application,
            "current_num_replicas": backend.running,
            "target_num_replicas": backend.target,
            "total_num_requests": scaling.average,
            "total_queued_requests": load.queued,
            "total_running_requests": load.ongoing,
            "queued_by_router": list(self._loads.queues(tag)),
            "capacity_adjusted_min_replicas": config.min_replicas,
            "capacity_adjusted_max_replicas": config.max_replicas,
            "policy_state": scaling.policy_state,
            "aggregated_metrics": _by_name(stats),
            "running_replicas": sorted(stats)[:MAX_STATS],
            "config": config.model_dump(exclude={"policy"}),
        }


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
