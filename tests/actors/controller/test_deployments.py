"""Deployments on a real system: composition, failures, redeploys, health."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from greenroom import serve
from greenroom.serve.admin import applications
from greenroom.serve.deployments import Application
from greenroom.serve.exceptions import GreenroomError
from greenroom.serve.handle import DeploymentHandle
from tests.actors.conftest import deploy
from tests.support.systems import RunningSystem, alive

Deployed = Callable[[Application], DeploymentHandle]
DEADLINE_S = 20


class LostWeightsError(Exception):
    def __init__(self, path: str, size: int = 0) -> None:
        super().__init__(path, size)
        self.path = path
        self.size = size


@serve.deployment
class Adder:
    def __init__(self, increment: int) -> None:
        self.increment = increment

    def __call__(self, value: int) -> int:
        return value + self.increment

    async def add_later(self, value: int) -> int:
        await asyncio.sleep(0)
        return value + self.increment

    def fail(self, path: str) -> None:
        raise LostWeightsError(path, 42)

    async def fail_async(self, path: str) -> None:
        raise LostWeightsError(path, 42)


@serve.deployment
class AsyncCaller:
    def __init__(self, adder: DeploymentHandle, adders: dict[str, DeploymentHandle]) -> None:
        self.adder = adder
        self.adders = adders

    async def __call__(self, value: int) -> int:
        first = await self.adder.remote(value)
        return await self.adders["other"].add_later.remote(first)

    async def chain(self, value: int) -> int:
        return await self.adder.remote(self.adders["other"].remote(value))

    async def catch(self, method: str) -> Any:
        try:
            await getattr(self.adder, method).remote("/weights")
        except LostWeightsError as error:
            return (error.path, error.size, "".join(error.__notes__))

    async def many(self, count: int) -> int:
        return sum(await asyncio.gather(*(self.adder.remote(n) for n in range(count))))


@serve.deployment
class SyncCaller:
    def __init__(self, adder: DeploymentHandle) -> None:
        self.adder = adder

    def __call__(self, value: int) -> int:
        return self.adder.remote(value).result(timeout_s=10)

    def catch(self) -> Any:
        try:
            self.adder.fail.remote("/weights").result()
        except LostWeightsError as error:
            return (error.path, error.size)


def test_async_code_calls_other_deployments_and_hears_their_exceptions(
    deployed: Deployed,
) -> None:
    handle = deployed(AsyncCaller.bind(Adder.bind(10), {"other": Adder.bind(100)}))
    assert handle.remote(1).result(10) == 111
    assert handle.chain.remote(1).result(10) == 111
    assert handle.many.remote(200).result(20) == sum(n + 10 for n in range(200))
    for method in ("fail", "fail_async"):
        path, size, notes = handle.catch.remote(method).result(10)
        assert (path, size) == ("/weights", 42)
        assert "raise LostWeightsError(path, 42)" in notes


def test_sync_code_calls_other_deployments_and_hears_their_exceptions(
    deployed: Deployed,
) -> None:
    handle = deployed(SyncCaller.bind(Adder.bind(10)))
    responses = [handle.remote(n) for n in range(60)]
    assert [response.result(20) for response in responses] == [n + 10 for n in range(60)]
    assert handle.catch.remote().result(10) == ("/weights", 42)
    with pytest.raises(TypeError) as caught:
        handle.remote("text").result(10)
    assert "SyncCaller" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sys.exit(3)", "SystemExit: 3"),
        (
            "os._exit(3)",
            "exit code 3; its log ends with: loading | no weights; see:",
        ),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_a_constructor_that_ends_its_process_fails_the_deployment(
    deployed: Deployed, running: RunningSystem, name: str, how: str, message: str
) -> None:
    @serve.deployment(max_constructor_retry_count=1)
    class Ends:
        def __init__(self) -> None:
            print("loading\nno weights", flush=True)
            exec(how, {"sys": sys, "os": os})

        def __call__(self) -> None: ...

    with pytest.raises(GreenroomError, match=re.escape(message)):
        deployed(Ends.bind())
    application = running.status()["applications"][name]
    assert application["status"] == "DEPLOY_FAILED"
    assert message in application["message"]


@serve.deployment
def pid() -> int:
    return os.getpid()


def test_a_deleted_application_frees_its_route_and_its_processes(
    running: RunningSystem, name: str
) -> None:
    handle = deploy(running, pid.bind(), name, f"/{name}")
    served_by = handle.remote().result(10)
    applications.delete(running.connection, name)
    assert running.get(f"/{name}")[0] == 404
    assert not alive(served_by)
    assert name not in running.status()["applications"]
    with pytest.raises(GreenroomError):
        handle.remote().result(5)
