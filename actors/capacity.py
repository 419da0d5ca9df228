"""What this host has for replicas: as the settings say, else as it is found."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from understudy.core.errors import InvalidRequestError

_BUILT_IN = ("num_cpus", "num_gpus", "memory")


def read_capacity(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields of HostSettings that say what the host has, None where it is to be found.

    Raises InvalidRequestError for what is no amount.
    """
    fields: dict[str, Any] = {name: _amount(name, values.get(name)) for name in _BUILT_IN}
    return {**fields, "resources": _custom(values.get("resources"))}


def capacity_of(settings: Any) -> dict[str, float]:
    """Return resource -> amount of this host."""
    found = {"num_cpus": _cpus, "num_gpus": _gpus, "memory": _memory}
    capacity: dict[str, float] = {}
    for name in _BUILT_IN:
        said = getattr(settings, name)
        capacity[name] = found[name]() if said is None else said
    return {**capacity, **settings.resources}


def _amount(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        amount = float(value)
    except (TypeError, ValueError):
        amount = -1.0
    if not 0 <= amount < float("inf"):
        what = "a number of bytes" if name == "memory" else "a number"
        raise InvalidRequestError(f"{name}={value!r}: expected {what}, 0 or more")
    return amount


def _custom(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        given = None
    if not isinstance(given, dict) or set(_BUILT_IN) & set(given):
        raise InvalidRequestError(
            f"resources={value!r}: expected a JSON object of names and amounts, such as "
            "'{\"disk\": 2}'; " + ", ".join(_BUILT_IN) + " have settings of their own"
        )
    amounts = {name: _amount(f"resources[{name!r}]", given[name]) for name in given}
    return {name: amount for name, amount in amounts.items() if amount is not None}


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
