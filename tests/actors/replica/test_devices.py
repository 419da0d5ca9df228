"""GPUs in real processes: found by nvidia-smi, shown to user code before it is imported."""

from __future__ import annotations

import gc
import json
import os
import signal
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.replica.replica import COLLECT_AFTER
from greenroom.serve.exceptions import DeployFailedError
from tests.support.systems import RunningSystem, running_system, wait_until

SEEN = """
import os

AT_IMPORT = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
"""


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpus")
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '0\\n1\\n2\\n3\\n'\n")
    smi.chmod(0o755)
    (folder / "code").mkdir()
    (folder / "code" / "seen.py").write_text(SEEN)
    path = f"{folder}:{os.environ['PATH']}"
    with running_system(folder / "state", PATH=path, GREENROOM_NUM_CPUS="8") as system:
        yield system


@serve.deployment
class Device:
    def __call__(self) -> dict[str, Any]:
        import seen  # type: ignore[import-not-found]  # noqa: PLC0415  # of its working_dir

        rank = serve.get_replica_context()
        return {
            "gpu": seen.AT_IMPORT,
            "pid": os.getpid(),
            "rank": rank.rank.rank,
            "of": rank.world_size,
        }


def replicas(system: RunningSystem, name: str) -> list[dict[str, Any]]:
    deployment: dict[str, Any] = system.status()["applications"][name]["deployments"]["Device"]
    return [each for each in deployment["replicas"] if each["state"] == "RUNNING"]


def deploy(system: RunningSystem, name: str, replicas: int, num_gpus: float) -> Any:
    code = system.settings.state_dir.parent / "code"
    app = Device.options(num_replicas=replicas, actor_options={"num_gpus": num_gpus}).bind()
    env = {"working_dir": str(code)}
    return serve.run(app, name=name, route_prefix=None, runtime_env=env)


def test_replicas_see_their_gpus_alone_also_after_a_kill(gpus):
    with gpus.as_default():
        whole = deploy(gpus, "whole", 1, 2)
        shares = deploy(gpus, "shares", 3, 0.5)
        assert whole.remote().result(10)["gpu"] == "0,1"

        def found() -> dict[int, str]:
            seen = [shares.remote().result(10) for _ in range(12)]
            return {each["pid"]: each["gpu"] for each in seen}

        assert set(found().values()) <= {"2", "3"}
        assert [each["devices"] for each in replicas(gpus, "whole")] == [{"num_gpus": [0, 1]}]
        held = sorted(each["devices"]["num_gpus"] for each in replicas(gpus, "shares"))
        assert held == [[2], [2], [3]]
        (host,) = gpus.status()["hosts"]
        assert host["resources"]["num_gpus"]["devices"] == [1, 1, 1, 0.5]
        pid = replicas(gpus, "shares")[0]["pid"]
        os.kill(pid, signal.SIGKILL)

        def is_back() -> bool:
            now = replicas(gpus, "shares")
            return len(now) == 3 and pid not in {each["pid"] for each in now}

        wait_until(is_back, 10, "another replica runs")
        held = sorted(each["devices"]["num_gpus"] for each in replicas(gpus, "shares"))
        assert held == [[2], [2], [3]]
        serve.delete("whole")
        serve.delete("shares")
        wait_until(
            lambda: gpus.status()["hosts"][0]["resources"]["num_gpus"]["devices"] == [0] * 4,
            10,
            "all are given back",
        )


def test_ranks_follow_the_number_of_replicas(gpus):
    def visible(handle: Any) -> dict[int, int]:
        seen = [handle.remote().result(10) for _ in range(20)]
        return {each["rank"]: each["of"] for each in seen}

    with gpus.as_default():
        handle = deploy(gpus, "ranked", 3, 0)
        assert handle.remote().result(10)["gpu"] == "all"
        wait_until(lambda: visible(handle) == {0: 3, 1: 3, 2: 3}, 10, "ranks of three")
        handle = deploy(gpus, "ranked", 2, 0)
        wait_until(lambda: visible(handle) == {0: 2, 1: 2}, 10, "ranks of two")
        serve.delete("ranked")


def test_gpus_that_the_variable_of_the_host_does_not_name_fail_the_start(tmp_path):
    environ = {"CUDA_VISIBLE_DEVICES": "GPU-a", "GREENROOM_NUM_GPUS": "2"}
    with running_system(tmp_path / "state", **environ) as system, system.as_default():
        app = Device.options(actor_options={"num_gpus": 2}, max_constructor_retry_count=1).bind()
        with pytest.raises(DeployFailedError, match="not among CUDA_VISIBLE_DEV"):
            serve.run(app, route_prefix=None)
        assert "not among" in json.dumps(system.status()["applications"])


@serve.deployment
def threads_of_libraries() -> str:
    return os.environ["OMP_NUM_THREADS"]


def test_libraries_compute_on_as_many_threads_as_a_replica_has_cpus(gpus):
    def visible(**actor_options: Any) -> Any:
        app = threads_of_libraries.options(actor_options=actor_options).bind()
        return serve.run(app, name="threads", route_prefix=None).remote().result(10)

    with gpus.as_default():
        assert visible() == "1"
        assert visible(num_cpus=0.5) == "1"
        assert visible(num_cpus=2) == "2"
        set_by_user = {"env_vars": {"OMP_NUM_THREADS": "7"}}
        assert visible(num_cpus=2, runtime_env=set_by_user) == "7"


@serve.deployment
def collects_after() -> int:
    return gc.get_threshold()[0]


def test_replicas_seldom_look_for_garbage(gpus):
    with gpus.as_default():
        handle = serve.run(collects_after.bind(), name="threads", route_prefix=None)
        assert handle.remote().result(10) == COLLECT_AFTER
