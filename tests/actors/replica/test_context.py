"""What user code is told of the query that it runs and the replica that it runs in."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from dataclasses import asdict
from typing import Any

import pytest

from greenroom import serve
from greenroom.serve import context
from greenroom.serve.exceptions import GreenroomError
from greenroom.serve.handle import DeploymentHandle
from tests.support.systems import wait_until


def seen() -> dict[str, Any]:
    return asdict(serve.get_request_context())


class Witness:
    """Says what it sees, from wherever user code may run."""

    def __init__(self) -> None:
        self.at_start = (asdict(serve.get_replica_context()), seen())

    def __call__(self, request: Any) -> dict[str, Any]:
        return seen()

    def sync(self) -> dict[str, Any]:
        return seen()

    async def coroutine(self) -> list[dict[str, Any]]:
        before = seen()
        await asyncio.sleep(0.01)
        return [before, await asyncio.to_thread(seen)]

    def own_thread(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: found.append(seen()))
        thread.start()
        thread.join()
        return found

    def replica(self) -> tuple[str, str, bool]:
        replica = serve.get_replica_context()
        return replica.app_name, replica.replica_tag, replica.servable_object is self

    def constructor(self) -> Any:
        return self.at_start


@pytest.fixture(scope="module")
def app(deployed_once):
    """An application of one Witness."""
    return deployed_once(serve.deployment(version="7")(Witness).bind()).removeprefix("/")


@pytest.fixture
def witness(running, app):
    return DeploymentHandle("Witness", app, client=running.connection.queries)


def test_a_query_over_http_is_known_to_its_handler(running, app):
    status, body = running.get(f"/{app}/below", headers={"X-Request-ID": "abc"})
    assert status == 200
    found = json.loads(body)
    tag = found["replica_tag"]
    assert tag in {r["tag"] for b in running.status()["backends"].values() for r in b["replicas"]}
    assert found == {
        "request_id": "abc",
        "route": f"/{app}",
        "endpoint": f"{app}#Witness",
        "app_name": app,
        "backend": tag.rpartition("#")[0],
        "version": "7",
        "replica_tag": tag,
        "is_shadow": False,
        "is_http_request": True,
        "multiplexed_model_id": "",
        "deadline": None,
    }


def test_a_call_through_a_handle_is_known_wherever_it_runs(witness):
    response = witness.sync.remote()
    found = response.result(10)
    assert found["request_id"] == response.request_id
    assert (found["route"], found["is_http_request"]) == ("", False)
    response = witness.coroutine.remote()
    ids = [each["request_id"] for each in response.result(10)]
    assert ids == [response.request_id] * 2
    (outside,) = witness.own_thread.remote().result(10)
    assert outside["request_id"] == "", "nothing tells which query a user's own thread works for"


def test_the_replica_is_known_from_the_constructor_on(witness, app):
    replica, request = witness.constructor.remote().result(10)
    assert (replica["app_name"], replica["deployment"]) == (app, "Witness")
    assert (replica["version"], replica["servable_object"]) == ("7", None)
    assert request["request_id"] == ""
    assert witness.replica.remote().result(10) == (app, replica["replica_tag"], True)


def test_queries_at_once_each_see_themselves(witness):
    for method in (witness.sync, witness.coroutine):
        responses = [method.remote() for _ in range(40)]
        for response in responses:
            found = response.result(10)
            each = found[1] if isinstance(found, list) else found
            assert each["request_id"] == response.request_id


def test_calls_made_on_behalf_of_a_copy_are_marked_like_it(
    running, client, deployed, name, tmp_path
):
    """So that no deployment behind a shadow charges a second time."""

    class Charging:
        def __call__(self) -> None:
            context = serve.get_request_context()
            (tmp_path / f"{context.request_id} {context.is_shadow}").touch()
            logging.getLogger("mine").info("charged")

    class Calling:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def __call__(self, request: Any) -> str:
            await self.inner.remote()
            return "called"

    inner = deployed(serve.deployment(logging_config={"encoding": "JSON"})(Charging).bind())
    primary, shadow = f"{name}:primary", f"{name}:shadow"
    for tag in (primary, shadow):
        client.wait_for_goal(client.create_backend(tag, Calling, inner), 20)
    client.create_endpoint(f"{name}-e", backend=primary, route=f"/{name}/e")
    client.shadow_traffic(f"{name}-e", shadow, 1.0)
    try:
        assert running.get(f"/{name}/e", headers={"X-Request-ID": "id"}) == (200, b"called")
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 10, "both calls")
        assert {path.name for path in tmp_path.iterdir()} == {"id False", "id True"}
        (log,) = running.settings.logs_dir.glob(f"replica-{name}#Charging#*.log")
        lines = [json.loads(line) for line in log.read_text().splitlines() if "charged" in line]
        assert {line.get("is_shadow") for line in lines} == {None, True}
    finally:
        client.delete_endpoint(f"{name}-e")
        for tag in (primary, shadow):
            client.wait_for_goal(client.delete_backend(tag, force=True), 20)


def test_outside_of_a_replica_there_is_no_context():
    with pytest.raises(GreenroomError, match="outside of a replica"):
        serve.get_replica_context()
    assert serve.get_request_context() == context.RequestContext()
    assert context._get_serve_request_context() == context.RequestContext()
