"""Deployments that call each other: what calls inherit, and what becomes of them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from greenroom import serve
from greenroom.serve.exceptions import (
    DeploymentUnavailableError,
    RequestCancelledError,
    UnknownNameError,
)
from greenroom.serve.handle import DeploymentHandle, decode
from tests.actors.one_process import OneProcess
from tests.support.queries import python_call, query
from tests.support.timing import until


class LostWeightsError(Exception):
    def __init__(self, path: str, size: int = 0) -> None:
        super().__init__(path, size)
        self.path, self.size = path, size


class Node:
    """Calls itself, as deployments call each other, and notes what becomes of the calls."""

    def __init__(self) -> None:
        self.itself = DeploymentHandle("e", None)
        self.notes: list[str] = []
        self.gate = threading.Event()

    async def double(self, number: int) -> int:
        return 2 * number

    async def doubles(self, count: int) -> int:
        chained = self.itself.double.remote(self.itself.double.remote(count))
        each = (self.itself.double.remote(number) for number in range(count))
        return await chained + sum(await asyncio.gather(*each))

    def doubles_in_a_thread(self, count: int) -> int:
        responses = [self.itself.double.remote(number) for number in range(count)]
        return 4 * count + sum(response.result(timeout_s=20) for response in responses)

    def fail(self) -> None:
        raise LostWeightsError("/weights", 42)

    async def catches(self) -> Any:
        try:
            await self.itself.fail.remote()
        except LostWeightsError as error:
            return error.path, error.size, "".join(error.__notes__)

    def catches_in_a_thread(self) -> Any:
        try:
            self.itself.fail.remote().result()
        except LostWeightsError as error:
            return error.path, error.size, "".join(error.__notes__)

    async def timing(self) -> tuple[str, float | None]:
        context = serve.get_request_context()
        return context.request_id, context.remaining_s

    async def asks_for_timing(self) -> Any:
        self.later = asyncio.create_task(self.asks_later())
        return await self.itself.timing.remote()

    async def asks_later(self) -> Any:
        await asyncio.sleep(serve.get_request_context().remaining_s or 0.0)
        return await self.itself.timing.remote()

    async def wait(self) -> None:
        self.notes.append("began")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.notes.append("cancelled")
            raise

    def block(self) -> None:
        self.notes.append("began")
        context = serve.get_request_context()
        while not context.is_cancelled:
            self.gate.wait(0.001)
        self.notes.append("cancelled")
        self.gate.wait(20)

    async def note(self, text: str) -> None:
        self.notes.append(text)

    async def awaits(self) -> None:
        await self.itself.wait.remote()

    async def awaits_a_thread(self) -> None:
        await self.itself.block.remote()

    def waits_in_a_thread(self) -> None:
        try:
            self.itself.wait.remote().result()
        except RequestCancelledError:
            with pytest.raises(RequestCancelledError, match="the query that calls"):
                self.itself.note.remote("never")
            raise

    async def awaits_none(self) -> None:
        waits = [self.itself.wait.remote() for _ in range(3)]
        await asyncio.sleep(60)
        assert waits

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=10)
    async def batched(self, items: list[int]) -> list[int]:
        _, self.batchs_s = await self.itself.timing.remote()
        await self.itself.wait.remote()
        return items

    async def cleans_up(self) -> None:
        try:
            await self.itself.wait.remote()
        finally:
            await self.itself.note.remote("cleaned up")


@pytest.fixture
def one(one_process):
    return one_process(Node, limit=100)


def call(one: OneProcess, method: str, *args: Any, **options: Any) -> Any:
    """Return a call's response, whose value is waited for on the loop that all run on."""
    return one.handle.options(method_name=method, **options).remote(*args)


@pytest.mark.parametrize("method", ["doubles", "doubles_in_a_thread"])
def test_many_calls_of_calls_return_their_values(one, method):
    async def ask() -> None:
        assert await call(one, method, 60) == 4 * 60 + sum(2 * n for n in range(60))

    one.run(ask())


@pytest.mark.parametrize("method", ["catches", "catches_in_a_thread"])
def test_an_exception_of_the_users_is_raised_where_it_was_called(one, method):
    async def ask() -> None:
        path, size, notes = await call(one, method)
        assert (path, size) == ("/weights", 42)
        assert 'raise LostWeightsError("/weights", 42)' in notes

    one.run(ask())


def test_the_request_id_and_the_deadline_travel_along_and_not_to_what_goes_on_afterwards(one):
    async def ask() -> None:
        asked = {"request_id": "abc", "timeout_s": 0.5, **python_call(method="asks_for_timing")}
        request_id, remaining_s = decode(await one.answer(**asked), "it").value
        assert request_id == "abc"
        assert 0 < remaining_s < 0.5
        assert (await one.user_code.servable.instance.later)[1] is None
        assert (await call(one, "asks_for_timing"))[1] is None

    one.run(ask())


@pytest.mark.parametrize(
    ("method", "calls"),
    [
        ("awaits", 1),
        ("awaits_a_thread", 1),
        ("waits_in_a_thread", 1),
        ("awaits_none", 3),
        ("cleans_up", 1),
    ],
)
def test_every_call_made_for_a_call_is_cancelled_with_it(one, method, calls):
    node = one.user_code.servable.instance

    async def ask() -> None:
        response = call(one, method)
        await until(lambda: node.notes == ["began"] * calls)
        assert one.queries.running == 1 + calls
        response.cancel()
        await until(lambda: node.notes.count("cancelled") == calls)
        if method == "awaits_a_thread":
            await until(lambda: one.queries.running == 1)
            await asyncio.sleep(0.02)
            assert one.queries.running == 1, "sync code has its slot until it returns"
            node.gate.set()
        await until(lambda: one.queries.running == 0)
        others = {*node.notes} - {"began", "cancelled"}
        assert others == ({"cleaned up"} if method == "cleans_up" else set())

    one.run(ask())


def test_what_a_batch_calls_lasts_as_long_as_one_of_its_items_is_wanted(one):
    node = one.user_code.servable.instance

    async def ask() -> None:
        number, item = one.caller.next_id(), python_call(1, method="batched")
        one.caller.submit(query(number, timeout_s=30.0, **item), lambda _answer: None)
        assert (await one.answer(timeout_s=1.0, **item)).kind == "QueryTimeoutError"
        assert node.batchs_s > 1
        assert node.notes == ["began"]
        one.caller.cancel(number)
        await until(lambda: node.notes == ["began", "cancelled"])

    one.run(ask())


@serve.deployment(max_constructor_retry_count=1)
class Finds:
    """Asks for another deployment by name, in its constructor."""

    def __init__(self, name: str) -> None:
        serve.get_deployment_handle(name)

    def __call__(self) -> None: ...


def test_a_deployment_that_is_not_there_fails_the_deploy_and_a_call_with_its_name(
    running, deployed, name
):
    with pytest.raises(UnknownNameError, match="is named 'Leef'; there are: Finds"):
        deployed(Finds.bind("Leef"))
    with pytest.raises(UnknownNameError, match="no application is named 'elsewhere'"):
        deployed(Finds.bind(DeploymentHandle("Leaf", "elsewhere")))
    never = DeploymentHandle("Leaf", name, client=running.connection.queries)
    for response in (never.remote(), never.options(stream=True).remote()):
        with pytest.raises(DeploymentUnavailableError, match=f"no endpoint is named '{name}#Leaf'"):
            response.result(10) if hasattr(response, "result") else next(response)
