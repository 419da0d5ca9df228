"""Autoscaling policies of users': a process for each, which can neither block nor end ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from greenroom.actors.controller import policies as policies_module
from greenroom.actors.controller.policies import Policies
from greenroom.actors.plugins import child as child_module
from greenroom.actors.plugins.child import Child
from greenroom.actors.plugins.program import POLICY, frame
from greenroom.actors.runtime.loop import Loop
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.autoscaling.settings import AutoscalingConfig
from greenroom.core.effects import AskPolicy
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.code.packing import packed_changes
from greenroom.serve.config import AutoscalingContext
from tests.support.lone_loop import LoneTransport
from tests.support.systems import alive, wait_until

CONTEXT = {
    "backend": "b",
    "deployment_name": "d",
    "app_name": "a",
    "current_num_replicas": 2,
    "target_num_replicas": 3,
    "total_num_requests": 7.5,
    "total_queued_requests": 4,
    "total_running_requests": 5,
    "queued_by_router": [4],
    "capacity_adjusted_min_replicas": 1,
    "capacity_adjusted_max_replicas": 9,
    "policy_state": {"seen": 1},
    "config": {"max_replicas": 9},
}


class Asker:
    """Policies on an event loop of the test's, with a cluster that keeps what it is told."""

    def __init__(self, folder: Path) -> None:
        self.asyncio = asyncio.new_event_loop()
        self.answers: list[tuple[int, Any]] = []
        self.cluster = SimpleNamespace(
            state=SimpleNamespace(backends={}),
            autoscaler=SimpleNamespace(policy_answered=self._answered),
        )
        self.settings = settings = read_settings({"GREENROOM_STATE_DIR": str(folder)})
        settings.logs_dir.mkdir(parents=True)
        transport: Any = LoneTransport(self.asyncio)
        self.loop = loop = Loop(transport, lambda _intent: None)  # it sends nothing
        self.records = RunRecords(settings.run_dir)
        self.policies = Policies(loop, self.cluster, settings, self.records, lambda: None)  # type: ignore[arg-type]
        self.logs = settings.logs_dir
        self.context = dict(CONTEXT)
        self._ask_id = 0
        self._started: set[int] = set()

    def _answered(self, _tag: str, ask_id: int, answer: Any, _now: float) -> None:
        self.answers.append((ask_id, answer))

    def set_policy(self, policy: Any) -> None:
        config = {"autoscaling_config": {"policy": policy}}
        changes = packed_changes("backend 'b'", config)
        autoscaled_by = AutoscalingConfig(**changes["autoscaling_config"])
        self.cluster.state.backends["b"] = SimpleNamespace(autoscaled_by=autoscaled_by)

    def put(self, ask_id: int) -> None:
        self.policies.ask(AskPolicy("b", ask_id, dict(self.context)))

    def ask(self) -> dict[str, Any]:
        self._ask_id += 1
        ask_id = self._ask_id
        self.put(ask_id)
        self.run_until(lambda: any(each == ask_id for each, _ in self.answers))
        return next(answer for each, answer in self.answers if each == ask_id)

    def run_until(self, condition: Callable[[], Any], timeout_s: float = 30) -> None:
        async def poll() -> None:
            is_over = False
            while not is_over:
                self._started.update(self.pids())
                is_over = condition()
                await asyncio.sleep(0.005)

        self.asyncio.run_until_complete(asyncio.wait_for(poll(), timeout_s))

    def pids(self) -> list[int]:
        return [process.pid for process in self.records.with_role("policy")]

    def close(self) -> None:
        self.policies.close()
        self.run_until(lambda: not (self.pids() or any(map(psutil.pid_exists, self._started))))
        self.asyncio.close()


@pytest.fixture
def asker(tmp_path):
    asker = Asker(tmp_path)
    yield asker
    asker.close()


