"""What a running system tells of itself: time series of the traffic, and what it is scraped for."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from greenroom import serve
from greenroom.actors.proxy.host_metrics import Metrics
from greenroom.serve import metrics
from tests.support.metrics import scraped, total
from tests.support.systems import wait_until


def answering(request: Request) -> Response:
    """Answer with the status that the query asks for."""
    return Response(status_code=int(request.query_params.get("status", 200)))


@pytest.fixture
def route(serving, name):
    """Return the route of an endpoint with one backend, NAME:v1."""
    serving(answering)
    return f"/{name}"


def test_the_series_have_what_clients_asked(running, client, name, route):
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


# --- What Prometheus scrapes ----------------------------------------------------------------------


def test_failures_are_counted_as_0_before_the_first():
    counting = Metrics()
    load = {("shop", "shop:v1"): (0, 0)}
    families = {family.name: family.samples for family in counting.families(load, {})}
    assert families["greenroom_requests_total"] == {("shop", "shop:v1", "500"): 0}
    assert families["greenroom_retries_total"] == {("shop", "shop:v1", "died"): 0}
    assert families["greenroom_retries_refused_total"] == {("shop", "shop:v1"): 0}
    assert families["greenroom_replica_ejections_total"] == {("shop:v1",): 0}


class Model:
    """Batches, loads models, and counts on its own."""

    def __init__(self) -> None:
        self.rows = metrics.Counter("test_rows", "Rows", tag_keys=("kind",))
        self.rows.set_default_tags({"kind": "text"})
        self.level = metrics.Gauge("test_level", "A\nlevel", tag_keys=("note",))
        self.sizes = metrics.Histogram("test_sizes", boundaries=[1, 10])

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.01)
    async def batched(self, rows: list[int]) -> list[int]:
        return rows

    @serve.multiplexed
    async def load(self, model_id: str) -> str:
        return model_id

    async def __call__(self, request: Request) -> int:
        size = int(request.query_params.get("size", 1))
        await self.load("m1")
        self.rows.inc(size)
        self.rows.inc(tags={"kind": "image"})
        self.level.set(0.5, tags={"note": 'a "quoted"\nline\\'})
        self.sizes.observe(size)
        return await self.batched(size)


@pytest.fixture
def model(client, name):
    """Deploy a Model, two replicas; return its route."""
    client.wait_for_goal(client.deploy(name, Model, config={"num_replicas": 2}), 20)
    yield f"/{name}"
    client.wait_for_goal(client.delete_deployment(name), 20)


def test_a_scrape_has_what_all_replicas_and_users_have_counted(running, client, name, model):
    for size in (1, 2, 30):
        assert running.get(f"{model}?size={size}")[0] == 200
    of_model = {"deployment": name}

    def rows() -> float:
        return total(scraped(running), "test_rows_total", **of_model)

    wait_until(lambda: rows() == 33 + 3, 10, "what user code has counted")
    families = scraped(running)
    assert total(families, "test_rows_total", **of_model, kind="image") == 3
    assert total(families, "test_sizes_bucket", **of_model, le="10.0") == 2
    assert families["test_level"].documentation == "A\nlevel"
    (level, *_) = families["test_level"].samples
    assert level.labels["note"] == 'a "quoted"\nline\\'
    assert set(level.labels) == {"note", "deployment", "application", "replica", "host"}

    assert total(families, "greenroom_replica_requests_total", **of_model, status="200") == 3
    assert total(families, "greenroom_batch_size_count", **of_model) == 3
    assert 0.0299 < total(families, "greenroom_batch_wait_seconds_sum", **of_model) < 3
    assert 1 <= total(families, "greenroom_model_loads_total", **of_model, ok="true") <= 2
    assert 1 <= total(families, "greenroom_models", **of_model) <= 2
    assert 0 < total(families, "greenroom_replica_start_seconds", **of_model) < 20
    assert total(families, "greenroom_queue_seconds_count", endpoint=name) == 3


def test_a_scrape_has_all_processes_of_the_host(running):
    assert running.get("/-/nothing")[0] == 404

    def of_those_that_live(found: dict[str, Metric]) -> bool:
        memory = found["greenroom_process_resident_memory_bytes"].samples
        return {int(each.labels["pid"]) for each in memory} <= {pid for _, pid in running.pids()}

    families = wait_until(
        lambda: (
            of_those_that_live(found := scraped(running))  # the text before is kept for a second
            and total(found, "greenroom_http_responses_total", status="404")
            and found
        ),
        10,
        "what the worker has answered",
    )
    memory = families["greenroom_process_resident_memory_bytes"].samples
    roles = {each.labels["role"] for each in memory}
    assert {"host", "proxy", "controller", "http master", "http worker"} <= roles
    assert all(10e6 < each.value < 1e9 for each in memory)
    starts = families["greenroom_process_start_time_seconds"].samples
    assert all(time.time() - 3600 < each.value < time.time() + 2 for each in starts)
    host = running.settings.host_name
    samples = [each for family in families.values() for each in family.samples]
    assert all(each.labels["host"] == host for each in samples)
    assert total(families, "greenroom_build_info", version=serve.__version__) == 1


def test_a_scrape_can_be_of_one_host(running):
    alone = scraped(running, "?host=self")
    assert "greenroom_process_cpu_seconds" in alone
    status, body = running.get("/-/metrics?host=other")
    assert status == 400
    assert b"host='other': must be 'self', or left out for all" in body


def test_a_replica_that_dies_is_counted_and_takes_its_samples_with_it(running, client, name, route):
    backend = f"{name}:v1"
    assert running.get(route)[0] == 200
    (replica,) = client.list_backends()[backend]["replicas"]

    def ended_by(tag: str) -> float:
        return total(scraped(running), "greenroom_replica_requests_total", replica=tag)

    def crashed() -> float:
        samples, counted = scraped(running), "greenroom_replica_restarts_total"
        # A SIGKILL may be laid to the kernel where another file's test has it kill for memory.
        reasons = ("crashed", "out of memory")
        return sum(total(samples, counted, backend=backend, reason=each) for each in reasons)

    wait_until(lambda: ended_by(replica["tag"]) == 1, 10, "its query")
    assert crashed() == 0
    os.kill(replica["pid"], signal.SIGKILL)
    wait_until(lambda: crashed() == 1, 10, "its death")
    assert ended_by(replica["tag"]) == 0
