"""The resources of this host for replicas, from the settings or else as detected."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.devices import VARIABLES

logger = logging.getLogger(__name__)

SMI_TIMEOUT_S = 5.0  # it hangs where a driver or a device does
DEVICES = Path("/dev")
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")  # processors too, without SIMD units
# What the last one leaves is numbered from 0 for the others, so replicas inherit it as it is.
LIMITS = (*VARIABLES["num_gpus"], "ROCR_VISIBLE_DEVICES")


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
    """Return how many devices of NVIDIA or else AMD there are, of those that variables leave.

    NVIDIA's by nvidia-smi where it answers in time, else by the device files; AMD's as the kernel's
    driver lists them.
    """
    named = (os.environ[name] for name in LIMITS if name in os.environ)
    counts = [len([x for x in each.split(",") if x.strip() not in {"", "-1"}]) for each in named]
    return min([*counts, _devices()]) if all(counts) else 0


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
    nvidia = [each for each in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", each.name)]
    return len(nvidia) or sum(map(_is_gpu, KFD_NODES.glob("*/properties")))


def _is_gpu(properties: Path) -> bool:
    """Return whether a node of the AMD driver's is a GPU, and one that this host may use."""
    try:
        return re.search(r"^simd_count [1-9]", properties.read_text(), re.MULTILINE) is not None
    except OSError:  # what the container may not use cannot be read
        return False


def _cpus() -> float:
    return float(len(os.sched_getaffinity(0)))


def _memory() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
