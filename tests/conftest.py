"""Fixtures and hooks of all tests: reports of failures show what the systems under test logged."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any

import cloudpickle
import hypothesis
import pytest

from tests.support import logs
from tests.support.kept import has_failed
from tests.support.systems import PATIENCE


def pytest_configure() -> None:
    """Let SIGINT end what tests start, also where pytest runs in a script's background.

    What tests deploy travels by value, or each replica would import the tests' modules, and pytest.
    Examples that are made up take as long as they take; in CI they are the same each time.
    """
    is_ci = os.environ.get("CI") == "true"
    hypothesis.settings.register_profile("greenroom", deadline=None, derandomize=is_ci)
    hypothesis.settings.load_profile("greenroom")
    cloudpickle.register_pickle_by_value(sys.modules["tests"])
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"patience: {PATIENCE:g} times each deadline (GREENROOM_TEST_PATIENCE)"


def pytest_collection_finish() -> None:
    """Keep what was imported out of later garbage collections: each took 0.14 s more."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    logs.next_test()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Add to a failure's report what the systems under test logged during the test."""
    report = yield
    if report.failed:
        item.stash[has_failed] = True
        report.sections += [(f"{path}: its end", text) for path, text in logs.written().items()]
    return report


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_is_left() -> Iterator[None]:
    """Collect what a module's tests left, so that its warnings are errors of this module.

    Otherwise they would fail a later test by chance, without a trace of the cause.
    """
    yield
    gc.collect()
