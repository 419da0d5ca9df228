"""What this host has for replicas: as the settings say, else as it is found."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from greenroom.core.errors import InvalidRequestError

_BUILT_IN = ("num_cpus", "num_gpus", "memory")


def read_capacity(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields of HostSettings that say what the host has, None where it is to be found.

    Raises InvalidRequestError for what is no amount.
    """
    fields: dict[str, Any] = {name: _amount(name, values.get(name)) for name in _BUILT_IN}
    amounts, labels = _custom(values.get("resources"))
    return {**fields, "resources": amounts, "labels": labels}


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
        amount = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        amount = -1.0
    if not 0 <= amount < float("inf"):
        what = "a number of bytes" if name == "memory" else "a number"
        raise InvalidRequestError(f"{name}={value!r}: expected {what}, 0 or more")
    return amount


def _custom(value: Any) -> tuple[dict[str, float], dict[str, str]]:
    """Return amounts by name, and labels by name: what is no number is a label."""
    given = {} if value is None else _given(value)
    if given is None or set(_BUILT_IN) & given.keys():
        raise InvalidRequestError(
            f"resources={value!r}: expected names, each once, with amounts or labels, such as "
            "disk=2,zone=a, or a JSON object of them, such as '{\"disk\": 2}'; "
            + ", ".join(_BUILT_IN)
            + " have settings of their own"
        )
    labels = {name: text for name, text in given.items() if _is_label(text)}
    amounts = {
        name: _amount(f"resources[{name!r}]", given[name]) for name in given if name not in labels
    }
    return {name: amount for name, amount in amounts.items() if amount is not None}, labels


def _given(value: Any) -> dict[str, Any] | None:
    """Read name=value pairs, or JSON; None when it is neither."""
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        given = {name.strip(): text.strip() for name, _, text in pairs}
        # A name that comes twice is a mistake, and which of them was meant cannot be known.
        is_whole = all(given) and all(given.values()) and len(given) == len(pairs)
        return given if is_whole else None
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return given if isinstance(given, dict) else None


def _is_label(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False


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
