"""Traffic splits, shard keys and shadows over real systems."""

from __future__ import annotations

import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from tests.support.metrics import scraped, total
from tests.support.systems import RunningSystem, wait_until


async def echo(request: Any) -> bytes:
    return await request.body()


class Notes:
    """Keeps what it is asked in files, so that a test sees what a shadow saw."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def __call__(self, request: Any) -> str:
        context = serve.get_request_context()
        text = f"{context.is_shadow} {context.endpoint} {context.backend} {context.route} "
        body = await request.body()
        (self.folder / context.request_id).write_bytes(text.encode() + body)
        return "nobody sees this"


async def endless(request: Any) -> AsyncIterator[bytes]:
    while True:
        yield b"x" * 1000


class Endpoint:
    """One test's endpoint, with backends of its own."""

    def __init__(
        self, running: RunningSystem, client: serve.Client, name: str, backend: Callable[..., str]
    ) -> None:
        self.running, self.client, self.name, self.backend = running, client, name, backend

    def get(self, key: str | None = None, **headers: str) -> bytes:
        if key is not None:
            headers["X-Serve-Shard-Key"] = key
        status, body = self.running.get(f"/{self.name}", headers=headers)
        assert status == 200, body
        return body

    def wait_for_metric(self, expected: float, metric: str, **labels: str) -> None:
        """Wait until a metric has a value: queries are counted when their answers have arrived."""
        what = f"{metric} {labels} to be {expected}"
        wait_until(lambda: self.metric(metric, **labels) == expected, 20, what)

    def metric(self, metric: str, **labels: str) -> float:
        """Return the sum of a metric's samples of this endpoint that have the labels."""
        return total(scraped(self.running), metric, endpoint=self.name, **labels)


@pytest.fixture
def shop(running, client, name, serving):
    return Endpoint(running, client, name, serving)


# --- Traffic --------------------------------------------------------------------------------------


# --- Shadows --------------------------------------------------------------------------------------


def test_a_shadow_sees_each_query_marked_and_its_answer_is_nobodys(shop, tmp_path):
    shop.backend(echo, endpoint={"methods": ["POST"]})
    shadow, route = shop.backend(Notes, str(tmp_path)), f"/{shop.name}"
    shop.client.shadow_traffic(shop.name, shadow, 1.0)
    assert shop.client.list_endpoints()[shop.name]["shadows"] == {shadow: 1.0}
    body = bytes(range(256)) * 400
    for number in range(5):
        request = {"data": body, "headers": {"X-Request-ID": f"id-{number}"}}
        assert shop.running.get(f"/{shop.name}", **request) == (200, body)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 5, 10, "five copies")
    shop.wait_for_metric(5, "greenroom_shadow_requests_total", backend=shadow, status="200")
    expected = f"True {shop.name} {shadow} {route} ".encode() + body
    assert (tmp_path / "id-3").read_bytes() == expected
    shop.wait_for_metric(5, "greenroom_requests_total")
    assert shop.metric("greenroom_requests_total", backend=shadow) == 0
    shop.client.shadow_traffic(shop.name, shadow, 0)
    assert shop.client.list_endpoints()[shop.name]["shadows"] == {}
    shop.running.get(f"/{shop.name}", data=b"x", headers={"X-Request-ID": "after"})
    shop.wait_for_metric(6, "greenroom_requests_total")
    assert shop.metric("greenroom_shadow_queued_requests", backend=shadow) == 0
    assert not (tmp_path / "after").exists()


def test_a_shadows_endless_stream_ends_when_the_client_leaves(shop):
    shop.backend(endless)
    shadow = shop.backend(endless)
    shop.client.shadow_traffic(shop.name, shadow, 1.0)
    with urllib.request.urlopen(f"{shop.running.url}/{shop.name}", timeout=20) as response:
        assert response.read(5_000) == b"x" * 5_000
        shop.wait_for_metric(1, "greenroom_shadow_ongoing_requests", backend=shadow)
    shop.wait_for_metric(1, "greenroom_shadow_requests_total", backend=shadow, status="499")
    shop.wait_for_metric(0, "greenroom_shadow_ongoing_requests", backend=shadow)
