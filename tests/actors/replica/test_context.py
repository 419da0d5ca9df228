"""What user code is told of the query that it runs and the replica that it runs in."""

import asyncio
import json
import threading
import time
from dataclasses import asdict

import pytest

from greenroom import serve
from greenroom.serve import context
from greenroom.serve.exceptions import GreenroomError
from greenroom.serve.handle import DeploymentHandle, decode
from tests.support.queries import python_call


def seen():
    return asdict(serve.get_request_context())


class Witness:
    """Says what it sees, from wherever user code may run."""

    def __init__(self):
        self.itself = DeploymentHandle("e", None)
        self.at_start = (asdict(serve.get_replica_context()), seen())

    def __call__(self, request):
        return seen()

    def sync(self):
        return seen()

    async def coroutine(self):
        before = seen()
        await asyncio.sleep(0.01)
        assert await asyncio.to_thread(seen) == before
        return before

    async def nested(self):
        return await self.itself.sync.remote()

    def own_thread(self):
        found = []
        thread = threading.Thread(target=lambda: found.append(seen()))
        thread.start()
        thread.join()
        return found[0]

    def replica(self):
        replica = serve.get_replica_context()
        return self.at_start, replica.replica_tag, replica.servable_object is self


@pytest.fixture
def one(one_process):
    return one_process(Witness, limit=100)


def call(one, method):
    """Return the request id of a call, and what it returns."""

    async def ask():
        response = one.handle.options(method_name=method).remote()
        return response.request_id, await response

    return one.run(ask())


def test_a_query_over_http_is_known_to_its_handler(one):
    asked = one.http(path="/", request_id="abc", timeout_s=9.0, multiplexed_model_id="m")
    begun_at = time.monotonic()
    found = json.loads(one.run(asked).body)
    assert 8.0 < found.pop("deadline") - begun_at < 10.0
    assert found == {
        "request_id": "abc",
        "route": "/",
        "endpoint": "e",
        "app_name": "",
        "backend": "b",
        "version": "7",
        "replica_tag": "r1",
        "is_shadow": False,
        "is_http_request": True,
        "multiplexed_model_id": "m",
    }


@pytest.mark.parametrize("method", ["sync", "coroutine", "nested"])
def test_a_call_through_a_handle_is_known_wherever_it_runs(one, method):
    request_id, found = call(one, method)
    assert (found["request_id"], found["route"]) == (request_id, "")
    assert (found["is_http_request"], found["deadline"]) == (False, None)


def test_nothing_tells_which_query_a_users_own_thread_works_for(one):
    _, found = call(one, "own_thread")
    assert found["request_id"] == ""


def test_the_replica_is_known_from_the_constructor_on(one):
    _, ((replica, request), tag, is_self) = call(one, "replica")
    assert (replica["replica_tag"], replica["version"]) == ("r1", "7")
    assert (replica["servable_object"], request["request_id"]) == (None, "")
    assert (tag, is_self) == ("r1", True)


@pytest.mark.parametrize("method", ["sync", "coroutine"])
def test_queries_at_once_each_see_themselves(one, method):
    async def ask():
        responses = [one.handle.options(method_name=method).remote() for _ in range(40)]
        for response in responses:
            assert (await response)["request_id"] == response.request_id

    one.run(ask())


@pytest.mark.parametrize("for_shadow", [True, False])
def test_calls_made_on_behalf_of_a_copy_are_marked_like_it(one, for_shadow):
    """So that no deployment behind a shadow charges a second time."""
    for method in ("sync", "nested"):
        asked = one.answer(for_shadow=for_shadow, **python_call(method=method))
        assert decode(one.run(asked), "it").value["is_shadow"] is for_shadow


def test_outside_of_a_replica_there_is_no_context():
    with pytest.raises(GreenroomError, match="outside of a replica"):
        serve.get_replica_context()
    assert serve.get_request_context() == context.RequestContext()
    assert context._get_serve_request_context() == context.RequestContext()
