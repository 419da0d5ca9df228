"""What a running system tells of itself: time series of the traffic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from greenroom import serve
from tests.support.systems import RunningSystem, wait_until


def answering(request: Request) -> Response:
    """Answer with the status that the query asks for."""
    return Response(status_code=int(request.query_params.get("status", 200)))


@pytest.fixture
def route(client: serve.Client, name: str) -> Iterator[str]:
    """Return the route of an endpoint with one backend, NAME:v1."""
    client.wait_for_goal(client.create_backend(f"{name}:v1", answering), 20)
    client.create_endpoint(name, backend=f"{name}:v1", route=f"/{name}")
    yield f"/{name}"
    client.delete_endpoint(name)
    client.wait_for_goal(client.delete_backend(f"{name}:v1", force=True), 20)


def test_the_series_have_what_clients_asked(
    running: RunningSystem, client: serve.Client, name: str, route: str
) -> None:
    for status in [200] * 6 + [404] * 2 + [500]:
        assert running.get(f"{route}?status={status}")[0] == status

    def columns() -> dict[str, Any]:
        (shown,) = client.get_series(name, "live")["deployments"]
        return dict(shown)

    def total(column: str) -> float:
        return sum(value or 0 for value in columns()[column])

    wait_until(lambda: total("requests_per_s") == 9, 10, "all are in the series")
    assert (total("errors_4xx_per_s"), total("errors_5xx_per_s")) == (2, 1)
    shown = columns()
    assert (shown["endpoint"], shown["backend"]) == (name, f"{name}:v1")
    assert all(0 < each < 10 for each in shown["p99_s"] if each is not None)
    assert shown["replicas"][-1] == 1
    whole = client.get_series(last=1)
    assert len(whole["times"]) == len(whole["cluster"]["replicas"]) == 1
    assert whole["cluster"]["replicas"][0] >= 1
