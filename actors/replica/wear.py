"""When a replica has done enough: its age, its queries, its memory; the controller replaces it.

What leaks is best replaced before it hurts. A worn replica says so in its reports and serves on
until its successor runs. Only one whose memory passes HARD times its limit ends at once, before its
neighbours on the host suffer; the kernel ends it there, too, if it has a control group of its own.
Memory is the proportional set size of proc(5): replicas share pages. That of GPUs is by the word of
NVML, the management library of NVIDIA's driver. Its package nvidia-ml-py is imported only for a
replica with such a limit. NVML names processes as their host does, so in a container with pids of
its own it names none that is known there.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from greenroom.actors.runtime.cgroups import Group
from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.core.config import MIB
from greenroom.core.lifecycle.replicas import RestartReason

logger = logging.getLogger(__name__)

CHECK_S = 1.0
HARD = 1.25
LIMITS = (
    RestartReason.MAX_AGE,
    RestartReason.MAX_QUERIES,
    RestartReason.MAX_MEMORY,
    RestartReason.MAX_GPU_MEMORY,
)
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
        """Take newer settings; another release's may lack some."""
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
            elif reason is RestartReason.MAX_MEMORY:
                self._weigh(reason, "memory", memory_bytes(), most)
            else:
                self._weigh(reason, "GPU memory", gpu_memory_bytes(), most)

    def _weigh(self, reason: RestartReason, what: str, size: int, most: int) -> None:
        text = f"it has {_mib(size)} of {what}, and {reason} are {_mib(most)}"
        if size > most * HARD:
            self.why = f"{RestartReason.OUT_OF_MEMORY}: {text}"
            self._on_worn(self.why, True)
        elif size > most:
            self._is_worn(reason, text)

    def _is_worn(self, reason: RestartReason, text: str) -> None:
        if not self.why:
            self.why = f"{reason}: {text}"
            self._on_worn(self.why, False)


def memory_bytes() -> int:
    """Return this process's proportional set size; 0 where it cannot be read now."""
    try:
        lines = _ROLLUP.read_text(encoding="ascii").splitlines()
    except OSError as error:  # such as that user code has taken all descriptors
        _warn(RestartReason.MAX_MEMORY, str(error))
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"


def gpu_memory_bytes() -> int:
    """Return what this process uses on all GPUs together; 0 where NVML does not say."""
    nvml = _nvml()
    if nvml is None:
        return 0
    try:
        devices = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        users = [each for one in devices for each in nvml.nvmlDeviceGetComputeRunningProcesses(one)]
    except nvml.NVMLError as error:  # such as a GPU that is lost
        _warn(RestartReason.MAX_GPU_MEMORY, f"NVML does not answer: {error}")
        return 0
    return sum(each.usedGpuMemory or 0 for each in users if each.pid == os.getpid())


@functools.cache
def _nvml() -> Any:
    """Return the library, ready for use; None, with a warning, where it cannot be used."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # ImportError, or its own, such as "NVML Shared Library Not Found"
        why = f"{type(error).__name__}: {error}; is nvidia-ml-py installed, and a driver?"
        _warn(RestartReason.MAX_GPU_MEMORY, f"NVML does not answer: {why}")
        return None
    return nvml


@functools.cache
def _warn(limit: RestartReason, why: str) -> None:
    """Log once for each reason."""
    logger.warning("%s limits nothing while it cannot be measured: %s", limit, why)
