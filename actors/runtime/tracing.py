"""Traces with OpenTelemetry, in processes whose environment asks for them.

Theory of operation. An HTTP worker begins a span for each request, or takes part in the trace that
the request's ``traceparent`` names. A call through a handle has a span at its caller. Both put the
context, with the time at which they sent the query, into the query's call, which the router passes
on unread. The replica makes a span of the wait from then on, and one around user code, in whose
context user code runs: spans of its own and calls that it makes are children of that.

It is on where the standard variables name an exporter: OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_TRACES_EXPORTER. Everywhere else :data:`active` is None,
nothing is imported, and a request costs one check of it in each process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

logger = logging.getLogger(__name__)

Carried = tuple[str, str, float]  # traceparent, tracestate, and when it was sent, since the epoch

FLUSH_S = 1.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_EXPORTERS = ("otlp", "console")
SCOPE = "greenroom"


def exporter_wanted(environ: Mapping[str, str]) -> str:
    """Return which exporter the standard variables ask for; "" for none."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    wanted = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if not wanted:
        return "otlp" if any(environ.get(name) for name in _ENDPOINTS) else ""
    return "" if wanted == "none" else wanted


def problem_with(environ: Mapping[str, str]) -> str:
    """Return why nothing is traced though the environment asks for it, or ""; imports no SDK."""
    exporter = exporter_wanted(environ)
    if not exporter:
        return ""
    if exporter not in _EXPORTERS:
        names = f"must be {', '.join(_EXPORTERS)} or none"
        return f"OTEL_TRACES_EXPORTER={exporter!r}: {names}; nothing is traced"
    try:
        is_there = find_spec("opentelemetry.sdk") is not None
    except ModuleNotFoundError:  # of the package that it is a part of
        is_there = False
    if is_there:
        return ""
    return (
        "OTEL_ variables ask for traces, but OpenTelemetry is not installed, and nothing is "
        "traced: pip install 'greenroom[otel]'"
    )


class Span:
    """One span; ended once."""

    def __init__(self, tracing: Tracing, span: Any) -> None:
        self._tracing = tracing
        self.otel = span

    @property
    def trace_id(self) -> str:
        """The trace's id, as 32 hexadecimal digits."""
        return f"{self.otel.get_span_context().trace_id:032x}"

    def carried(self) -> Carried:
        """Return what makes the receiver of a query take part in the trace."""
        carrier: dict[str, str] = {}
        self._tracing.inject(self.otel, carrier)
        return carrier.get("traceparent", ""), carrier.get("tracestate", ""), time.time()

    def failed(self, error: BaseException) -> None:
        """Add an exception, with its traceback."""
        self.otel.record_exception(error)

    def ended(self, status: int) -> None:
        """End it with the HTTP status of what it stands for; 0 where that was cancelled."""
        self.otel.set_attribute("http.response.status_code", status or 499)
        self.over("" if 0 < status < 500 else f"status {status or 499}")

    def over(self, trouble: str = "") -> None:
        """End it; ``trouble`` says what went wrong."""
        if trouble:
            self.otel.set_status(self._tracing.error_status(trouble))
        self.otel.end()


