"""What tests that kill or stop processes of one system share; each module has its ``started``."""

import pytest

from tests.support.kills import CONVERGED_WITHIN_S, converged, footprint_in_use
from tests.support.systems import wait_until


@pytest.fixture
def running(started):
    """The system, with everything as it should be."""
    wait_until(lambda: converged(started), CONVERGED_WITHIN_S, "all as it should be")
    return started


@pytest.fixture(scope="module")
def in_use(started):
    """How many descriptors each role has before anything was killed."""
    return footprint_in_use(started)
