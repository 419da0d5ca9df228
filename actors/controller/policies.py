"""Autoscaling policies of users, each in a child process of the controller's with a time limit.

Theory of operation. A backend's policy runs in a process of its own, started at the first question
and kept for the next ones. Each question ends in one answer: what the function returned, or an
error if it raised, took too long, or its process ended. A process that takes too long is killed.
One that has ended is started again for a later question, after a pause that doubles each time it
ends again. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from greenroom.actors.controller.policy_process import HEADER, MAX_FRAME_BYTES, frame
from greenroom.actors.host.records import RunRecords
from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.logs import open_log
from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.actors.runtime.processes import identify
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.autoscaling.config import AutoscalingPolicy
from greenroom.core.backoff import pause_s
from greenroom.core.cluster.cluster import Cluster
from greenroom.core.effects import AskPolicy

logger = logging.getLogger(__name__)

ROLE = "policy"
LOAD_TIMEOUT_S = 30.0  # on top, for the first answer: it imports what the function needs
BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
REAP_POLL_S = 0.01

Answer = dict[str, Any]


class _Question(NamedTuple):
    ask_id: int
    timer: Timer


class _Runner:
    """One policy's process, as far as there is one, and the question that is open."""

    def __init__(self, policy: AutoscalingPolicy) -> None:
        self.policy = policy
        self.child: subprocess.Popen[bytes] | None = None
        self.process: Process | None = None
        self.connection: socket.socket | None = None
        self.buffer = b""
        self.question: _Question | None = None
        self.has_answered = False
        self.failures = 0  # of the process, in a row
        self.start_at = 0.0

    @property
    def limit_s(self) -> float:
        """How long it may take for the answer."""
        return self.policy.timeout_s + (0 if self.has_answered else LOAD_TIMEOUT_S)


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
        backend = self._cluster.backends.get(tag)
        config = backend.autoscaled_by if backend is not None else None
        if config is None:
            return  # deleted in the same turn
        runner = self._runners.get(tag)
        if runner is not None and runner.policy != config.policy:
            self._stop(tag)
            runner = None
        if runner is None:
            runner = self._runners[tag] = _Runner(config.policy)
        if runner.question is not None:
            runner.question.timer.cancel()
        timer = self._loop.call_later(runner.limit_s, lambda: self._timed_out(tag, runner))
        runner.question = _Question(effect.ask_id, timer)
        problem = self._prepare(tag, runner) or self._send(runner, effect.question)
        if problem:
            self._loop.call_later(0, lambda: self._answer(tag, runner, {"error": problem}))

    def tidy(self) -> None:
        """End the processes of backends that have no policy of the user's any more."""
        for tag in list(self._runners):
            backend = self._cluster.backends.get(tag)
            config = backend.autoscaled_by if backend is not None else None
            if config is None or not config.policy.is_custom:
                self._stop(tag)

    def close(self) -> None:
        """End all processes."""
        for backend in list(self._runners):
            self._stop(backend)

    # --- Inside ---------------------------------------------------------------------------------

    def _stop(self, backend: str) -> None:
        """End a backend's process; the answer to its open question is dropped."""
        runner = self._runners.pop(backend)
        if runner.question is not None:
            runner.question.timer.cancel()
            runner.question = None
        self._end(runner)

    def _prepare(self, backend: str, runner: _Runner) -> str:
        if runner.connection is not None:
            return ""
        left_s = runner.start_at - time.monotonic()
        if left_s > 0:
            return f"its process ended; it is started again in {left_s:.0f} s"
        try:
            self._start(backend, runner)
        except OSError as error:
            self._note_failure(runner)
            return f"its process cannot be started: {error}"
        return ""

    def _start(self, backend: str, runner: _Runner) -> None:
        ours, theirs = socket.socketpair()
        code_fd = os.memfd_create("policy")
        try:
            with os.fdopen(code_fd, "wb", closefd=False) as stored:
                stored.write(runner.policy.code)
            file_name = re.sub(r"[^\w.#:-]", "_", backend)
            with os.fdopen(open_log(self._settings, f"policy-{file_name}"), "ab") as output:
                fds = (theirs.fileno(), code_fd)
                arguments = [*map(str, fds), str(os.getpid())]
                runner.child = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "greenroom.actors.controller.policy_process",
                        *arguments,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=fds,
                    start_new_session=True,  # so that what it starts ends with it
                )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(code_fd)
        ours.setblocking(False)
        runner.connection, runner.buffer, runner.has_answered = ours, b"", False
        self._loop.asyncio.add_reader(ours, self._loop.guarded, self._readable, backend, runner)
        runner.process = process = identify(runner.child.pid)
        if process is not None:
            self._records.add(process, ROLE)
        logger.info("started the autoscaling policy of %s, pid %d", backend, runner.child.pid)

    def _send(self, runner: _Runner, context: dict[str, Any]) -> str:
        question = {
            "context": {**context, "current_time": time.time()},
            "kwargs": runner.policy.policy_kwargs,
        }
        body = frame(json.dumps(question).encode())
        assert runner.connection is not None, "made by _prepare"
        try:
            sent = runner.connection.send(body)
        except OSError as error:
            return f"its process takes no question: {error}"
        return "" if sent == len(body) else "its process takes no question"

    def _readable(self, backend: str, runner: _Runner) -> None:
        if runner.connection is None:
            return
        try:
            data = runner.connection.recv(MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        runner.buffer += data
        size = HEADER.size
        if len(runner.buffer) >= size:
            (length,) = HEADER.unpack(runner.buffer[:size])
            if length > MAX_FRAME_BYTES:
                data = b""  # user code wrote into the connection
            elif len(runner.buffer) >= size + length:
                body, runner.buffer = (
                    runner.buffer[size : size + length],
                    runner.buffer[size + length :],
                )
                runner.has_answered, runner.failures = True, 0
                self._answer(backend, runner, _decoded(body))
        if not data:
            self._lost(backend, runner, "its process ended")

    def _timed_out(self, backend: str, runner: _Runner) -> None:
        self._lost(backend, runner, f"no answer within {runner.limit_s:g} s; it was killed")

    def _lost(self, backend: str, runner: _Runner, why: str) -> None:
        self._note_failure(runner)
        self._end(runner)
        self._answer(backend, runner, {"error": why})

    def _note_failure(self, runner: _Runner) -> None:
        runner.failures += 1
        runner.start_at = time.monotonic() + pause_s(runner.failures, BACKOFF_S, MAX_BACKOFF_S)

    def _answer(self, backend: str, runner: _Runner, answer: Answer) -> None:
        question, runner.question = runner.question, None
        if question is not None:
            question.timer.cancel()
            now = time.monotonic()
            self._cluster.autoscaler.policy_answered(backend, question.ask_id, answer, now)
            self._changed()

    def _end(self, runner: _Runner) -> None:
        if runner.connection is not None:
            self._loop.asyncio.remove_reader(runner.connection)
            runner.connection.close()
            runner.connection = None
        child, runner.child = runner.child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        process, runner.process = runner.process, None
        if process is not None:
            self._records.remove(process)
            self._loop.watch_process(process, lambda: self._reap(child))
        else:
            self._reap(child)  # it had ended before it could be identified

    def _reap(self, child: subprocess.Popen[bytes]) -> None:
        """Reap a child, which would stay a zombie, once the last of its threads has ended."""
        if child.poll() is None:
            self._loop.call_later(REAP_POLL_S, lambda: self._reap(child))


def _decoded(body: bytes) -> Answer:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"error": "its answer is no JSON object"}
