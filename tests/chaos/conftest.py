"""What tests that kill or stop processes of one system share; each module has its ``started``."""

from __future__ import annotations

import pytest

from tests.support.kills import CONVERGED_WITHIN_S, converged, footprint_in_use
from tests.support.systems import RunningSystem, wait_until


@pytest.fixture
def running(started: RunningSystem) -> RunningSystem:
    """The system, with everything as it should be."""
    wait_until(lambda: converged(started), CONVERGED_WITHIN_S, "all as it should be")
    return started


@pytest.fixture(scope="module")
def in_use(started: RunningSystem) -> dict[str, int]:
    """How many descriptors each role has before anything was killed."""
    return footprint_in_use(started)
