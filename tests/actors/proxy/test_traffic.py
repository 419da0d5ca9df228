"""Shadows over real systems: copies of queries, whose answers nobody gets."""

from __future__ import annotations

import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom import serve
from tests.support.metrics import scraped, total
from tests.support.systems import wait_until


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


@pytest.fixture
def metric(running, name):
    """Return what sums the samples of a metric of this test's endpoint that have the labels."""
    return lambda metric, **labels: total(scraped(running), metric, endpoint=name, **labels)


@pytest.fixture
def wait_for(metric):
    """Wait until a metric has a value: queries are counted when their answers have arrived."""

    def wait_for(expected: float, *of: str, **labels: str) -> None:
        what = f"{of} {labels} to be {expected}"
        wait_until(lambda: metric(*of, **labels) == expected, 20, what)

    return wait_for


def test_a_shadow_sees_each_query_marked_and_its_answer_is_nobodys(
    running, client, name, serving, metric, wait_for, tmp_path
):
    serving(echo, endpoint={"methods": ["POST"]})
    shadow, route = serving(Notes, str(tmp_path)), f"/{name}"
    client.shadow_traffic(name, shadow, 1.0)
    assert client.list_endpoints()[name]["shadows"] == {shadow: 1.0}
    body = bytes(range(256)) * 400
    for number in range(5):
        request = {"data": body, "headers": {"X-Request-ID": f"id-{number}"}}
        assert running.get(route, **request) == (200, body)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 5, 10, "five copies")
    wait_for(5, "greenroom_shadow_requests_total", backend=shadow, status="200")
    expected = f"True {name} {shadow} {route} ".encode() + body
    assert (tmp_path / "id-3").read_bytes() == expected
    wait_for(5, "greenroom_requests_total")
    assert metric("greenroom_requests_total", backend=shadow) == 0
    client.shadow_traffic(name, shadow, 0)
    assert client.list_endpoints()[name]["shadows"] == {}
    running.get(route, data=b"x", headers={"X-Request-ID": "after"})
    wait_for(6, "greenroom_requests_total")
    assert metric("greenroom_shadow_queued_requests", backend=shadow) == 0
    assert not (tmp_path / "after").exists()


def test_a_shadows_endless_stream_ends_when_the_client_leaves(
    running, client, name, serving, wait_for
):
    serving(endless)
    shadow = serving(endless)
    client.shadow_traffic(name, shadow, 1.0)
    with urllib.request.urlopen(f"{running.url}/{name}", timeout=20) as response:
        assert response.read(5_000) == b"x" * 5_000
        wait_for(1, "greenroom_shadow_ongoing_requests", backend=shadow)
    wait_for(1, "greenroom_shadow_requests_total", backend=shadow, status="499")
    wait_for(0, "greenroom_shadow_ongoing_requests", backend=shadow)
