"""Autoscaling policies of users, each in a child process of the controller's with a time limit.

Theory of operation. A backend's policy runs in a process of its own, started at the first question
and kept for the next ones. Each question ends in one answer: what the function returned, or an
error if it raised, took too long, or its process ended (see actors/plugins/child.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from greenroom.actors.plugins.child import LOAD_TIMEOUT_S, Child
from greenroom.actors.plugins.program import POLICY
from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.autoscaling.config import AutoscalingPolicy
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.effects import AskPolicy

Answer = dict[str, Any]


class _Question(NamedTuple):
    ask_id: int
    timer: Timer


class _Runner:
    """One policy's process, and the question that is open."""

    def __init__(self, policy: AutoscalingPolicy, child: Child) -> None:
        self.policy = policy
        self.child = child
        self.question: _Question | None = None

    @property
    def limit_s(self) -> float:
        """How long it may take for the answer."""
        return self.policy.timeout_s + (0 if self.child.has_answered else LOAD_TIMEOUT_S)


class Policies:
    """All policies' processes. ``changed`` is called after each answer that the cluster got."""

    def __init__(
        self,
        loop: Loop,
        cluster: Cluster,
        settings: HostSettings,
        records: RunRecords,
        changed: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._cluster = cluster
        self._settings = settings
        self._records = records
        self._changed = changed
        self._runners: dict[str, _Runner] = {}

    def ask(self, effect: AskPolicy) -> None:
        """Ask a backend's policy; the answer to an earlier question is dropped."""
        tag = effect.backend
        backend = self._cluster.state.backends.get(tag)
        config = backend.autoscaled_by if backend is not None else None
        if config is None:
            return  # deleted in the same turn
        runner = self._runners.get(tag)
        if runner is not None and runner.policy != config.policy:
            self._stop(tag)
            runner = None
        if runner is None:
            runner = self._runners[tag] = _Runner(config.policy, self._child(tag, config.policy))
        if runner.question is not None:
            runner.question.timer.cancel()
        limit_s = runner.limit_s
        late = f"no answer within {limit_s:g} s; it was killed"
        timer = self._loop.call_later(limit_s, lambda: runner.child.fail(late))
        runner.question = _Question(effect.ask_id, timer)
        question = {
            "context": {**effect.question, "current_time": time.time()},
            "kwargs": config.policy.policy_kwargs,
        }
        if problem := runner.child.send(json.dumps(question).encode()):
            self._loop.call_later(0, lambda: self._answer(tag, runner, {"error": problem}))

    def tidy(self) -> None:
        """End the processes of backends that have no policy of the user's any more."""
        for tag in list(self._runners):
            backend = self._cluster.state.backends.get(tag)
            config = backend.autoscaled_by if backend is not None else None
            if config is None or not config.policy.is_custom:
                self._stop(tag)

    def close(self) -> None:
        """End all processes."""
        for backend in list(self._runners):
            self._stop(backend)

    # --- Inside ---------------------------------------------------------------------------------

    def _child(self, backend: str, policy: AutoscalingPolicy) -> Child:
        return Child(
            self._loop,
            self._settings,
            self._records,
            role=POLICY,
            name=backend,
            code=policy.code,
            on_frame=lambda body: self._answer(backend, self._runners[backend], _decoded(body)),
            on_end=lambda why: self._answer(backend, self._runners[backend], {"error": why}),
        )

    def _stop(self, backend: str) -> None:
        """End a backend's process; the answer to its open question is dropped."""
        runner = self._runners.pop(backend)
        if runner.question is not None:
            runner.question.timer.cancel()
            runner.question = None
        runner.child.end()

    def _answer(self, backend: str, runner: _Runner, answer: Answer) -> None:
        question, runner.question = runner.question, None
        if question is not None:
            question.timer.cancel()
            now = time.monotonic()
            self._cluster.autoscaler.policy_answered(backend, question.ask_id, answer, now)
            self._changed()


def _decoded(body: bytes) -> Answer:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"error": "its answer is no JSON object"}
