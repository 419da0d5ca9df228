"""Backends over a real system: idempotent creation, partial updates, forced ends, metrics."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from greenroom.serve.exceptions import ReplicaUnavailableError
from tests.support.metrics import scraped, scraped_text, total
from tests.support.systems import alive, wait_until


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
def tag(serving, tmp_path):
    return serving(Hanging, str(tmp_path), max_ongoing_requests=1)


def test_a_forced_delete_kills_what_hangs(client, tag, name, tmp_path):
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
    running, client, tag, name, tmp_path
):
    def counted(metric: str, **labels: str) -> float:
        labels |= {"endpoint": name, "backend": tag}
        return total(scraped(running), f"greenroom_{metric}", **labels)

    known = f'greenroom_queued_requests{{endpoint="{name}",backend="{tag}"'
    wait_until(lambda: known in scraped_text(running), 10, "it is known before the first query")
    for method in ("__call__", "__call__", "fail", "teapot", "nope"):
        running.get(f"/{name}", headers={"X-Serve-Call-Method": method})
    for status, count in {"200": 2, "500": 1, "418": 1, "400": 1}.items():
        is_so = lambda s=status, n=count: counted("requests_total", status=s) == n  # noqa: E731
        wait_until(is_so, 10, f"{count} of {status}")
    assert counted("request_seconds_count") == 5
    assert 0 < counted("request_seconds_sum") < 5
    assert counted("request_seconds_bucket", le="+Inf") == 5
    handle = client.get_handle(name)
    responses = [handle.hang.remote() for _ in range(3)]
    load = lambda: (counted("queued_requests"), counted("ongoing_requests"))  # noqa: E731
    wait_until(lambda: load() == (2, 1), 10, "two wait")
    for response in responses:
        response.cancel()
    wait_until(lambda: counted("queued_requests") == 0, 10, "an empty queue")
