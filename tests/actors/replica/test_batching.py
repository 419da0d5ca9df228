"""Batches of queries that come over HTTP and through handles, in real replicas."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.requests import Request

from greenroom import serve


@serve.deployment(user_config={"size": 3})
class Batched:
    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def reconfigure(self, user_config: dict[str, int]) -> None:
        self.double.set_max_batch_size(user_config["size"])

    @serve.batch(batch_wait_timeout_s=10)
    async def double(self, items: list[int]) -> list[Any]:
        self.seen.append(items)
        first = serve.get_request_context().request_id
        ids = [context.request_id for context in serve.get_batch_request_context()]
        assert ids[0] == first
        return [
            ValueError("none of zero") if item == 0 else {"item": 2 * item, "id": one, "all": ids}
            for item, one in zip(items, ids, strict=True)
        ]

    async def __call__(self, request: Request) -> Any:
        return await self.double(int(request.query_params["item"]))

    async def batches(self) -> list[list[Any]]:
        return self.seen


@pytest.fixture
def many(running, name):
    """Ask for several items at the same time."""

    def ask(*items: int) -> list[tuple[int, bytes]]:
        def one(item: int) -> tuple[int, bytes]:
            headers = {"X-Request-ID": f"request-{item}"}
            return running.get(f"/{name}?item={item}", headers=headers)

        with ThreadPoolExecutor(len(items)) as pool:
            return list(pool.map(one, items))

    return ask


def test_requests_share_a_batch_and_each_gets_its_own_answer(deployed, many):
    handle = deployed(Batched.bind())
    answers = [json.loads(body) for _, body in many(1, 2, 3)]
    assert [each["item"] for each in answers] == [2, 4, 6]
    assert [each["id"] for each in answers] == ["request-1", "request-2", "request-3"]
    assert {frozenset(each["all"]) for each in answers} == {
        frozenset({"request-1", "request-2", "request-3"})
    }
    failed, *others = many(0, 4, 5)
    assert failed[0] == 500
    assert [status for status, _ in others] == [200, 200]
    assert sorted(map(len, handle.batches.remote().result(timeout_s=20))) == [3, 3]


def test_a_batched_function_is_a_deployment(deployed, many):
    @serve.deployment
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=10)
    async def words(requests: list[Request]) -> AsyncIterator[list[str]]:
        yield [each.query_params["item"] for each in requests]
        yield ["!" for _ in requests]

    deployed(words.bind())
    assert many(1, 2) == [(200, b"1!"), (200, b"2!")]
