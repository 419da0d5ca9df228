"""Backends over a real system: idempotent creation, partial updates, forced ends, metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from greenroom import serve
from greenroom.serve.config import BackendConfig
from greenroom.serve.exceptions import ReplicaUnavailableError
from tests.support.systems import RunningSystem, alive, wait_until


class Counter:
    """Says how often it was constructed and reconfigured, in files."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._note("made")

    def _note(self, what: str) -> None:
        with (self.folder / what).open("a") as file:
            file.write(".")

    def reconfigure(self, user_config: Any) -> None:
        self._note("reconfigured")

    def __call__(self, request: Any = None) -> str:
        return "called"

    def other(self, request: Any = None) -> str:
        return "other"

    def fail(self, request: Any = None) -> None:
        raise ValueError("on purpose")

    def teapot(self, request: Any) -> Response:
        return Response("short and stout", 418)

    def hang(self, request: Any = None) -> None:
        self._note("hanging")
        time.sleep(600)


@pytest.fixture
def tag(client: serve.Client, name: str) -> Iterator[str]:
    yield f"{name}:v1"
    client.delete_endpoint(name)
    client.wait_for_goal(client.delete_backend(f"{name}:v1", force=True), 20)


def times(folder: Path, what: str) -> int:
    path = folder / what
    return len(path.read_text()) if path.exists() else 0


def test_an_update_sets_what_it_names_and_nothing_else(
    client: serve.Client, tag: str, tmp_path: Path
) -> None:
    config = {"max_ongoing_requests": 7, "user_config": {"a": 1}}
    client.wait_for_goal(client.create_backend(tag, Counter, str(tmp_path), config=config), 20)
    before = client.get_backend_config(tag)
    updates: list[Any] = [{"max_queued_requests": 3}, BackendConfig(request_timeout_s=9)]
    for update in updates:
        client.wait_for_goal(client.update_backend_config(tag, update), 20)
    changes = {"max_queued_requests": 3, "request_timeout_s": 9.0}
    assert client.get_backend_config(tag) == before.model_copy(update=changes)
    assert times(tmp_path, "made") == 1
    assert times(tmp_path, "reconfigured") == 1, "user_config has not changed"
    for bad, told in (({"max_ongoing_requests": 0}, "max_ongoing_requests=0"), ({"x": 1}, "x=1")):
        with pytest.raises(ValueError, match=told):
            client.update_backend_config(tag, bad)
    assert client.get_backend_config(tag) == before.model_copy(update=changes)


def test_a_forced_delete_kills_what_hangs(
    client: serve.Client, tag: str, name: str, tmp_path: Path
) -> None:
    client.wait_for_goal(client.create_backend(tag, Counter, str(tmp_path)), 20)
    client.create_endpoint(name, backend=tag)
    response = client.get_handle(name).hang.remote()
    wait_until(lambda: times(tmp_path, "hanging"), 10, "the call to run")
    (replica,) = client.list_backends()[tag]["replicas"]
    with pytest.raises(ValueError, match=f"'{tag}' has traffic of endpoint '{name}'"):
        client.delete_backend(tag, force=True)
    client.delete_endpoint(name)
    began = time.monotonic()
    client.wait_for_goal(client.delete_backend(tag, force=True), 20)
    assert time.monotonic() - began < 10, "it would have drained for 20 s"
    assert not alive(replica["pid"])
    assert tag not in client.list_backends()
    with pytest.raises(ReplicaUnavailableError):
        response.result(10)


def test_the_method_is_chosen_by_header_and_by_handle(
    running: RunningSystem, client: serve.Client, tag: str, name: str, tmp_path: Path
) -> None:
    client.wait_for_goal(client.create_backend(tag, Counter, str(tmp_path)), 20)
    client.create_endpoint(name, backend=tag, route=f"/{name}")
    handle = client.get_handle(name)
    assert handle.remote().result(10) == "called"
    assert handle.other.remote().result(10) == "other"
    assert handle.options(method_name="other").remote().result(10) == "other"

    def get(method: str) -> tuple[int, bytes]:
        return running.get(f"/{name}", headers={"X-Serve-Call-Method": method})

    assert get("__call__") == (200, b"called")
    assert get("other") == (200, b"other")
    for method in ("nope", "_note", "__init__", "reconfigure", "check_health", "folder"):
        assert get(method)[0] == 400, method
    assert times(tmp_path, "reconfigured") == 0


def test_requests_errors_latencies_and_load_are_counted_by_endpoint_and_backend(
    running: RunningSystem, client: serve.Client, tag: str, name: str, tmp_path: Path
) -> None:
    config = {"max_ongoing_requests": 1}
    client.wait_for_goal(client.create_backend(tag, Counter, str(tmp_path), config=config), 20)
    client.create_endpoint(name, backend=tag, route=f"/{name}")

    def metrics() -> dict[str, float]:
        label = f'endpoint="{name}",backend="{tag}"'
        host = f',host="{running.settings.host_name}"'
        lines = running.get("/-/metrics")[1].decode().splitlines()
        found = [line.split() for line in lines if label in line]
        return {line[0].replace(label, "").replace(host, ""): float(line[1]) for line in found}

    assert metrics()["greenroom_queued_requests{}"] == 0, "known before the first query"
    for method in ("__call__", "__call__", "fail", "teapot", "nope"):
        running.get(f"/{name}", headers={"X-Serve-Call-Method": method})
    expected = {"200": 2.0, "500": 1.0, "418": 1.0, "400": 1.0}
    counts = {f'greenroom_requests_total{{,status="{s}"}}': n for s, n in expected.items()}
    wait_until(lambda: counts.items() <= metrics().items(), 10, f"{counts}")
    found = metrics()
    assert found["greenroom_request_seconds_count{}"] == 5
    assert 0 < found["greenroom_request_seconds_sum{}"] < 5
    buckets = [n for key, n in found.items() if key.startswith("greenroom_request_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 5
    handle = client.get_handle(name)
    responses = [handle.hang.remote() for _ in range(3)]
    load = {"greenroom_queued_requests{}": 2.0, "greenroom_ongoing_requests{}": 1.0}
    wait_until(lambda: load.items() <= metrics().items(), 10, f"{load}")
    for response in responses:
        response.cancel()
    wait_until(lambda: metrics()["greenroom_queued_requests{}"] == 0, 10, "an empty queue")
