"""Backends over a real system: idempotent creation, partial updates, forced ends, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from greenroom import serve
from greenroom.serve.exceptions import ReplicaUnavailableError
from tests.support.systems import RunningSystem, alive, wait_until


class Hanging:
    """Says in a file when a call of it hangs."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __call__(self, request: Any = None) -> str:
        return "called"

    def fail(self, request: Any = None) -> None:
        raise ValueError("on purpose")

    def teapot(self, request: Any) -> Response:
        return Response("short and stout", 418)

    def hang(self, request: Any = None) -> None:
        (self.folder / "hanging").touch()
        time.sleep(600)


@pytest.fixture
def tag(serving: Callable[..., str], tmp_path: Path) -> str:
    return serving(Hanging, str(tmp_path), max_ongoing_requests=1)


def test_a_forced_delete_kills_what_hangs(
    client: serve.Client, tag: str, name: str, tmp_path: Path
) -> None:
    response = client.get_handle(name).hang.remote()
    wait_until((tmp_path / "hanging").exists, 10, "the call to run")
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


def test_requests_errors_latencies_and_load_are_counted_by_endpoint_and_backend(
    running: RunningSystem, client: serve.Client, tag: str, name: str, tmp_path: Path
) -> None:
    def metrics() -> dict[str, float]:
        label = f'endpoint="{name}",backend="{tag}"'
        host = f',host="{running.settings.host_name}"'
        lines = running.get("/-/metrics")[1].decode().splitlines()
        found = [line.split() for line in lines if label in line]
        return {line[0].replace(label, "").replace(host, ""): float(line[1]) for line in found}

    queued = "greenroom_queued_requests{}"
    wait_until(lambda: metrics().get(queued) == 0, 10, "it is known before the first query")
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
    wait_until(lambda: metrics()[queued] == 0, 10, "an empty queue")
