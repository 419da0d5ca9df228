"""The admin client over a real system."""

from __future__ import annotations

import time

import pytest

from greenroom import serve
from greenroom.serve.exceptions import NotRunningError
from tests.support.systems import RunningSystem, alive


class Tagged:
    def __init__(self, tag: str) -> None:
        self.tag = tag

    def __call__(self) -> str:
        return self.tag


def test_a_closed_client_says_that_it_is_closed(running: RunningSystem) -> None:
    address = f"127.0.0.1:{running.settings.admin_port}"
    client = serve.Client.connect(address)
    client.close()
    client.close()
    for use in (client.list_backends, client.status, lambda: client.get_handle("a")):
        began_at = time.monotonic()
        with pytest.raises(NotRunningError, match=r"connection .* was closed; open another"):
            use()
        assert time.monotonic() - began_at < 1
    with serve.Client.connect(address) as other:
        other.list_backends()


def test_a_backend_and_an_endpoint_serve_until_they_are_deleted(
    running: RunningSystem, client: serve.Client, name: str
) -> None:
    tag = f"{name}:v1"
    goal = client.create_backend(tag, Tagged, "one", config={"num_replicas": 2}, version="1")
    assert goal is not None
    client.wait_for_goal(goal, 20)
    client.create_endpoint(name, backend=tag, route=f"/{name}")
    assert running.get(f"/{name}") == (200, b"one")
    assert running.get(f"/{name}/below?a=1") == (200, b"one")
    listed = client.list_backends()[tag]
    assert (listed["status"], listed["version"]) == ("HEALTHY", "1")
    assert listed["config"]["num_replicas"] == len(listed["replicas"]) == 2
    assert client.list_endpoints()[name] == {
        "route": f"/{name}",
        "methods": ["GET"],
        "traffic": {tag: 1.0},
        "shadows": {},
    }
    assert client.get_handle(name).remote().result(10) == "one"
    pids = [replica["pid"] for replica in listed["replicas"]]
    client.delete_endpoint(name)
    assert running.get(f"/{name}")[0] == 404
    client.wait_for_goal(client.delete_backend(tag), 20)
    assert tag not in client.list_backends()
    assert not any(map(alive, pids))
