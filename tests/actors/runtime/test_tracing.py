"""Whether a process traces, by its environment; what is wrong there keeps nothing from serving."""

from __future__ import annotations

import subprocess
import sys

import pytest

from greenroom.actors.runtime import tracing

START = """
import logging, sys
from greenroom.actors.runtime import tracing
logging.basicConfig()
{before}
tracing.start("mine", {{}})
print(tracing.active is not None, any(name.startswith("opentelemetry") for name in sys.modules))
tracing.flush()
"""
URL = "http://127.0.0.1:9"  # where nobody listens


def started(before: str = "", **environ: str) -> tuple[str, str]:
    """Start to trace in a process of its own; return what it printed and logged."""
    done = subprocess.run(
        [sys.executable, "-c", START.format(before=before)],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("environ", "exporter"),
    [
        ({}, ""),
        ({"OTEL_SERVICE_NAME": "mine"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": URL}, ""),
        ({"OTEL_SDK_DISABLED": "True", "OTEL_EXPORTER_OTLP_ENDPOINT": URL}, ""),
    ],
)
def test_the_standard_variables_decide(environ, exporter):
    assert tracing.exporter_wanted(environ) == exporter


def test_nothing_is_imported_where_nothing_is_asked_for():
    assert started() == ("False False", "")


def test_it_begins_where_it_is_asked_for_though_nobody_listens():
    assert started(OTEL_EXPORTER_OTLP_ENDPOINT=URL)[0] == "True True"


@pytest.mark.parametrize(
    ("before", "environ", "message"),
    [
        (
            "",
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            "OTEL_TRACES_EXPORTER='zipkin': must be otlp, con",
        ),
        (
            "sys.modules['opentelemetry.sdk'] = None",
            {"OTEL_TRACES_EXPORTER": "otlp"},
            "nothing is traced: pip install 'greenroom[otel]'",
        ),
        (
            "",
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_MAX_QUEUE_SIZE": "-1"},
            "cannot be exported as the OTEL_ variables say",
        ),
    ],
)
def test_what_is_wrong_is_logged_and_nothing_is_traced(before, environ, message):
    out, err = started(before, **environ)
    assert out.startswith("False")
    assert message in err


@pytest.mark.parametrize("module", ["opentelemetry", "opentelemetry.sdk"])
def test_a_command_says_what_is_asked_for_and_not_installed(module, monkeypatch):
    assert tracing.problem_with({}) == ""
    assert tracing.problem_with({"OTEL_TRACES_EXPORTER": "otlp"}) == ""
    assert "must be otlp" in tracing.problem_with({"OTEL_TRACES_EXPORTER": "zipkin"})
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    found = tracing.problem_with({"OTEL_EXPORTER_OTLP_ENDPOINT": URL})
    assert found.endswith("nothing is traced: pip install 'greenroom[otel]'")
    assert tracing.problem_with({}) == ""