def test_a_policy_gets_the_context_and_its_arguments_and_may_have_a_state(asker):
    def policy(context: AutoscalingContext, step: int) -> Any:
        assert context.config.max_replicas == 9
        assert abs(context.current_time - time.time()) < 60
        seen = context.policy_state["seen"]
        return context.total_num_requests / 2 + step, {"seen": seen + context.queued_by_router[0]}

    asker.set_policy({"policy_function": policy, "policy_kwargs": {"step": 3}})
    assert asker.ask() == {"replicas": 6.75, "state": {"seen": 5}}
    (pid,) = asker.pids()
    assert asker.ask() == {"replicas": 6.75, "state": {"seen": 5}}
    assert asker.pids() == [pid], "one process serves all questions"


@pytest.mark.parametrize(("queued", "wanted"), [([6, 6], 5), ([5, 1], 3), ([1, 0], 2), ([], 2)])
def test_queue_length_goes_by_what_routers_queue_on_average(asker, queued, wanted):
    asker.set_policy({"policy_function": "queue_length"})
    asker.context = CONTEXT | {"queued_by_router": queued}
    assert asker.ask() == {"replicas": wanted}


def test_the_thresholds_of_queue_length_can_be_set(asker):
    kwargs = {"scale_up_threshold": 3, "scale_up_num_replicas": 4}
    asker.set_policy({"policy_function": "queue_length", "policy_kwargs": kwargs})
    assert asker.ask() == {"replicas": 7}
    with pytest.raises(InvalidRequestError, match=r"policy_kwargs={'up': 1}: got .* 'up'"):
        asker.set_policy({"policy_function": "queue_length", "policy_kwargs": {"up": 1}})
    policy = {"policy_function": lambda context: 1, "policy_kwargs": {"up": 1}}
    with pytest.raises(InvalidRequestError, match=r"policy_kwargs: got .* 'up'"):
        asker.set_policy(policy)


def test_queue_length_needs_no_code_as_where_the_admin_api_names_it(asker):
    autoscaled_by = AutoscalingConfig(policy="queue_length")
    asker.cluster.state.backends["b"] = SimpleNamespace(autoscaled_by=autoscaled_by)
    assert asker.ask() == {"replicas": 3}


def test_numbers_of_numpy_are_numbers(asker):
    def policy(_context: Any) -> Any:
        return np.int64(4)

    asker.set_policy(policy)
    assert asker.ask() == {"replicas": 4}


def boom(_context: Any) -> int:
    raise ZeroDivisionError("no load, no replicas")


def leave(_context: Any) -> int:
    sys.exit(3)


def vanish(_context: Any) -> int:
    os._exit(3)


def strange(_context: Any) -> Any:
    return object()


async def coroutine(_context: Any) -> int:
    return 1


def huge(_context: Any) -> Any:
    return 1, "x" * 200_000


def deep(_context: Any) -> Any:
    state: list[Any] = []
    for _ in range(100_000):
        state = [state]
    return 1, state


class Odd(dict[str, Any]):
    def items(self) -> Any:
        raise LookupError("no items today")


def odd(_context: Any) -> Any:
    return 1, Odd(a=1)


class MuteError(Exception):
    def __str__(self) -> str:
        raise LookupError("no words")


class Odder(dict[str, Any]):
    def items(self) -> Any:
        raise MuteError


def odder(_context: Any) -> Any:
    return 1, Odder(a=1)


def hang(_context: Any) -> int:
    while True:
        time.sleep(60)


def scribble(_context: Any) -> int:
    for fd in range(3, 20):
        try:
            os.write(fd, b"\xff" * 9)
        except OSError:
            continue
    os._exit(0)


def nest(_context: Any) -> int:
    """Write what no parser reads, as an answer."""
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            os.write(fd, frame(b"[" * 20_000))
    return 1


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (boom, "ZeroDivisionError: no load, no replicas"),
        (leave, "SystemExit: 3"),
        (vanish, "its process ended"),
        (strange, "its answer is not JSON-able: TypeError: Object of type object"),
        (deep, "its answer is not JSON-able: RecursionError: "),
        (odd, "its answer is not JSON-able: LookupError: no items today"),
        (odder, "its answer is not JSON-able: "),
        (coroutine, "it is async; a policy is a plain function"),
        (huge, "at most 65536 are let through"),
        (scribble, "its process ended"),
        (nest, "its answer is no JSON object"),
    ],
)
def test_what_goes_wrong_is_an_error_that_says_what(asker, policy, message):
    asker.set_policy(policy)
    assert message in asker.ask()["error"]


