"""How fast one backend gets through its queries, as its router sees it.

Theory of operation. The *drain rate* is how many slots become free per second while queries wait:
only then does it say what the replicas can do, and not what they are asked to. What is longer ago
counts less, with the time constant MEMORY_S; the time in which nothing waited does not count, and
makes nothing older. Before the first slot became free there is no rate.

How long a query takes in a replica is followed by a part of each sample's difference, down sooner
than up, and no sample counts as more than twice the present value: the first query, which loads
something, and one that hangs, say little about the others.
"""

from __future__ import annotations

from math import exp

MEMORY_S = 10.0
MAX_RETRY_AFTER_S = 60.0
# A query may wait for so much of its time: then it has the rest to run, and a rate that was
# measured wrong by a half makes nobody run out of time in a replica, where it costs others theirs.
WAITING_SHARE = 0.5
STEP_UP, STEP_DOWN = 0.1, 0.3


class Pace:
    """Follows one backend. ``now`` is monotonic seconds."""

    __slots__ = ("_at", "_began_at", "_freed", "_span_s", "run_s")

    def __init__(self) -> None:
        self.run_s = 0.0  # how long a query takes in a replica; 0 until one has ended
        self._freed = 0.0  # slots, and in which time; what is longer ago counts less
        self._span_s = 0.0
        self._at = 0.0  # until when both are told
        self._began_at = 0.0

    def began(self, now: float) -> None:
        """Take note that a query waits where none did."""
        self._at = self._began_at = now

    def freed(self, slots: int, now: float) -> None:
        """Count slots that became free while queries waited."""
        kept, span_s = self._told(now)
        self._freed, self._span_s, self._at = kept + slots, span_s, now

    def resized(self, ratio: float) -> None:
        """Expect the rate to follow the number of slots, which is so many times what it was."""
        self._freed *= ratio

    def ran(self, seconds: float) -> None:
        """Learn from a query that took so long in a replica, its answer included."""
        difference = min(seconds - self.run_s, self.run_s)
        if not self.run_s:
            self.run_s = seconds
        else:
            self.run_s += difference * (STEP_UP if difference > 0 else STEP_DOWN)

    def wait_s(self, ahead: int, now: float) -> float | None:
        """Return how long it takes until so many that wait have got a slot; None if unknown."""
        freed, span_s = self._told(now)
        return ahead * span_s / freed if freed and span_s else None

    def retry_after_s(self, ahead: int, now: float) -> float:
        """Return when to come back, where so many wait: when these will have got a slot.

        Where no slot was free yet: after as long again as that takes already, or a second.
        """
        wait_s = self.wait_s(max(ahead, 1), now)
        if wait_s is None:
            wait_s = max(now - self._began_at, 1.0)
        return min(wait_s, MAX_RETRY_AFTER_S)

    def too_slow_for(self, ahead: int, left_s: float, now: float) -> float | None:
        """Return how long a query would wait where that is too long for what it has left."""
        wait_s = self.wait_s(ahead, now)
        return wait_s if wait_s is not None and wait_s > left_s * WAITING_SHARE else None

    def _told(self, now: float) -> tuple[float, float]:
        since_s = now - self._at
        kept = exp(-since_s / MEMORY_S)
        return self._freed * kept, self._span_s * kept + since_s
