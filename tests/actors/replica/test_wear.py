"""Replicas that have done enough are replaced, and their clients notice nothing."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom import serve
from greenroom.actors.replica import wear
from greenroom.actors.replica.wear import CHECK_S, memory_bytes
from greenroom.core.errors import ReplicaUnavailableError
from tests.support.load import GetLoad
from tests.support.lone_loop import LoneLoop
from tests.support.programs import cannot_run
from tests.support.systems import RunningSystem, wait_until

MIB = 2**20


# --- When a replica has done enough ---------------------------------------------------------------


class Worn:
    """A replica's wear in virtual time, what it has said, and an NVML of two GPUs."""

    NVMLError = ArithmeticError

    def __init__(self, patch: pytest.MonkeyPatch, **limits: Any) -> None:
        module = importlib.reload(wear)  # it asks once for NVML
        self.loop, self.said = LoneLoop(), list[str]()
        self.served = self.on_gpu = 0

        def worn(why: str, is_full: bool) -> None:
            self.said.append(f"ends: {why}" if is_full else why)

        patch.setattr(module, "time", SimpleNamespace(monotonic=self.loop.asyncio.time))
        self.wear = module.Wear(self.loop, lambda: self.served, worn)
        self.wear.configure(limits)
        self.wear.begin()

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[Any]:
        others = SimpleNamespace(pid=1, usedGpuMemory=10**12)
        return [others, SimpleNamespace(pid=os.getpid(), usedGpuMemory=self.on_gpu * device)]


def test_its_age_and_its_queries_are_limited(monkeypatch):
    worn = Worn(monkeypatch, max_age_s=3.0, max_queries=5)
    worn.loop.pass_time(2.9)
    worn.wear.configure({"max_age_s": 3.0})
    worn.loop.pass_time(2.0)
    assert worn.said == ["max_age_s: it has run for 3 s"], "once"
    worn.served = 6
    worn.wear.configure({"max_queries": 5})
    worn.loop.pass_time(2 * CHECK_S)
    assert worn.said[1:] == ["max_queries: it has served 6 queries, of 5"]


def test_its_memory_on_gpus_is_limited_and_far_above_that_it_ends_at_once(monkeypatch):
    worn = Worn(monkeypatch, max_gpu_memory_bytes=100 * MIB)
    monkeypatch.setitem(sys.modules, "pynvml", worn)
    for used in (100, 110, 130):
        worn.on_gpu = used * MIB
        worn.loop.pass_time(CHECK_S)
    text = "it has {} MiB of GPU memory, and max_gpu_memory_bytes are 100 MiB"
    expected = [f"max_gpu_memory_bytes: {text.format(110)}"]
    assert worn.said == [*expected, f"ends: out of memory: {text.format(130)}"]


@pytest.mark.parametrize("message", ["NVML Shared Library Not Found", "import of pynvml halted"])
def test_without_nvml_one_warning_says_that_the_limit_is_none(
    message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ArithmeticError(message)

    broken = SimpleNamespace(nvmlInit=fail)
    monkeypatch.setitem(sys.modules, "pynvml", broken if "NVML" in message else None)
    worn = Worn(monkeypatch, max_gpu_memory_bytes=1)
    worn.loop.pass_time(5 * CHECK_S)
    assert worn.said == []
    assert [message in each for each in caplog.messages] == [True]


def test_memory_that_cannot_be_read_limits_nothing_meanwhile(monkeypatch, tmp_path, caplog):
    worn = Worn(monkeypatch, max_memory_bytes=100 * MIB)
    rollup = tmp_path / "smaps_rollup"  # the process has no descriptor left to open it, say
    monkeypatch.setattr(wear, "_ROLLUP", rollup)
    worn.loop.pass_time(3 * CHECK_S)
    assert worn.said == []
    assert ["max_memory_bytes" in each for each in caplog.messages] == [True]
    rollup.write_text(f"Pss:  {110 * 1024} kB\n")
    worn.loop.pass_time(CHECK_S)
    text = "it has 110 MiB of memory, and max_memory_bytes are 100 MiB"
    assert worn.said == [f"max_memory_bytes: {text}"]


# --- Over a real system ---------------------------------------------------------------------------


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
def worker(client, name):
    tag = f"{name}:v1"

    def deploy(**config: Any) -> str:
        client.wait_for_goal(client.create_backend(tag, Worker, config=config), 20)
        client.create_endpoint(name, backend=tag, route=f"/{name}")
        return tag

    yield deploy
    client.delete_endpoint(name)
    client.wait_for_goal(client.delete_backend(tag, force=True), 20)


def test_a_worn_replica_is_replaced_without_a_failed_request(worker, running, name):
    tag = worker(max_queries=20)
    first = running.get(f"/{name}")[1]
    with GetLoad(running.settings.http.port, f"/{name}", 1) as load:
        wait_until(lambda: running.get(f"/{name}")[1] != first, 30, "its successor")
        log = (running.settings.logs_dir / "replica.log").read_text()
        assert re.search(rf"{tag}#\w+ is to be replaced: max_queries: it has", log)
    assert load.tally.ok > 0
    assert load.tally.failures == []


def test_a_replica_that_leaks_is_replaced_and_one_that_leaks_fast_ends_at_once(
    worker, running, name
):
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


@pytest.fixture
def dying(deployed):
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
    running, dying, name, way
):
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


def test_clients_hear_that_the_kernel_killed_their_replica_for_memory(running, dying, name):
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
