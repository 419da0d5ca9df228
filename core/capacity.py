"""What replicas may take of the host, what they have taken, and what stands in another's way.

A replica takes what its release's actor options ask for when it is decided on, and gives it back
when its process is gone, not before: one that drains still has its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 1024.0**3
_ROUNDING = 1e-9  # ten times 0.1 is a little more than 1
_VARIABLES = {
    "num_cpus": "GREENROOM_NUM_CPUS",
    "num_gpus": "GREENROOM_NUM_GPUS",
    "memory": "GREENROOM_MEMORY",
}

Needs = Mapping[str, float]


def needs_of(actor_options: Mapping[str, Any]) -> dict[str, float]:
    """Return resource -> amount of what fields of ActorOptions ask for; custom ones by name."""
    needs = {name: actor_options.get(name, 0) for name in _VARIABLES}
    needs |= actor_options.get("resources", {})
    return {name: amount for name, amount in needs.items() if amount}


class Capacity:
    """One host's resources; without ``total`` there is no end to them."""

    def __init__(self, total: Needs | None = None) -> None:
        self.total = total
        self._held: dict[str, Needs] = {}  # by replica
        self._taken: dict[str, float] = {}

    def take(self, replica: str, needs: Needs) -> None:
        """Count what a replica has, whether there was room or not."""
        self._held[replica] = needs
        for name, amount in needs.items():
            self._taken[name] = self._taken.get(name, 0.0) + amount

    def give_back(self, replica: str) -> None:
        """Count a replica's part as free again; harmless when it has none."""
        for name, amount in self._held.pop(replica, {}).items():
            self._taken[name] -= amount

    def has_room(self, needs: Needs) -> bool:
        """Tell whether a replica that needs this fits now."""
        return all(amount <= self._free(name) + _ROUNDING for name, amount in needs.items())

    def why_not(self, needs: Needs) -> str:
        """Return what stands in the way of a replica that does not fit, and what would help."""
        assert self.total is not None, "what has no end has room"
        told = []
        for name, amount in needs.items():
            free = max(self._free(name), 0.0)
            if amount <= free + _ROUNDING:
                continue
            has = f"a replica needs {_told(name, amount)}"
            if amount > self.total.get(name, 0.0) + _ROUNDING:
                variable = _VARIABLES.get(name, "GREENROOM_RESOURCES")
                told.append(
                    f"{has}, and the host has {_told(name, self.total.get(name, 0.0))} in all: ask "
                    f"for less, or start the system with a larger {variable}"
                )
            else:
                missing = _told(name, amount - free)
                told.append(
                    f"{has}, and {_told(name, free)} of {_told(name, self.total[name])} is free: "
                    f"it fits when {missing} more is given back by {self._holders(name)}"
                )
        return "; ".join(told)

    def free_part(self, needs: Needs) -> float:
        """Return how much is free of what a replica needs, 0 to 1, where that is least.

        Of CPUs and memory in any case, so that replicas that ask for nothing are spread, too.
        """
        if self.total is None:
            return 1.0
        names = [*needs, *(name for name in ("num_cpus", "memory") if name not in needs)]
        totals = ((name, self.total.get(name, 0.0)) for name in names)
        return min((max(self._free(n), 0.0) / total for n, total in totals if total), default=0.0)

    def shown(self) -> dict[str, dict[str, float]]:
        """Return resource -> total and taken, for status."""
        return {
            name: {"total": total, "taken": round(self._taken.get(name, 0.0), 9)}
            for name, total in (self.total or {}).items()
        }

    def _free(self, name: str) -> float:
        if self.total is None:
            return float("inf")
        return self.total.get(name, 0.0) - self._taken.get(name, 0.0)

    def _holders(self, name: str) -> str:
        amounts: dict[str, float] = {}
        for replica, needs in self._held.items():
            if name in needs:
                backend = replica.rpartition("#")[0]
                amounts[backend] = amounts.get(backend, 0.0) + needs[name]
        largest = sorted(amounts, key=lambda backend: -amounts[backend])
        told = ", ".join(f"{backend} ({_told(name, amounts[backend])})" for backend in largest[:3])
        return told + (f" and {len(largest) - 3} others" if len(largest) > 3 else "")


def _told(name: str, amount: float) -> str:
    if name == "memory":
        return f"{amount / GIB:.4g} GiB of memory"
    return f"{amount:.9g} {name}"
