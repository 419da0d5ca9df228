"""How much memory this process uses on GPUs, by NVML: the management library of NVIDIA's driver.

Its package nvidia-ml-py is imported only for a replica that has a limit. NVML names processes as
their host does, so in a container with pids of its own it names none that is known there.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any

logger = logging.getLogger(__name__)


def gpu_memory_bytes() -> int:
    """Return what this process uses on all GPUs together; 0 where NVML does not say."""
    nvml = _nvml()
    if nvml is None:
        return 0
    try:
        devices = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        users = [each for one in devices for each in nvml.nvmlDeviceGetComputeRunningProcesses(one)]
    except nvml.NVMLError as error:  # such as a GPU that is lost
        _warn(str(error))
        return 0
    return sum(each.usedGpuMemory or 0 for each in users if each.pid == os.getpid())


@functools.cache
def _nvml() -> Any:
    """Return the library, ready for use; None, with a warning, where it cannot be used."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # ImportError, or its own, such as "NVML Shared Library Not Found"
        _warn(f"{type(error).__name__}: {error}; is nvidia-ml-py installed, and a driver?")
        return None
    return nvml


@functools.cache
def _warn(why: str) -> None:
    """Log once for each reason."""
    logger.warning("max_gpu_memory_bytes limits nothing here, as NVML does not answer: %s", why)
