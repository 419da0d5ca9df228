"""Autoscaling policies of users, each in a child process of the controller's with a time limit.

Theory of operation. A backend's policy runs in a process of its own, started at the first question
and kept for the next ones. Each question ends in one answer: what the function returned, or an
error if it raised, took too long, or its process ended (see actors/plugins/child.py).
"""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Callable
from functools import partial

from greenroom.actors.plugins.child import LOAD_TIMEOUT_S, Answer, Child
from greenroom.actors.plugins.program import POLICY
from greenroom.actors.runtime.loop import Loop, resolve
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.autoscaling.settings import AutoscalingConfig, AutoscalingPolicy
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.effects import AskPolicy


class _Runner:
    """One policy's process, and the answer that is awaited."""

    def __init__(self, loop: Loop, policy: AutoscalingPolicy, make_child: Callable[..., Child]):
        self._loop = loop
        self.policy = policy
        self._child = make_child(
            on_answer=lambda answer: resolve(self._answer, answer),
            on_end=lambda why: resolve(self._answer, {"error": why}),
        )
        self._answer: asyncio.Future[Answer] = loop.asyncio.create_future()

    async def ask(self, question: bytes) -> Answer:
        """Return the answer; who has asked before gets none any more."""
        self._answer.cancel()
        self._answer = self._loop.asyncio.create_future()
        limit_s = self.policy.timeout_s + (0 if self._child.has_answered else LOAD_TIMEOUT_S)
        late = f"no answer within {limit_s:g} s; it was killed"
        timer = self._loop.call_later(limit_s, lambda: self._child.fail(late))
        if problem := self._child.send(question):
            resolve(self._answer, {"error": problem})
        try:
            return await self._answer
        finally:
            timer.cancel()

    def end(self) -> None:
        """End the process, and drop the answer that is awaited."""
        self._answer.cancel()
        self._child.end()


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
        config = self._config_of(tag)
        if config is None:
            return  # deleted in the same turn
        policy, runner = config.policy, self._runners.get(tag)
        if runner is None or runner.policy != policy:
            self._end(tag)
            for_all = partial(Child, self._loop, self._settings, self._records, role=POLICY)
            code = policy.code if policy.named is None else pickle.dumps((policy.named,))
            make_child = partial(for_all, name=tag, code=code)
            runner = self._runners[tag] = _Runner(self._loop, policy, make_child)
        self._loop.start(self._ask(effect, runner))

    async def _ask(self, effect: AskPolicy, runner: _Runner) -> None:
        if self._runners.get(effect.backend) is not runner:
            return  # it was ended in the same turn
        context = {**effect.question, "current_time": time.time()}
        question = {"context": context, "kwargs": runner.policy.policy_kwargs}
        answer, now = await runner.ask(json.dumps(question).encode()), time.monotonic()
        self._cluster.autoscaler.policy_answered(effect.backend, effect.ask_id, answer, now)
        self._changed()

    def tidy(self) -> None:
        """End the processes of backends that have no policy of the user's any more."""
        for tag in list(self._runners):
            config = self._config_of(tag)
            if config is None or not config.policy.is_custom:
                self._end(tag)

    def close(self) -> None:
        """End all processes."""
        for tag in list(self._runners):
            self._end(tag)

    def _config_of(self, tag: str) -> AutoscalingConfig | None:
        backend = self._cluster.state.backends.get(tag)
        return None if backend is None else backend.autoscaled_by

    def _end(self, tag: str) -> None:
        if (runner := self._runners.pop(tag, None)) is not None:
            runner.end()
