"""What the apps of protocols have in common."""

from __future__ import annotations

import pytest

from greenroom.core.errors import BackPressureError
from greenroom.serve.protocols.apps import describe_failure


@pytest.mark.parametrize(("after_s", "header"), [(0.2, "1"), (1.0, "1"), (1.2, "2"), (60.0, "60")])
def test_a_client_is_asked_to_come_back_in_whole_seconds_and_never_at_once(after_s, header):
    error = BackPressureError("full")
    error.retry_after_s = after_s
    assert describe_failure(error) == (503, "full", {"retry-after": header})
