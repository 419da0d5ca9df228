"""The resources of this host for replicas, from the settings or else as detected."""

from __future__ import annotations

import os
import re
from pathlib import Path

from greenroom.actors.runtime.settings import BUILT_IN_RESOURCES, HostSettings


def capacity_of(settings: HostSettings) -> dict[str, float]:
    """Return resource -> amount of this host."""
    found = {"num_cpus": _cpus, "num_gpus": _gpus, "memory": _memory}
    capacity: dict[str, float] = {}
    for name in BUILT_IN_RESOURCES:
        said = getattr(settings, name)
        capacity[name] = found[name]() if said is None else said
    return {**capacity, **settings.custom_resources}


def _cpus() -> float:
    return float(len(os.sched_getaffinity(0)))


def _gpus() -> float:
    """Return how many NVIDIA devices there are, of those that CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [d for d in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", d.name)]
    if visible is None:
        return float(len(devices))
    return float(min(len([each for each in visible.split(",") if each.strip()]), len(devices)))


def _memory() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
