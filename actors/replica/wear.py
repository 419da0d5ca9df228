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

CHECK_S = 1.0
HARD = 1.25
LIMITS = (RestartReason.MAX_AGE, RestartReason.MAX_QUERIES, RestartReason.MAX_MEMORY)
_ROLLUP = Path("/proc/self/smaps_rollup")


class Wear:
    """Looks once a second, while there are limits; ``worn`` hears why, and whether it is full.

    ``served`` returns how many queries have ended.
    """

    def __init__(
        self,
        loop: Loop,
        served: Callable[[], int],
        worn: Callable[[str, bool], None],
    ) -> None:
        self._loop = loop
        self._served = served
        self._on_worn = worn
        self._limits: dict[RestartReason, Any] = {}
        self._began_at: float | None = None  # to run
        self._timer: Timer | None = None
        self._group: Group | None = None
        self.why = ""  # it is worn; "" while it is not

    def configure(self, config: Mapping[str, Any]) -> None:
        """Take newer settings; older records lack these."""
        self._limits = {each: most for each in LIMITS if (most := config.get(each)) is not None}
        self.why = ""
        self._arm()
        self._limit()

    def has_group(self, group: Group) -> None:
        """Let the kernel hold the limit of memory, too."""
        self._group = group
        self._limit()

    def _limit(self) -> None:
        most = self._limits.get(RestartReason.MAX_MEMORY)
        if self._group is not None:
            self._group.limit(None if most is None else int(most * HARD))

    def begin(self) -> None:
        """Count the age from now on."""
        self._began_at = time.monotonic()
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._began_at is not None and self._limits:
            self._timer = self._loop.call_later(CHECK_S, self._check)

    def _check(self) -> None:
        self._timer = None
        self._arm()
        for reason, most in self._limits.items():
            if reason is RestartReason.MAX_AGE:
                if time.monotonic() >= (self._began_at or 0.0) + most:
                    self._is_worn(reason, f"it has run for {most:g} s")
            elif reason is RestartReason.MAX_QUERIES:
                if (served := self._served()) >= most:
                    self._is_worn(reason, f"it has served {served} queries, of {most}")
            elif (size := memory_bytes()) > most:
                text = f"it has {_mib(size)} of memory, and {reason} are {_mib(most)}"
                if size > most * HARD:
                    self.why = f"{RestartReason.OUT_OF_MEMORY}: {text}"
                    self._on_worn(self.why, True)
                else:
                    self._is_worn(reason, text)

    def _is_worn(self, reason: RestartReason, text: str) -> None:
        if not self.why:
            self.why = f"{reason}: {text}"
            self._on_worn(self.why, False)


def memory_bytes() -> int:
    """Return this process's proportional set size."""
    lines = _ROLLUP.read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"
