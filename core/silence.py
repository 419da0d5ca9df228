"""Which processes stand still, judged by the beats of their message loops.

Theory of operation. A process of ours counts a beat every :data:`TICK_S`, on its message loop. The
processes that watch it for its death read the count as often. A count that stays the same is
*silence*. How long it may go on depends on what the process does meanwhile:

- It stands *still*: stopped, or asleep with no thread that computes. The limit is some seconds.
- It is *busy*: it computes, or waits for a CPU or the disk. A loop may be late for good reasons, as
  a message of megabytes, so the limit is :data:`BUSY_TIMES` the other one. For a replica there is
  none: its user code may keep the interpreter from the loop, and health checks judge that.
- It is *held* by a debugger: that is not counted at all.

The watching process may itself have stood still, alone or with the whole machine. So it counts its
own ticks instead of using a clock, and starts counting again after a late tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TICK_S = 1.0
LATE_S = 2.0  # a tick that comes so long after the last one says nothing about others
BUSY_TIMES = 12


class Doing(StrEnum):
    """What a silent process is doing."""

    STILL = "stands still"
    BUSY = "computes, or waits for a CPU"
    DISK = "waits for the disk, so even SIGKILL has to wait"
    HELD = "is held by a debugger"


class Ticks:
    """The ticks of one process that watches others."""

    def __init__(self) -> None:
        self._at: float | None = None

    def passed_s(self, now: float) -> float:
        """Return how long the last tick took; 0 for one that came late, and says nothing."""
        passed_s = 0.0 if self._at is None else now - self._at
        self._at = now
        return passed_s if passed_s < LATE_S else 0.0


@dataclass(slots=True)
class Silence:
    """One watched process: the count of its beats, and for how long that has been the same."""

    beats: int = 0
    still_s: float = 0.0
    busy_s: float = 0.0

    def is_broken(self, beats: int) -> bool:
        """Take the count of the process's beats; return whether there is a new one."""
        if beats == self.beats and beats:  # none yet: it starts
            return False
        self.beats, self.still_s, self.busy_s = beats, 0.0, 0.0
        return True

    def is_due(
        self,
        doing: Doing,
        passed_s: float,
        limit_s: float,
        patience_s: float = 0.0,
        *,
        runs_user_code: bool,
    ) -> bool:
        """Take what a silent process does; return whether to end it.

        ``passed_s`` is what the watcher's tick took, ``limit_s`` how long a process may stand
        still, ``patience_s`` the least time that this one has asked for.
        """
        if not passed_s:
            self.still_s = self.busy_s = 0.0
        elif doing is Doing.STILL:
            self.still_s += passed_s
        elif doing is not Doing.HELD:
            self.busy_s += passed_s
        if self.still_s >= max(limit_s, patience_s):
            return True
        most_s = max(limit_s * BUSY_TIMES, patience_s)
        return not runs_user_code and self.still_s + self.busy_s >= most_s
