"""When a replica may be started after others have failed: soon at first, then less and less often.

Failed starts are counted since the last success, apart for the newest release and for those before,
so that old code that cannot start any more does not hold up the new. Deaths of running replicas
count as a crash loop only where they come in quick succession. What died with its host is not
counted: that says nothing of the code.
"""

from __future__ import annotations

BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
STABLE_S = 30.0  # a replica that ran this long was no crash loop
WITH_HOST_S = 3.0  # from a replica's end to that of its host: the one is heard of before the other


class _Row:
    """Failures in a row; the first ``free`` ones are followed by a start at once."""

    def __init__(self, free: int = 0) -> None:
        self.count = 0
        self.start_at = 0.0  # no new replica before
        self._free = free
        self._recent: list[tuple[float, str]] = []  # when, and on which host

    def add(self, host: str, now: float) -> None:
        self.count += 1
        if self.count > self._free:
            pause_s = BACKOFF_S * 2.0 ** (self.count - self._free - 1)
            self.start_at = now + min(pause_s, MAX_BACKOFF_S)
        self._recent = [each for each in self._recent if each[0] >= now - WITH_HOST_S]
        self._recent.append((now, host))

    def forgive(self, host: str, now: float) -> int:
        kept = [(at, on) for at, on in self._recent if on != host or at < now - WITH_HOST_S]
        forgiven, self._recent = len(self._recent) - len(kept), kept
        if forgiven:
            self.count = max(self.count - forgiven, 0)
            self.start_at = min(self.start_at, now)
        return forgiven

    def clear(self) -> None:
        self.count, self.start_at, self._recent = 0, 0.0, []


class Retries:
    """Counts one backend's failures. ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self.last_error = ""
        self._newest = _Row()
        self._old = _Row(free=1)
        self._crashes = _Row(free=1)

    @property
    def failures(self) -> int:
        """How many starts of the newest release have failed."""
        return self._newest.count

    @property
    def start_at(self) -> float:
        """Before when no new replica of the newest release is to start."""
        return max(self._newest.start_at, self._crashes.start_at)

    @property
    def start_old_at(self) -> float:
        """Before when none of an earlier release is to start."""
        return self._old.start_at

    def begin_anew(self) -> None:
        """Forget what the newest release did: there is another one, or it is asked for again."""
        self._newest.clear()
        self._crashes.clear()
        self.last_error = ""

    def went_back(self) -> None:
        """Count an earlier release as the newest again."""
        self._newest.clear()
        self._newest.start_at = self._old.start_at

    def came_up(self) -> None:
        """Take note that everything runs; what crashes soon after it came up is still a loop."""
        self._newest.clear()
        self._old.clear()
        self.last_error = ""

    def failed(self, error: str, host: str, now: float) -> None:
        """Count a failed start of the newest release."""
        self._newest.add(host, now)
        self.last_error = error

    def old_failed(self, error: str, host: str, now: float) -> None:
        """Count the end of a replica of an earlier release; the first one is replaced at once."""
        self._old.add(host, now)
        self.last_error = error

    def died(self, error: str, host: str, lived_s: float, now: float) -> None:
        """Count the death of a running replica; the first one is replaced at once."""
        if lived_s > STABLE_S:
            self._crashes.clear()
        else:
            self._crashes.add(host, now)
        self.last_error = error

    def host_lost(self, host: str, now: float) -> bool:
        """Count no more what has just died on a host that is lost; tell whether anything had."""
        return sum(row.forgive(host, now) for row in (self._newest, self._old, self._crashes)) > 0
