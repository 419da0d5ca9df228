"""Which accelerators of a host a replica gets, and the variables that show it no others.

A host's devices of one kind are numbered from 0. A replica that asks for 1 or more gets whole
devices. One that asks for less shares a device: the fullest one that has room, so that others stay
free for replicas that need them whole. What is taken follows from the replicas there are, and from
nothing else, so no device can be lost.

Where the host itself was started with such a variable, the numbers count within what it names, also
for the other variables of that resource.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VARIABLES: Mapping[str, tuple[str, ...]] = {
    "num_gpus": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "TPU": ("TPU_VISIBLE_CHIPS",),
    "neuron_cores": ("NEURON_RT_VISIBLE_CORES",),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
    "HPU": ("HABANA_VISIBLE_MODULES",),
}
"""The resources that are devices, and what says which of them a process may use."""

ROUNDING = 1e-9  # ten times 0.1 is a little more than 1
Devices = Mapping[str, tuple[int, ...]]  # numbers, by resource


def amount_problem(name: str, amount: float) -> str | None:
    """Say what is wrong with asking for so much of a resource, or None."""
    if name in VARIABLES and amount > 1 and not float(amount).is_integer():
        return "must be a whole number, or less than 1 for a share of one device"
    return None


def choose(amount: float, shares: Sequence[float]) -> tuple[int, ...] | None:
    """Return the devices for a replica, or None; ``shares`` are what is taken of each, 0 to 1."""
    if amount < 1:
        fitting = [n for n, taken in enumerate(shares) if taken + amount <= 1 + ROUNDING]
        return (max(fitting, key=lambda number: shares[number]),) if fitting else None
    free = [number for number, taken in enumerate(shares) if taken <= ROUNDING]
    return tuple(free[: int(amount)]) if len(free) >= int(amount) else None


def variables(devices: Devices, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that inherits ``environ`` and may use these devices.

    ValueError where the variable of the host does not name as many.
    """
    made: dict[str, str] = {}
    for resource, numbers in devices.items():
        limits = {name: environ[name] for name in VARIABLES[resource] if name in environ}
        for name in VARIABLES[resource]:
            # AMD's devices obey CUDA_VISIBLE_DEVICES too, but HIP_VISIBLE_DEVICES comes first.
            by = name if name in limits else next(iter(limits), "")
            text = limits.get(by, "")
            names = [each.strip() for each in text.split(",") if each.strip()]
            if by and len(names) <= max(numbers):
                raise ValueError(
                    f"device {max(numbers)} of {resource} is not among {by}={text!r}, which the "
                    f"host was started with; start it with fewer {resource}"
                )
            made[name] = ",".join(names[n] if names else str(n) for n in numbers)
    return made
