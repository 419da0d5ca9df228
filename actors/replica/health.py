"""The health of a replica's code, and what it says of its load, by its hooks and its threads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from greenroom.actors.replica.user_code import Failure, UserCode
from greenroom.core.errors import DeployFailedError

logger = logging.getLogger(__name__)

TELL_AFTER = 1 / 3  # of health_check_timeout_s without the end of any sync call, while others wait


class Health:
    """Asks user code; all on the message loop. ``tag`` is the replica's."""

    def __init__(self, user_code: UserCode, tag: str) -> None:
        self._user_code = user_code
        self._tag = tag
        self.trouble = ""  # that status is to show
        self.stats: dict[str, float] = {}  # of record_autoscaling_stats
        self._is_recording = False
        self._sickness = ""  # what the last check raised
        self._stats_failure = ""

    async def first_check(self, within_s: float) -> Failure | None:
        """Return why the first check fails: that counts as if the constructor had raised."""
        try:
            check = asyncio.wrap_future(self._user_code.check_health())
            return await asyncio.wait_for(check, within_s)
        except TimeoutError:
            text = f"check_health has not returned within {within_s:g} s, health_check_timeout_s"
            return Failure.of(DeployFailedError(text))

    async def check(self, config: Mapping[str, Any]) -> Failure | None:
        """Return why the replica is unhealthy, None where it is well."""
        failure = self._stuck(config["max_ongoing_requests"], config["health_check_timeout_s"])
        if failure is not None:
            return failure
        failure = await asyncio.wrap_future(self._user_code.check_health())
        text = "" if failure is None else failure.text
        if failure is not None and text != self._sickness:
            logger.error("%s failed its health check: %s", self._tag, failure.traceback)
        elif self._sickness and not text:
            logger.info("%s passes its health check again", self._tag)
        self._sickness = text
        return failure

    def _stuck(self, slots: int, most_s: float) -> Failure | None:
        """Record sync calls that hang; return why that makes this replica unhealthy.

        A call that a caller waits for may take as long as it likes; status only shows it.
        """
        stuck = self._user_code.stuck(slots, time.monotonic())
        self.trouble = ""
        if stuck.busy_s >= most_s * TELL_AFTER:
            self.trouble = (
                f"all {stuck.threads} threads have been busy for {stuck.busy_s:.0f} s, and "
                f"{stuck.waiting} calls wait for one"
            )
            logger.warning("%s: %s", self._tag, self.trouble)
        if stuck.unwanted_s < most_s:
            return None
        text = (
            f"for {stuck.unwanted_s:.0f} s all sync calls that may run at once have been calls "
            "that no caller waits for any more: they hang, and nothing else can run"
        )
        logger.error("%s: %s", self._tag, text)
        return Failure(text, text, None)

    async def record(self) -> bool:
        """Take the newest stats; return whether they are others than before."""
        recording = None if self._is_recording else self._user_code.autoscaling_stats()
        if recording is None:  # the last one may hang
            return False
        self._is_recording = True
        try:
            recorded = await asyncio.wrap_future(recording)
        finally:
            self._is_recording = False
        stats, text = ({}, recorded.text) if isinstance(recorded, Failure) else (recorded, "")
        if isinstance(recorded, Failure) and text != self._stats_failure:
            logger.error("%s: record_autoscaling_stats failed: %s", self._tag, recorded.traceback)
        before, self.stats, self._stats_failure = self.stats, stats, text
        return before != stats
