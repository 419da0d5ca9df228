"""Generators called through handles, over a system: from outside, from replicas, over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from greenroom.serve.exceptions import ReplicaUnavailableError
from greenroom.serve.handle import DeploymentHandle
from tests.support.asking import asking
from tests.support.metrics import ongoing
from tests.support.systems import wait_until

PART = "x" * 50_000


class Source:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def pid(self) -> int:
        return os.getpid()

    async def parts(self) -> AsyncIterator[str]:
        made = 0
        try:
            while True:
                made += 1
                (self.folder / "made").write_text(str(made))
                yield PART
        finally:
            (self.folder / "closed").touch()

    async def then_waits(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            (self.folder / "closed").touch()


class Passes:
    """Passes parts on, as they are or through a generator of its own."""

    def __init__(self, source: Any) -> None:
        self.source = source.options(stream=True)

    async def __call__(self, request: Any) -> Any:
        return getattr(self, request.query_params["kind"])()

    def directly(self) -> Any:
        return self.source.parts.remote()

    async def parts(self) -> AsyncIterator[str]:
        async for part in self.source.parts.remote():
            yield part

    def in_a_thread(self) -> Iterator[str]:
        yield from self.source.parts.remote()

    async def first(self) -> int:
        async for number in self.source.then_waits.remote():
            return number
        raise AssertionError("nothing came")


@pytest.fixture
def passes(deployed, running, name, tmp_path):
    source = serve.deployment(Source).bind(str(tmp_path))
    deployed(serve.deployment(Passes).bind(source))
    return DeploymentHandle("Passes", name, client=running.connection.queries)


@pytest.fixture
def source(passes, running, name):
    del passes
    handle = DeploymentHandle("Source", name, client=running.connection.queries)
    return handle.options(stream=True)


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("kind", ["directly", "parts", "in_a_thread"])
def test_a_slow_client_slows_the_generator_two_hops_away(running, name, tmp_path, kind):
    with asking(f"{running.url}/{name}") as get:
        response = get(kind)
        assert response.read(len(PART)) == PART.encode()
        made = tmp_path / "made"
        before = -1
        while before != (before := int(made.read_text() or 0)):
            time.sleep(0.3)  # until it stands still
        assert before < 400, "20 MB, most of it in the kernel's buffers"
        for _ in range(before):
            assert response.read(len(PART)) == PART.encode()
        wait_until(lambda: int(made.read_text() or 0) > before, 5, "it goes on")
    wait_until((tmp_path / "closed").exists, 5, "the client has left, and the generator ends")
    wait_until(lambda: ongoing(running, name) == 0, 5, "all slots are free")


def test_what_is_not_read_to_its_end_ends(passes, running, name, tmp_path):
    assert passes.first.remote().result(timeout_s=10) == 1
    wait_until((tmp_path / "closed").exists, 5, "the generator ends")
    wait_until(lambda: ongoing(running, name) == 0, 5, "all slots are free")


def test_values_before_the_death_of_a_replica_are_there_then_an_error(source):
    pid = source.options(stream=False).pid.remote().result(timeout_s=10)
    response = source.then_waits.remote()
    assert next(response) == 1
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ReplicaUnavailableError, match="died"):
        next(response)
    assert list(response) == []
