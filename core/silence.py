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

from collections.abc import Hashable
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


@dataclass(slots=True)
class _Heard:
    beats: int
    still_s: float = 0.0
    busy_s: float = 0.0


class Silences:
    """All processes that one process watches; ``limit_s`` is how long one may stand still."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._heard: dict[Hashable, _Heard] = {}
        self._ticked_at: float | None = None
        self._passed_s = 0.0

    def tick(self, now: float) -> None:
        """Begin a check of all processes."""
        passed_s = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if passed_s < LATE_S:
            self._passed_s = passed_s
            return
        self._passed_s = 0.0
        for heard in self._heard.values():
            heard.still_s = heard.busy_s = 0.0

    def beats(self, process: Hashable, beats: int) -> bool:
        """Take the count of a process's beats; return whether there is a new one."""
        heard = self._heard.get(process)
        if heard is not None and heard.beats == beats and beats:  # none yet: it starts
            return False
        self._heard[process] = _Heard(beats)
        return True

    def is_due(
        self, process: Hashable, doing: Doing, patience_s: float = 0.0, *, runs_user_code: bool
    ) -> bool:
        """Take what a silent process does; return whether to end it.

        ``patience_s`` is the least time that it has asked for.
        """
        heard = self._heard[process]
        if doing is Doing.STILL:
            heard.still_s += self._passed_s
        elif doing is not Doing.HELD:
            heard.busy_s += self._passed_s
        if heard.still_s >= max(self._limit_s, patience_s):
            return True
        most_s = max(self._limit_s * BUSY_TIMES, patience_s)
        return not runs_user_code and heard.still_s + heard.busy_s >= most_s

    def keep(self, processes: set[Hashable]) -> None:
        """Forget all others."""
        for process in self._heard.keys() - processes:
            del self._heard[process]