def test_one_that_is_not_done_in_time_is_killed_with_what_it_started_and_starts_again_later(
    asker, monkeypatch
):
    monkeypatch.setattr(policies_module, "LOAD_TIMEOUT_S", 1.0)
    asker.set_policy({"policy_function": hang, "timeout_s": 0.1})
    begun = time.monotonic()
    asker.put(99)
    asker.run_until(asker.pids)
    (pid,) = asker.pids()
    asker.run_until(lambda: asker.answers)
    assert asker.answers == [(99, {"error": "no answer within 1.1 s; it was killed"})]
    assert time.monotonic() - begun < 5
    wait_until(lambda: not alive(pid), 5, "the process is gone")
    # Or in 0 s, where the machine has taken its time for this.
    assert "its process ended; it is started again in " in asker.ask()["error"]
    assert asker.pids() == []


def answers_once(ctx: AutoscalingContext) -> Any:
    """Answer the first question, and end at the second."""
    if ctx.policy_state.get("has_answered"):
        os._exit(1)
    return 1, {"has_answered": True}


@pytest.mark.parametrize("stable_s", [0.0, 1000.0])
def test_one_that_answers_and_dies_waits_ever_longer_unless_it_ran_for_a_while(
    asker, monkeypatch, stable_s
):
    monkeypatch.setattr(child_module, "STABLE_S", stable_s)
    failures: list[int] = []  # in a row, at each pause
    monkeypatch.setattr(child_module, "pause_s", lambda count, *_: failures.append(count) or 0.0)
    asker.set_policy(answers_once)
    answers: list[Any] = []
    child = Child(
        asker.loop,
        asker.settings,
        asker.records,
        role=POLICY,
        name="b",
        code=asker.cluster.state.backends["b"].autoscaled_by.policy.code,
        on_answer=answers.append,
        on_end=lambda _why: None,
    )

    def ask(state: dict[str, Any]) -> None:
        context = {**CONTEXT, "policy_state": state, "current_time": 0.0}
        assert child.send(json.dumps({"context": context, "kwargs": {}}).encode()) == ""

    for times in range(1, 5):
        ask({})
        asker.run_until(lambda times=times: len(answers) == times)
        ask(answers[-1]["state"])
        asker.run_until(lambda times=times: len(failures) == times)
    assert failures == ([1] * 4 if stable_s == 0 else [1, 2, 3, 4])


def test_one_that_came_without_its_code_says_so(asker):
    config = AutoscalingConfig(policy="mine:policy")  # not by way of serve
    asker.cluster.state.backends["b"] = SimpleNamespace(autoscaled_by=config)
    assert "it came without its code" in asker.ask()["error"]


def test_a_backend_that_is_gone_is_not_asked(asker):
    asker.put(1)
    assert (asker.pids(), asker.answers) == ([], [])


def test_nothing_here_waits_for_a_policy(asker):
    asker.set_policy(hang)
    begun = time.monotonic()
    asker.put(1)
    assert time.monotonic() - begun < 5, "it never answers"
    asker.run_until(asker.pids)
    asker.cluster.state.backends.clear()
    asker.policies.tidy()
    assert asker.pids() == []
    assert asker.answers == []


def test_changed_code_runs_in_a_new_process(asker):
    asker.set_policy(lambda _context: 1)
    assert asker.ask() == {"replicas": 1}
    (old,) = asker.pids()
    asker.set_policy(lambda _context: 2)
    assert asker.ask() == {"replicas": 2}
    (new,) = asker.pids()
    assert new != old
    wait_until(lambda: not alive(old), 5, "the old process is gone")


def test_what_a_policy_prints_is_in_a_log_of_its_own(asker):
    def policy(_context: Any) -> int:
        print("thinking")
        sys.stdout.flush()
        raise RuntimeError("of nothing")

    asker.set_policy(policy)
    assert "of nothing" in asker.ask()["error"]
    log = (asker.logs / "policy-b.log").read_text()
    assert "thinking" in log
    assert "Traceback" in log
