"""What every tier has: causes are told where they can still be found."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.support import logs
from tests.support.kept import has_failed


def pytest_configure() -> None:
    """Have SIGINT end what tests start, also where pytest runs in a script's background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Have collections look at what tests make only: at all that was imported each took 0.14 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    logs.next_test()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Show with a failure what the systems under test wrote to their logs meanwhile."""
    report = yield
    if report.failed:
        item.stash[has_failed] = True
        report.sections += [(f"{path}: its end", text) for path, text in logs.written().items()]
    return report


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_is_left() -> Iterator[None]:
    """Collect what a module's tests left; what that warns of, an error, is told of this module.

    Otherwise a later test's collection fails that one, by chance and without a trace of the cause.
    """
    yield
    gc.collect()
