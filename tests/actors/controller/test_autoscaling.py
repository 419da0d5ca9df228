"""Autoscaling of real replicas under real load: up, down, to zero and from zero."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import pytest

from greenroom import serve
from tests.support.load import GetLoad
from tests.support.systems import RunningSystem, alive, wait_until

pytestmark = pytest.mark.slow

QUICK: dict[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 3,
    "look_back_period_s": 1,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1,
    "downscale_to_zero_delay_s": 1,
}


@serve.deployment(max_ongoing_requests=4, autoscaling_config=QUICK)
class Sleeper:
    async def __call__(self, _request: Any = None) -> str:
        await asyncio.sleep(0.05)
        return str(os.getpid())

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"wanted": 2}


def backend_of(running: RunningSystem) -> dict[str, Any]:
    """Return what ``greenroom status --autoscaling --json`` prints of the one backend."""
    printed = running.greenroom("status", "--autoscaling", "--json").stdout
    (backend,) = json.loads(printed).values()
    return backend  # type: ignore[no-any-return]


def running_now(running: RunningSystem) -> int:
    return len(running.replica_pids())


def test_up_down_to_zero_and_from_zero_without_a_failed_request(own_system):
    own_system.deploy(Sleeper.bind())
    assert running_now(own_system) == 0
    begun = time.monotonic()
    assert own_system.get()[0] == 200
    print(f"from zero: first answer after {time.monotonic() - begun:.3f} s")
    for connections, replicas in [(8, 3), (2, 1), (12, 3)]:
        with GetLoad(own_system.settings.http.port, connections=connections) as load:
            wait_until(
                lambda replicas=replicas: running_now(own_system) == replicas,
                20,
                f"{replicas} replicas at {connections} connections",
            )
            tally = load.stop()
        print(f"{connections} connections: {tally.summary()}")
        assert tally.ok > 0
        assert tally.failures == []
    wait_until(lambda: running_now(own_system) == 0, 20, "no replica when idle")
    wait_until(lambda: "replica" not in dict(own_system.pids()), 20, "and no process of one")
    with GetLoad(own_system.settings.http.port, connections=8) as load:
        wait_until(lambda: running_now(own_system) == 3, 20, "three replicas again")
        tally = load.stop()
    assert tally.failures == []
    backend = backend_of(own_system)
    outcomes = [decision["outcome"] for decision in backend["decisions"]]
    assert {"FROM_ZERO", "UPSCALED", "DOWNSCALED"} <= set(outcomes)
    log = (own_system.settings.logs_dir / "controller.log").read_text()
    assert "0 -> 1 FROM_ZERO: " in log
    shown = own_system.greenroom("status", "--autoscaling").stdout
    assert "FROM_ZERO" in shown
    assert own_system.greenroom("status").returncode == 0
    wait_until(lambda: "replica" not in dict(own_system.pids()), 20, "zero replicas")
    os.kill(own_system.pid_of("controller"), signal.SIGKILL)
    assert own_system.get()[0] == 200, "though the controller is dead"


def test_a_new_controller_keeps_the_scale_and_ends_the_policies_of_the_old(own_system):
    scaling = {**QUICK, "min_replicas": 1, "policy": lambda _context: 3, "downscale_delay_s": 0}
    own_system.deploy(Sleeper.options(autoscaling_config=scaling).bind())
    wait_until(lambda: running_now(own_system) == 3, 20, "three replicas")
    replicas = set(own_system.replica_pids())
    (policy,) = [pid for role, pid in own_system.pids() if role == "policy"]
    controller = own_system.pid_of("controller")
    with GetLoad(own_system.settings.http.port, connections=4) as load:
        os.kill(controller, signal.SIGKILL)
        wait_until(lambda: not alive(policy), 5, "the policy's process went with its controller")
        wait_until(
            lambda: [pid for role, pid in own_system.pids() if role == "policy"], 20, "a new one"
        )
        time.sleep(1)  # in which nothing is to happen
        assert load.stop().failures == []
    wait_until(lambda: set(own_system.replica_pids()) == replicas, 20, "the same replicas")
