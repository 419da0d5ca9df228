"""Fixtures and hooks of all tests: reports of failures show what the systems under test logged."""

from __future__ import annotations

import gc
import importlib.util
import re
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import hypothesis
import pytest

from tests.support import logs
from tests.support.kept import has_failed
from tests.support.lone_loop import close_loops
from tests.support.programs import IS_CI
from tests.support.systems import PATIENCE


def pytest_configure() -> None:
    """Let SIGINT end what tests start, also where pytest runs in a script's background.

    What tests deploy travels by value, or each replica would import the tests' modules, and pytest.
    Examples that are made up take as long as they take; in CI they are the same each time.
    """
    hypothesis.settings.register_profile("greenroom", deadline=None, derandomize=IS_CI)
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


def is_skipped(report: Any, path: Path) -> bool:
    """Skip what has failed for a library that is not installed, but not in CI; return whether.

    Everything else runs on an installation without extras.
    """
    missing = re.compile(r"No module named '(\w+)|made with the (\w+) package")
    found = missing.search(str(report.longrepr)) if report.failed and not IS_CI else None
    name = "" if found is None else found[1] or found[2]
    if not name or importlib.util.find_spec(name) is not None:
        return False
    report.outcome = "skipped"
    report.longrepr = (str(path), 1, f"Skipped: {name} is not installed")
    return True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Let a file that a library is missing for not end the run of all others."""
    report = yield
    is_skipped(report, collector.path)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Add to a failure's report what the systems under test logged during the test."""
    report = yield
    if not is_skipped(report, item.path) and report.failed:
        item.stash[has_failed] = True
        report.sections += [(f"{path}: its end", text) for path, text in logs.written().items()]
    return report


@pytest.fixture(autouse=True)
def _loops_are_closed() -> Iterator[None]:
    yield
    close_loops()


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_is_left() -> Iterator[None]:
    """Collect what a module's tests left, so that its warnings are errors of this module.

    Otherwise they would fail a later test by chance, without a trace of the cause.
    """
    yield
    gc.collect()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run tests that are coroutines, which the mark ``anyio`` is for, on asyncio alone."""
    return "asyncio"
