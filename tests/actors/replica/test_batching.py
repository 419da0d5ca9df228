"""Batches of queries that come over HTTP, each with its own request and answer."""

import asyncio
import json

from greenroom import serve


class Batched:
    def __init__(self):
        self.seen = []
        self.double.set_max_batch_size(3)

    @serve.batch(batch_wait_timeout_s=10)
    async def double(self, items):
        self.seen.append(items)
        first = serve.get_request_context().request_id
        ids = [context.request_id for context in serve.get_batch_request_context()]
        assert ids[0] == first
        return [
            ValueError("none of zero") if item == 0 else {"item": 2 * item, "id": one, "all": ids}
            for item, one in zip(items, ids, strict=True)
        ]

    async def __call__(self, request):
        return await self.double(int(await request.body()))


def test_requests_share_a_batch_and_each_gets_its_own_answer(one_process):
    one = one_process(Batched, limit=10)

    async def many(*items):
        """Ask for several items at the same time."""
        asked = [one.http(body=b"%d" % item, request_id=f"request-{item}") for item in items]
        return await asyncio.gather(*asked)

    answers = [json.loads(answer.body) for answer in one.run(many(1, 2, 3))]
    assert [each["item"] for each in answers] == [2, 4, 6]
    ids = ["request-1", "request-2", "request-3"]
    assert [(each["id"], each["all"]) for each in answers] == [(each, ids) for each in ids]
    failed, *others = one.run(many(0, 4, 5))
    assert failed.kind == "UserCodeError"
    assert [answer.status for answer in others] == [200, 200]
    assert one.user_code.servable.instance.seen == [[1, 2, 3], [0, 4, 5]]


@serve.batch(max_batch_size=2, batch_wait_timeout_s=10)
async def words(requests):
    bodies = [(await each.body()).decode() for each in requests]
    yield bodies
    yield ["!" for _ in requests]


def test_a_batched_function_is_a_deployment(one_process):
    one = one_process(words, limit=10)

    async def read(body):
        stream, parts = await one.http(body=body), []
        while (part := await stream.next_bytes()) is not None:
            parts.append(part)
        return b"".join(parts)

    async def ask():
        assert await asyncio.gather(read(b"1"), read(b"2")) == [b"1!", b"2!"]

    one.run(ask())
