"""What waits for a goal hears of one that is reached, also where the time is up."""

from __future__ import annotations

import time
from typing import Any

import pytest

from greenroom.core.operations import WaitForGoal
from greenroom.serve.admin.session import wait_for_goal


class Controller:
    """A connection to one that says after a moment whether a goal is reached."""

    def __init__(self, *, is_reached: bool) -> None:
        self.is_reached = is_reached

    def request(self, operation: Any, timeout_s: float | None = None) -> Any:
        if not isinstance(operation, WaitForGoal):
            return {"goals": [{"id": "g", "what": "deploy", "subject": "application a"}]}
        if not (self.is_reached and timeout_s):
            raise TimeoutError
        return True


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_goal_that_was_reached_while_others_took_all_the_time_is_no_failure(
    is_reached: bool,
) -> None:
    controller: Any = Controller(is_reached=is_reached)
    began_at = time.monotonic() - 60.0
    if is_reached:
        wait_for_goal(controller, "g", 10.0, lambda _reason: None, began_at)
        return
    with pytest.raises(TimeoutError, match=r"goal g \(deploy, application a\) was not reached"):
        wait_for_goal(controller, "g", 10.0, lambda _reason: None, began_at)
