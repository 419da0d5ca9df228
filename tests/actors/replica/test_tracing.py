"""Traces of a real system, as a receiver of OpenTelemetry's protocol gets them."""

from __future__ import annotations

import gzip
import json
import logging
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from greenroom import serve
from greenroom.serve.admin import applications
from greenroom.serve.build import build
from greenroom.serve.handle import DeploymentHandle
from tests.support.systems import RunningSystem, running_system, wait_until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = "01", "00"


class Receiver:
    """Takes spans over HTTP, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: PLC0415
            ExportTraceServiceRequest,
        )

        self._make = ExportTraceServiceRequest
        self._spans: list[Any] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def take(self, body: bytes) -> None:
        request = self._make.FromString(body)
        for resource in request.resource_spans:
            of = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for sent in scope.spans:
                    attributes = {
                        each.key: each.value.string_value or each.value.int_value
                        for each in sent.attributes
                    }
                    span = SimpleNamespace(
                        name=sent.name,
                        service=of["service.name"],
                        trace=sent.trace_id.hex(),
                        id=sent.span_id.hex(),
                        parent=sent.parent_span_id.hex(),
                        status=sent.status.code,
                        attributes=attributes,
                        links=[link.span_id.hex() for link in sent.links],
                        events=[event.name for event in sent.events],
                        lasted_s=(sent.end_time_unix_nano - sent.start_time_unix_nano) / 1e9,
                    )
                    self._spans.append(span)

    def of(self, trace: str) -> dict[str, Any]:
        """Return the spans of a trace by name."""
        return {span.name: span for span in list(self._spans) if span.trace == trace}

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@serve.deployment(logging_config={"encoding": "JSON"})
class Tax:
    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.01)
    async def on(self, prices: list[float]) -> list[float]:
        return [price * 0.25 for price in prices]

    async def rate(self, price: float) -> float:
        return await self.on(price)

    def fail(self) -> None:
        raise ValueError("on purpose")


@serve.deployment(logging_config={"encoding": "JSON"})
class Shop:
    def __init__(self, tax: DeploymentHandle) -> None:
        self.tax = tax

    async def __call__(self, request: Request) -> dict[str, Any]:
        from opentelemetry import trace  # noqa: PLC0415

        logging.getLogger("shop").warning("sold")
        with trace.get_tracer("mine").start_as_current_span("my own"):
            if "fail" in request.query_params:
                await self.tax.fail.remote()
            return {"tax": await self.tax.rate.remote(8.0)}


@pytest.fixture(scope="module")
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def traced(receiver, tmp_path_factory):
    """A system with a shop at /, which exports its spans within a tenth of a second."""
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver.server.server_port}",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with running_system(tmp_path_factory.mktemp("traced"), **environ) as running:
        deploy(running)
        yield running


def deploy(running: RunningSystem) -> None:
    applications.deploy(running.connection, build(Shop.bind(Tax.bind()), "shop", "/"))


def ask(running: RunningSystem, trace: str, flags: str = SAMPLED, path: str = "/") -> int:
    header = f"00-{trace}-{PARENT}-{flags}"
    status, _ = running.get(path, headers={"traceparent": header})
    return int(status)


def test_a_trace_goes_from_the_front_through_handles_and_batches_to_user_code(traced, receiver):
    assert ask(traced, TRACE) == 200
    chain = (
        "GET",
        "GET /",
        "my own",
        "call shop#Tax.rate",
        "shop#Tax.rate",
        "batch Tax.on",
    )
    wait_until(lambda: receiver.of(TRACE).keys() >= {*chain}, 10, f"{chain}")
    spans = receiver.of(TRACE)
    parents = [spans[name].parent for name in chain]
    assert parents == [PARENT, *(spans[name].id for name in chain[:-1])]
    assert [spans[name].service for name in ("GET", "GET /", "shop#Tax.rate")] == [
        "greenroom",
        "shop#Shop",
        "shop#Tax",
    ]
    front = spans["GET"].attributes
    assert (front["http.request.method"], front["url.path"]) == ("GET", "/")
    assert front["http.response.status_code"] == 200
    ids = {spans[name].attributes["greenroom.request_id"] for name in (*chain[:2], *chain[3:5])}
    assert len(ids) == 1
    assert spans["GET /"].attributes["http.route"] == "/"
    assert spans["batch Tax.on"].links == [spans["shop#Tax.rate"].id]
    assert 0 <= spans["queue"].lasted_s < 5
    assert all(span.status != 2 for span in spans.values())


def test_an_exception_is_in_the_trace(traced, receiver):
    trace = TRACE[::-1]
    assert ask(traced, trace, path="/?fail=1") == 500
    wait_until(lambda: "GET" in receiver.of(trace), 10, "the front's span")
    failed = ("GET", "GET /", "call shop#Tax.fail", "shop#Tax.fail")
    wait_until(lambda: receiver.of(trace).keys() >= {*failed}, 10, f"{failed}")
    spans = receiver.of(trace)
    assert [spans[name].status for name in failed] == [2] * 4
    assert spans["shop#Tax.fail"].events == ["exception"]


def test_logs_name_the_trace(traced):
    trace = "a" * 32
    assert ask(traced, trace) == 200
    logs = traced.settings.logs_dir

    def logged(pattern: str) -> list[dict[str, Any]]:
        lines = [line for path in logs.glob(pattern) for line in path.read_text().splitlines()]
        found = [json.loads(line) for line in lines if trace in line]
        return [line for line in found if line["trace_id"] == trace]

    wait_until(lambda: logged("access.log"), 10, "the access log's line")
    records = wait_until(lambda: logged("*Shop*.log"), 10, "the replica's")
    assert {"sold"} <= {record["message"] for record in records}
    assert all(re.fullmatch("[0-9a-f]{16}", record["span_id"]) for record in records)


def test_what_the_client_does_not_sample_is_not_sent_and_pages_are_no_spans(traced, receiver):
    unsampled, page, last = "b" * 32, "c" * 32, "d" * 32
    assert ask(traced, unsampled, NOT_SAMPLED) == 200
    assert ask(traced, page, path="/-/healthz") == 200
    assert ask(traced, last) == 200
    wait_until(lambda: len(receiver.of(last)) >= 6, 10, "what came after them")
    assert not receiver.of(unsampled)
    assert not receiver.of(page)


def test_what_a_replica_has_not_sent_yet_is_sent_when_it_stops(receiver, tmp_path):
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver.server.server_port}",
        "OTEL_BSP_SCHEDULE_DELAY": "600000",
    }
    trace = "e" * 32
    with running_system(tmp_path / "state", **environ) as running:
        deploy(running)
        assert ask(running, trace) == 200
        assert not receiver.of(trace)
        running.stop()
        assert {"GET", "GET /", "shop#Tax.rate"} <= receiver.of(trace).keys()
