"""When a replica may be started after others have failed: soon at first, then less and less often.

Failed starts are counted since the last success, apart for the newest release and for those before,
so that old code that cannot start any more does not hold up the new. Deaths of running replicas
count as a crash loop only where they come in quick succession.
"""

from __future__ import annotations

BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
STABLE_S = 30.0  # a replica that ran this long was no crash loop


class Retries:
    """Counts one backend's failures. ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self.failures = 0  # starts of the newest release that failed
        self.last_error = ""
        self.start_at = 0.0  # no new replica before
        self.start_old_at = 0.0  # none of an earlier release before
        self._old_failures = 0
        self._crashes = 0

    def begin_anew(self) -> None:
        """Forget what the newest release did: there is another one, or it is asked for again."""
        self.failures, self.start_at, self.last_error = 0, 0.0, ""

    def went_back(self) -> None:
        """Count an earlier release as the newest again."""
        self.failures, self.start_at = 0, self.start_old_at

    def came_up(self) -> None:
        """Take note that everything runs."""
        self.failures, self._old_failures, self.last_error = 0, 0, ""

    def failed(self, error: str, now: float) -> None:
        """Count a failed start of the newest release."""
        self.failures += 1
        self.start_at = now + _backoff(self.failures)
        self.last_error = error

    def old_failed(self, error: str, now: float) -> None:
        """Count the end of a replica of an earlier release; the first one is replaced at once."""
        self._old_failures += 1
        if self._old_failures > 1:
            self.start_old_at = now + _backoff(self._old_failures - 1)
        self.last_error = error

    def died(self, error: str, lived_s: float, now: float) -> None:
        """Count the death of a running replica; the first one is replaced at once."""
        self._crashes = 0 if lived_s > STABLE_S else self._crashes + 1
        if self._crashes > 1:
            self.start_at = now + _backoff(self._crashes - 1)
        self.last_error = error


def _backoff(failures: int) -> float:
    return min(BACKOFF_S * 2.0 ** (failures - 1), MAX_BACKOFF_S)
