"""Whole applications in this process, without a system."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from greenroom.serve.exceptions import (
    DeploymentUnavailableError,
    InvalidRequestError,
    RequestCancelledError,
    UnknownNameError,
)
from greenroom.serve.handle import DeploymentHandle
from tests.support.systems import wait_until


@pytest.fixture(autouse=True)
def _clean():
    yield
    serve.shutdown()


@serve.deployment
class Adder:
    def __init__(self, amount: int) -> None:
        self.amount = amount

    def reconfigure(self, config: dict[str, int]) -> None:
        self.amount = config["amount"]

    def __call__(self, number: int) -> int:
        return number + self.amount

    async def slow(self) -> None:
        await asyncio.sleep(60)

    async def slow_stream(self) -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(60)

    async def deaf_stream(self, ended: str) -> AsyncIterator[bytes]:
        try:
            yield b"begun"
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            while True:
                yield bytes(100_000)
        finally:
            Path(ended).touch()

    async def stubborn(self) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    def fail(self) -> None:
        raise KeyError("no such thing")

    def thread(self) -> int:
        return threading.get_ident()


@serve.deployment
class Chain:
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    async def __call__(self, number: int) -> int:
        return int(await self.second.remote(self.first.remote(number)))

    async def by_name(self, number: int) -> int:
        return int(await serve.get_deployment_handle("Adder").remote(number))


def user_loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "user-loop"]


def run(app: Any, **options: Any) -> Any:
    return serve.run(app, _local_testing_mode=True, **options)


def test_a_graph_of_deployments_runs_here():
    handle = run(Chain.bind(Adder.bind(1), Adder.bind(10)))
    assert handle.remote(5).result(timeout_s=10) == 16
    assert handle.by_name.remote(5).result(timeout_s=10) == 6
    assert serve.get_app_handle("default").remote(1).result(timeout_s=10) == 12


def test_user_code_runs_on_threads_of_its_own_and_gets_its_config():
    handle = run(Adder.options(user_config={"amount": 7}).bind(1))
    assert handle.remote(1).result(timeout_s=10) == 8
    assert handle.thread.remote().result(timeout_s=10) != threading.get_ident()


def test_exceptions_keep_their_type_and_cancelled_calls_end():
    handle = run(Adder.bind(1))
    with pytest.raises(KeyError, match="no such thing"):
        handle.fail.remote().result(timeout_s=10)
    response = handle.slow.remote()
    with pytest.raises(TimeoutError):
        response.result(timeout_s=0.05)
    response.cancel()
    with pytest.raises(RequestCancelledError):
        response.result(timeout_s=10)


def test_calls_that_run_at_the_end_are_cancelled_and_say_so():
    handle = run(Adder.bind(1))
    response = handle.slow.remote()
    stream = handle.options(stream=True).slow_stream.remote()
    assert next(stream) == 1
    serve.shutdown()
    for ended in (response.result, stream.__next__):
        with pytest.raises(DeploymentUnavailableError, match="shut down while the call ran"):
            ended()
    wait_until(lambda: not user_loops(), 10, "the threads end")


def test_a_stream_that_goes_on_though_it_was_cancelled_ends(tmp_path):
    ended = tmp_path / "ended"
    stream = run(Adder.bind(1)).options(stream=True).deaf_stream.remote(str(ended))
    assert next(stream) == b"begun"
    stream.cancel()
    wait_until(ended.exists, 10, "its generator is closed")


def test_a_call_that_will_not_be_cancelled_keeps_no_thread():
    response = run(Adder.bind(1)).stubborn.remote()
    with pytest.raises(TimeoutError):
        response.result(timeout_s=0.05)
    serve.shutdown()
    wait_until(lambda: not user_loops(), 10, "the threads end")
    del response
    gc.collect()  # pytest fails on what cannot be collected quietly


def test_a_constructor_that_fails_raises_here_and_leaves_nothing():
    @serve.deployment
    class Broken:
        def __init__(self, _other: Any) -> None:
            raise ZeroDivisionError("broken on purpose")

        def __call__(self) -> None: ...

    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError, match="broken on purpose"):
        run(Broken.bind(Adder.bind(1)))
    with pytest.raises(DeploymentUnavailableError, match="default#Adder"):
        DeploymentHandle("Adder").remote(1).result(timeout_s=10)
    wait_until(lambda: before.issuperset(threading.enumerate()), 5, "its threads end")


def test_what_cannot_be_pickled_is_refused_as_on_a_system():
    lock = threading.Lock()
    with pytest.raises(InvalidRequestError, match="cannot be pickled"):
        run(Adder.bind(lock))  # type: ignore[arg-type]
    handle = run(Adder.bind(1))
    with pytest.raises(InvalidRequestError, match="cannot be pickled"):
        handle.remote(lock)


def test_applications_replace_their_like_and_can_be_deleted():
    run(Adder.bind(1), name="one")
    handle = run(Adder.bind(3), name="one")
    assert handle.remote(1).result(timeout_s=10) == 4
    serve.delete("one")
    with pytest.raises(DeploymentUnavailableError):
        handle.remote(1).result(timeout_s=10)


@serve.deployment
class Finds:
    """Asks for others by name, in its constructor and later."""

    def __init__(self, others: Any, name: str) -> None:
        self.others = others
        self.handle = serve.get_deployment_handle(name)

    async def __call__(self, number: int) -> int:
        return int(await self.handle.remote(number))

    def find(self, name: str, app_name: str | None = None) -> Any:
        return serve.get_deployment_handle(name, app_name)


def test_deployments_find_those_of_their_own_application_by_name():
    handle = run(Finds.bind(Adder.bind(1), "Adder"), name="first")
    assert handle.remote(1).result(timeout_s=10) == 2
    other = run(Finds.bind(handle, "Finds"), name="second")
    assert other.find.remote("Finds").result(timeout_s=10) == DeploymentHandle("Finds", "second")
    found = other.find.remote("Adder", "first").result(timeout_s=10)
    assert found == DeploymentHandle("Adder", "first")


def test_a_deployment_that_is_not_there_is_reported_when_the_application_is_brought_up():
    with pytest.raises(UnknownNameError, match="is named 'Adders'; there are: Adder, Finds"):
        run(Finds.bind(Adder.bind(1), "Adders"))
    with pytest.raises(UnknownNameError, match="no deployment 'other#Adder' runs"):
        run(Finds.bind(DeploymentHandle("Adder", "other"), "Finds"))


@serve.deployment(version="3")
class Describing:
    """Says who it is, and for whom it works."""

    def __init__(self, following: Any) -> None:
        self.following = following
        self.at_start = serve.get_replica_context().deployment

    async def __call__(self) -> list[Any]:
        replica, request = serve.get_replica_context(), serve.get_request_context()
        here = [
            self.at_start,
            replica.servable_object is self,
            (replica.app_name, request.app_name, request.version, request.is_shadow),
            request.request_id,
        ]
        return here + (await self.following.remote() if self.following else [])


def test_code_knows_what_it_runs_as_and_calls_keep_the_request_id():
    handle = run(Describing.options(name="First").bind(Describing.bind(None)), name="a")
    response = handle.remote()
    context = ("a", "a", "3", False)
    assert response.result(timeout_s=10) == [
        *("First", True, context, response.request_id),
        *("Describing", True, context, response.request_id),
    ]