class Tracing:
    """Makes spans in this process; raises ImportError where OpenTelemetry is not installed."""

    def __init__(self, exporter: str, service: str, resource: Mapping[str, str]) -> None:
        from opentelemetry import context, trace  # noqa: PLC0415  # here alone, as it is optional
        from opentelemetry.propagate import extract, inject  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter  # noqa: PLC0415

        attributes = dict(resource)
        if "service.name" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            attributes["service.name"] = os.environ.get("OTEL_SERVICE_NAME") or service
        exports: Any
        if exporter == "otlp":
            from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415

            exports = trace_exporter.OTLPSpanExporter()
        else:
            exports = ConsoleSpanExporter()
        provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exports))
        trace.set_tracer_provider(provider)  # user code's own spans go the same way
        self._provider = provider
        self._tracer = provider.get_tracer(SCOPE)
        self._trace = trace
        self._context = context
        self._extract = extract
        self._inject = inject

    def error_status(self, description: str) -> Any:
        """Return the status of a span that failed."""
        return self._trace.Status(self._trace.StatusCode.ERROR, description)

    def inject(self, span: Any, carrier: dict[str, str]) -> None:
        """Put a span's context into headers."""
        self._inject(carrier, self._trace.set_span_in_context(span))

    # --- In an HTTP worker ----------------------------------------------------------------------

    def request(self, scope: Mapping[str, Any], request_id: str) -> Span:
        """Begin the span of an HTTP request, or of a WebSocket."""
        head = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        method, client, server = scope.get("method", "GET"), scope["client"], scope["server"]
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "url.path": scope["path"],
            "url.scheme": scope["scheme"],
            "network.protocol.version": scope["http_version"],
            "greenroom.request_id": request_id,
        }
        if client:
            attributes["client.address"] = client[0]
        if server:
            attributes |= {"server.address": server[0], "server.port": server[1] or 0}
        if "user-agent" in head:
            attributes["user_agent.original"] = head["user-agent"]
        span = self._tracer.start_span(
            method,
            context=self._extract(head, self._context.Context()),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
        )
        return Span(self, span)

    # --- At the caller of a handle --------------------------------------------------------------

    def call(self, what: str, request_id: str) -> Span:
        """Begin the span of a call through a handle, a child of what runs here."""
        span = self._tracer.start_span(
            what,
            kind=self._trace.SpanKind.CLIENT,
            attributes={"greenroom.request_id": request_id},
        )
        return Span(self, span)

    # --- In a replica ---------------------------------------------------------------------------

    def query(self, name: str, carried: Carried | None, attributes: Mapping[str, str]) -> Span:
        """Begin the span of user code; the calling task runs in its context from now on."""
        headers = {}
        if carried is not None:
            headers = {"traceparent": carried[0], "tracestate": carried[1]}
        parent = self._extract(headers, self._context.Context())
        now = time.time_ns()
        span = self._tracer.start_span(
            name,
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=now,
        )
        if carried is not None and carried[2] and span.is_recording():
            sent_at = min(int(carried[2] * 1e9), now)  # clocks of hosts differ
            self._tracer.start_span("queue", context=parent, start_time=sent_at).end(now)
        self._context.attach(self._trace.set_span_in_context(span))
        return Span(self, span)

    @contextlib.contextmanager
    def batch(self, function: str, items: Iterable[Span | None]) -> Iterator[None]:
        """Run a batch in a span of its own, a child of the first item's and linked to all."""
        links = [
            self._trace.Link(item.otel.get_span_context()) for item in items if item is not None
        ]
        with self._tracer.start_as_current_span(
            f"batch {function}", links=links, attributes={"greenroom.batch_size": len(links)}
        ):
            yield

    def ids(self) -> tuple[str, str]:
        """Return the ids of the current trace and span, for logs; "" for none."""
        found = self._trace.get_current_span().get_span_context()
        if not found.is_valid:
            return "", ""
        return f"{found.trace_id:032x}", f"{found.span_id:016x}"

    def flush(self) -> None:
        """Send what was not sent yet, as far as the receiver takes it within FLUSH_S."""
        flushing = threading.Thread(target=self._provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)


active: Tracing | None = None
"""This process's; None where it does not trace."""


def start(service: str, resource: Mapping[str, str]) -> None:
    """Trace in this process from now on, where its environment asks for it; never raises.

    ``service`` is its name, unless the standard variables give one.
    """
    global active  # noqa: PLW0603  # one per process, as OpenTelemetry has one provider
    exporter = exporter_wanted(os.environ)
    if not exporter or active is not None:
        return
    if problem := problem_with(os.environ):
        logger.warning(problem)
        return
    try:
        active = Tracing(exporter, service, resource)
    except Exception:  # a bad value of a variable; it must not keep anything from serving
        logger.exception("traces cannot be exported as the OTEL_ variables say")


def flush() -> None:
    """Send what was not sent yet, before this process ends."""
    if active is not None:
        active.flush()
