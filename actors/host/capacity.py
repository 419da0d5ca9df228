"""The resources of this host for replicas, from the settings or else as detected."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

from greenroom.actors.runtime.settings import HostSettings

logger = logging.getLogger(__name__)

SMI_TIMEOUT_S = 5.0  # it hangs where a driver or a device does


def capacity_of(settings: HostSettings) -> dict[str, float]:
    """Return resource -> amount of this host; without GPUs where they were not counted.

    Nothing at all for a gateway, which takes no replicas.
    """
    if settings.no_replicas:
        return {}
    said = {"num_cpus": settings.num_cpus, "memory": settings.memory}
    found = {"num_cpus": _cpus, "memory": _memory}
    capacity = {name: found[name]() if said[name] is None else said[name] or 0.0 for name in found}
    return {**capacity, "num_gpus": settings.num_gpus or 0.0, **settings.custom_resources}


def count_gpus() -> int:
    """Return how many NVIDIA devices there are, of those that CUDA_VISIBLE_DEVICES leaves.

    By nvidia-smi where it answers in time, else by the device files.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        most = len([each for each in visible.split(",") if each.strip() not in {"", "-1"}])
        return min(most, _devices()) if most else 0
    return _devices()


def _devices() -> int:
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        command = [smi, "--query-gpu=index", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=SMI_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("GPUs are counted by /dev/nvidia*, for nvidia-smi failed: %s", error)
        else:
            return len(done.stdout.split())
    return len([d for d in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", d.name)])


def _cpus() -> float:
    return float(len(os.sched_getaffinity(0)))


def _memory() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
