"""When a replica has done enough: its age, its queries, its memory; the controller replaces it.

What leaks is best replaced before it hurts. A worn replica says so in its reports and serves on
until its successor runs. Only one whose memory passes HARD times its limit ends at once, before its
neighbours on the host suffer; the kernel ends it there, too, if it has a control group of its own.
Memory is the proportional set size of proc(5): replicas share pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from greenroom.actors.runtime.cgroups import Group
from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.core.config import MIB
from greenroom.core.lifecycle.replicas import RestartReason

LOOK_S = 1.0
HARD = 1.25
_ROLLUP = Path("/proc/self/smaps_rollup")


class Wear:
    """Looks once a second, while there are limits; ``worn`` and ``full`` hear of it with why.

    ``served`` returns how many queries have ended.
    """

    def __init__(
        self,
        loop: Loop,
        served: Callable[[], int],
        worn: Callable[[str], None],
        full: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._served = served
        self._tell_worn, self._tell_full = worn, full
        self._limits: tuple[Any, ...] = (None, None, None)
        self._began_at: float | None = None  # to run
        self._timer: Timer | None = None
        self._group: Group | None = None
        self.why = ""  # it is worn; "" while it is not

    def configure(self, config: Mapping[str, Any]) -> None:
        """Take newer settings; older records lack these."""
        names = ("max_age_s", "max_queries", "max_memory_bytes")
        self._limits = tuple(map(config.get, names))
        self.why = ""
        self._arm()
        self._limit()

    def has_group(self, group: Group) -> None:
        """Let the kernel hold the limit of memory, too."""
        self._group = group
        self._limit()

    def _limit(self) -> None:
        most = self._limits[-1]
        if self._group is not None:
            self._group.limit(None if most is None else int(most * HARD))

    def begin(self) -> None:
        """Count the age from now on."""
        self._began_at = time.monotonic()
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._began_at is not None and any(self._limits):
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._arm()
        age_s, queries, most = self._limits
        if most is not None and (size := memory_bytes()) > most:
            told = f"it has {_mib(size)} of memory, and max_memory_bytes are {_mib(most)}"
            if size > most * HARD:
                self.why = f"{RestartReason.OUT_OF_MEMORY}: {told}"
                self._tell_full(self.why)
            self._is_worn(RestartReason.MAX_MEMORY, told)
        elif queries is not None and (served := self._served()) >= queries:
            told = f"it has served {served} queries, of {queries}"
            self._is_worn(RestartReason.MAX_QUERIES, told)
        elif age_s is not None and time.monotonic() >= (self._began_at or 0.0) + age_s:
            self._is_worn(RestartReason.MAX_AGE, f"it has run for {age_s:g} s")

    def _is_worn(self, reason: RestartReason, told: str) -> None:
        if not self.why:
            self.why = f"{reason}: {told}"
            self._tell_worn(self.why)


def memory_bytes() -> int:
    """Return this process's proportional set size."""
    lines = _ROLLUP.read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"
