"""Replicas that have done enough are replaced, over a real system; their clients notice nothing."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.replica.wear import CHECK_S, memory_bytes
from greenroom.core.errors import ReplicaUnavailableError
from tests.support.load import GetLoad
from tests.support.programs import cannot_run
from tests.support.systems import RunningSystem, wait_until

MIB = 2**20


class Worker:
    """Answers with its pid; keeps so many bytes for each query that asks for it."""

    def __init__(self) -> None:
        self.kept: list[bytearray] = []

    def __call__(self, request: Any = None) -> str:
        size = int(request.query_params.get("keep", 0)) if request is not None else 0
        if size:
            self.kept.append(bytearray(os.urandom(1) * size))
        return str(os.getpid())


class Dying:
    """Says how long its queries live: until its memory is full, or it ends for another reason."""

    def __init__(self) -> None:
        self.kept: list[bytearray] = []

    def __call__(self, request: Any) -> str:
        return self.end(request.query_params["of"])

    def end(self, of: str) -> str:
        if of == "nothing":
            return str(os.getpid())
        if of == "its code":
            os._exit(3)
        if of == "a signal":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # of memory, by its own watch or the kernel
            self.kept.append(bytearray(os.urandom(1) * 20 * MIB))
            time.sleep(0.02)

    def end_amid(self, of: str) -> Iterator[str]:
        yield "begun"
        yield self.end(of)


@pytest.fixture
def worker(client: serve.Client, name: str) -> Iterator[Any]:
    tag = f"{name}:v1"

    def deploy(**config: Any) -> str:
        client.wait_for_goal(client.create_backend(tag, Worker, config=config), 20)
        client.create_endpoint(name, backend=tag, route=f"/{name}")
        return tag

    yield deploy
    client.delete_endpoint(name)
    client.wait_for_goal(client.delete_backend(tag, force=True), 20)


@pytest.mark.parametrize("config", [{"max_queries": 20}, {"max_age_s": 1.5}])
def test_a_worn_replica_is_replaced_without_a_failed_request(
    config: dict[str, Any],
    worker: Any,
    running: RunningSystem,
    name: str,
) -> None:
    tag = worker(**config)
    first = running.get(f"/{name}")[1]
    with GetLoad(running.settings.http.port, f"/{name}", 1) as load:
        wait_until(lambda: running.get(f"/{name}")[1] != first, 30, "its successor")
        log = (running.settings.logs_dir / "replica.log").read_text()
        assert re.search(rf"{tag}#\w+ is to be replaced: {next(iter(config))}: it has", log)
    assert load.tally.ok > 0
    assert load.tally.failures == []


def test_a_replica_that_leaks_is_replaced_and_one_that_leaks_fast_ends_at_once(
    worker: Any, running: RunningSystem, name: str
) -> None:
    limit = memory_bytes() // MIB + 200
    worker(max_memory_bytes=limit * MIB, num_replicas=1)

    def pid() -> bytes:
        return running.get(f"/{name}")[1]

    first = pid()
    running.get(f"/{name}?keep={limit * MIB}")
    wait_until(lambda: pid() != first, 30, "its successor")

    second = pid()
    running.get(f"/{name}?keep={2 * limit * MIB}")
    wait_until(lambda: not Path(f"/proc/{int(second)}").exists(), 30, "its end")
    wait_until(lambda: pid().isdigit() and pid() != second, 30, "its successor")
    log = (running.settings.logs_dir / "replica.log").read_text()
    assert "ends: out of memory: it has" in log


class OnGpus:
    """Has NVML of its own making; ``pynvml`` is a module of nvidia-ml-py."""

    def __init__(self, nvml: str) -> None:
        self.used = 10 * MIB
        if nvml == "none":
            return
        module: Any = sys.modules.setdefault("pynvml", ModuleType("pynvml"))
        module.NVMLError = ArithmeticError
        module.nvmlInit = lambda: None
        module.nvmlDeviceGetCount = lambda: 2
        module.nvmlDeviceGetHandleByIndex = lambda index: index
        module.nvmlDeviceGetComputeRunningProcesses = self.processes
        if nvml == "broken":
            module.nvmlInit = self.fail

    def fail(self) -> None:
        raise ArithmeticError("NVML Shared Library Not Found")

    def processes(self, device: int) -> list[Any]:
        others = SimpleNamespace(pid=1, usedGpuMemory=10**12)
        own = SimpleNamespace(pid=os.getpid(), usedGpuMemory=self.used if device else None)
        return [others, own]

    def __call__(self, request: Any) -> str:
        if "use" in request.query_params:
            self.used = int(request.query_params["use"]) * MIB
        return str(os.getpid())


@pytest.fixture
def on_gpus(running: RunningSystem, name: str, deployed: Callable[..., Any]) -> Callable[..., str]:
    def deploy(nvml: str, **options: Any) -> str:
        deployed(serve.deployment(max_gpu_memory_bytes=100 * MIB, **options)(OnGpus).bind(nvml))
        return running.get(f"/{name}")[1].decode()

    return deploy


def restarts(running: RunningSystem, name: str) -> dict[str, int]:
    with running.as_default(), serve.Client.connect() as client:
        shown = client.list_backends()[f"{name}#OnGpus"].get("restarts", {})
        return dict(shown)


def test_a_replica_above_its_gpu_memory_is_replaced_and_far_above_it_ends_at_once(
    running: RunningSystem, on_gpus: Callable[..., str], name: str
) -> None:
    first = on_gpus("fake")
    with GetLoad(running.settings.http.port, f"/{name}", 1) as load:
        assert running.get(f"/{name}?use=110")[1].decode() == first
        wait_until(lambda: restarts(running, name) == {"max_gpu_memory_bytes": 1}, 30, "its end")
    assert load.tally.failures == []
    wait_until(lambda: running.get(f"/{name}")[1].decode() != first, 30, "its successor")
    running.get(f"/{name}?use=130")
    expected = {"max_gpu_memory_bytes": 1, "out of memory": 1}
    wait_until(lambda: restarts(running, name) == expected, 30, "its end")


@pytest.mark.parametrize(
    ("nvml", "message"),
    [
        ("none", "ModuleNotFoundError: No module named 'pynvml'"),
        ("broken", "ArithmeticError: NVML Shared Library Not Found"),
    ],
)
def test_without_nvml_one_warning_says_that_the_limit_is_none(
    running: RunningSystem, on_gpus: Callable[..., str], name: str, nvml: str, message: str
) -> None:
    pid = on_gpus(nvml, max_age_s=3.5 * CHECK_S)
    assert running.get(f"/{name}?use=130") == (200, pid.encode())
    wait_until(lambda: restarts(running, name) == {"max_age_s": 1}, 30, "its last look")
    log = (running.settings.logs_dir / "replica.log").read_text()
    warnings = [line for line in log.splitlines() if "limits nothing here" in line]
    assert [message in line for line in warnings if f" {pid} " in line] == [True]


@pytest.fixture
def dying(deployed: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: deployed(
        serve.deployment(outlier_ejection=False, **options)(Dying).bind()
    )


def _ask_often(running: RunningSystem, name: str) -> None:
    """Have a lease, where there may be one."""
    for _ in range(20):
        assert running.get(f"/{name}?of=nothing", data=b"x")[0] == 200


@pytest.mark.parametrize(
    "way",
    [
        {},
        # With a queue's limit there are no leases: each query goes by the router.
        pytest.param({"max_queued_requests": 100}, marks=pytest.mark.slow),
    ],
    ids=["under a lease", "by the router"],
)
def test_clients_hear_that_their_replica_ran_out_of_memory_and_of_no_other_end(
    running: RunningSystem, dying: Any, name: str, way: dict[str, Any]
) -> None:
    dying(max_memory_bytes=memory_bytes() + 100 * MIB, **way)
    for of, is_shown in (("its code", False), ("memory", True), ("a signal", False)):
        _ask_often(running, name)
        status, text = running.get(f"/{name}?of={of.replace(' ', '+')}", data=b"x")
        assert (status, b"the replica died" in text) == (503, True), text
        assert (b"out of memory" in text) is is_shown, text
        with running.as_default():
            handle = serve.get_app_handle(name)
            for _ in range(20):
                handle.end.remote("nothing").result(timeout_s=60)
            with pytest.raises(ReplicaUnavailableError, match="the replica died") as caught:
                handle.end.remote(of).result(timeout_s=60)
            assert ("out of memory" in str(caught.value)) is is_shown
            for _ in range(20):
                handle.end.remote("nothing").result(timeout_s=60)
            stream = handle.options(stream=True).end_amid.remote(of)
            assert next(stream) == "begun"
            with pytest.raises(ReplicaUnavailableError, match="the replica died") as caught:
                next(stream)
        assert ("out of memory" in str(caught.value)) is is_shown


MEMORY = Path("/sys/fs/cgroup/memory")


def test_clients_hear_that_the_kernel_killed_their_replica_for_memory(
    running: RunningSystem, dying: Any, name: str
) -> None:
    """By a control group of the test's own: that of a replica is tested with systemd."""
    if not os.access(MEMORY / "memory.limit_in_bytes", os.W_OK):
        cannot_run("this process may make no control groups for memory")
    dying()
    pid = running.get(f"/{name}?of=nothing")[1].decode()
    group = MEMORY / f"greenroom-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(100 * MIB))
        (group / "cgroup.procs").write_text(pid)
        status, text = running.get(f"/{name}?of=memory", data=b"x")
        assert status == 503
        assert b"out of memory" in text
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), 10, "its end")
        group.rmdir()
