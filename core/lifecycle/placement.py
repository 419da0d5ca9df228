"""On which host a replica runs: where it fits, apart from its siblings, where most is free.

A host can take a replica if it is *open* (alive, and not being emptied), has the labels that the
backend asks for, has fewer than ``max_per_host`` of the backend's replicas, and has room. Among
those hosts, the one where the release has failed least to start is chosen; among equals, the one
with the fewest replicas of the backend; then the one with the largest share free of the resources
that the replica needs; then the one with the fewest replicas in all. Running replicas are not
moved.

A replica takes the resources of its release's actor options as soon as it is placed. They are free
again only when its process has ended: a replica that drains still uses its memory. Of resources
that are devices it gets certain ones (core/devices.py), which are recorded with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from greenroom.core.devices import ROUNDING, VARIABLES, Devices, choose

GIB = 1024.0**3
STORE_LABEL = "greenroom/store"  # "yes" on hosts from which the cluster's store can be opened
_VARIABLES = {
    "num_cpus": "GREENROOM_NUM_CPUS",
    "num_gpus": "GREENROOM_NUM_GPUS",
    "memory": "GREENROOM_MEMORY",
}
MAX_HOSTS_NAMED = 3  # in one sentence

Needs = Mapping[str, float]
_NONE: Mapping[str, int] = {}


def needs_of(actor_options: Mapping[str, Any]) -> dict[str, float]:
    """Return resource -> amount of what fields of ActorOptions ask for; custom ones by name."""
    needs = {name: actor_options.get(name, 0) for name in _VARIABLES}
    needs |= actor_options.get("resources", {})
    return {name: amount for name, amount in needs.items() if amount}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one replica of a backend needs of its host."""

    needs: Needs = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    max_per_host: int | None = None


def request_of(actor_options: Mapping[str, Any], max_per_host: int | None) -> Request:
    """Return what a replica with these fields of ActorOptions needs of its host."""
    labels = actor_options.get("label_selector", {})
    return Request(needs=needs_of(actor_options), labels=labels, max_per_host=max_per_host)


@dataclass(slots=True, eq=False)
class PlacedHost:
    """A host as placement sees it, and what replicas have taken there."""

    name: str
    total: Needs | None = None  # its resources; None for no limit
    labels: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = True
    why_closed: str = ""
    held: dict[str, Needs] = field(default_factory=dict)  # by replica
    taken: dict[str, float] = field(default_factory=dict)
    devices: dict[str, Devices] = field(default_factory=dict)  # by replica

    @property
    def is_gateway(self) -> bool:
        """Whether it takes no replicas: it only has a front."""
        return self.total is not None and not self.total

    def take(self, replica: str, needs: Needs, devices: Devices | None = None) -> Devices:
        """Count what a replica has, whether there was room or not.

        Return its devices: those that are given, or else chosen.
        """
        chosen = devices or {
            name: found
            for name in needs.keys() & VARIABLES.keys()
            if (found := self._choose_devices(name, needs[name]))
        }
        self.held[replica] = needs
        for name, amount in needs.items():
            self.taken[name] = self.taken.get(name, 0.0) + amount
        if chosen:
            self.devices[replica] = chosen
        return chosen

    def give_back(self, replica: str) -> None:
        """Count a replica's part as free again; harmless when it has none."""
        self.devices.pop(replica, None)
        for name, amount in self.held.pop(replica, {}).items():
            self.taken[name] -= amount

    def has_room(self, needs: Needs) -> bool:
        """Return whether a replica that needs this fits now."""
        return all(
            amount <= self._free(name) + ROUNDING and self._has_devices(name, amount)
            for name, amount in needs.items()
        )

    def _has_devices(self, name: str, amount: float) -> bool:
        is_counted = self.total is None or name not in VARIABLES
        return is_counted or self._choose_devices(name, amount) is not None

    def _choose_devices(self, name: str, amount: float) -> tuple[int, ...] | None:
        return choose(amount, self._shares(name))

    def _shares(self, name: str) -> list[float]:
        """Return how much is taken of each device of a kind."""
        shares = [0.0] * int((self.total or {}).get(name, 0))
        for replica, devices in self.devices.items():
            for number in devices.get(name, ()):
                if number < len(shares):  # else the host had more of them once
                    shares[number] += min(self.held[replica][name], 1.0)
        return shares

    def refusal(self, request: Request, siblings: int) -> str:
        """Return why a replica cannot run here, "" when it can; without regard to free room."""
        if not self.is_open:
            return self.why_closed
        if self.is_gateway:
            return "it takes no replicas, as it was started with --no-replicas"
        for label, value in request.labels.items():
            if self.labels.get(label) != value:
                has = f"{label}={self.labels[label]}" if label in self.labels else f"no {label}"
                return f"a replica needs {label}={value}, and it has {has}"
        if request.max_per_host is not None and siblings >= request.max_per_host:
            return (
                f"it has {siblings} of its replicas already, and max_replicas_per_host is "
                f"{request.max_per_host}"
            )
        return ""

    def why_no_room(self, needs: Needs) -> str:
        """Return what stands in the way of a replica that does not fit, and what would help."""
        assert self.total is not None, "a host without a limit has room"
        reasons = []
        for name, amount in needs.items():
            total, free = self.total.get(name, 0.0), max(self._free(name), 0.0)
            if amount <= free + ROUNDING:
                if not self._has_devices(name, amount):
                    shares = ", ".join(f"{share:.4g}" for share in self._shares(name))
                    reasons.append(
                        f"a replica needs {_text(name, amount)} of whole devices, or of one, and "
                        f"of these is taken: {shares}"
                    )
                continue
            needed = f"a replica needs {_text(name, amount)}"
            if amount > total + ROUNDING:
                variable = _VARIABLES.get(name, "GREENROOM_RESOURCES")
                reasons.append(
                    f"{needed}, and the host has {_text(name, total)} in all: ask for less, or "
                    f"start the system with a larger {variable}"
                )
            else:
                reasons.append(
                    f"{needed}, and {_text(name, free)} of {_text(name, total)} is free: it fits "
                    f"when {_text(name, amount - free)} more is given back by "
                    f"{self._holders(name)}"
                )
        return "; ".join(reasons)

    def free_part(self, needs: Needs) -> float:
        """Return how much is free of what a replica needs, 0 to 1, where that is least.

        CPUs and memory count in any case, so that replicas that ask for nothing are spread, too.
        """
        if self.total is None:
            return 1.0
        totals = ((name, self.total.get(name, 0.0)) for name in {*needs, "num_cpus", "memory"})
        return min((max(self._free(n), 0.0) / total for n, total in totals if total), default=0.0)

    def shown(self) -> dict[str, dict[str, Any]]:
        """Return resource -> total and taken, also of each device, for status."""
        shown: dict[str, dict[str, Any]] = {}
        for name, total in (self.total or {}).items():
            shown[name] = {"total": total, "taken": round(self.taken.get(name, 0.0), 9)}
            if name in VARIABLES and total:
                shown[name]["devices"] = [round(share, 9) for share in self._shares(name)]
        return shown

    def _free(self, name: str) -> float:
        if self.total is None:
            return float("inf")
        return self.total.get(name, 0.0) - self.taken.get(name, 0.0)

    def _holders(self, name: str) -> str:
        amounts: dict[str, float] = {}
        for replica, needs in self.held.items():
            if name in needs:
                backend = replica.rpartition("#")[0]
                amounts[backend] = amounts.get(backend, 0.0) + needs[name]
        largest = sorted(amounts, key=lambda backend: -amounts[backend])
        text = ", ".join(f"{backend} ({_text(name, amounts[backend])})" for backend in largest[:3])
        return text + (f" and {len(largest) - 3} others" if len(largest) > 3 else "")


def _text(name: str, amount: float) -> str:
    if name == "memory":
        return f"{amount / GIB:.4g} GiB of memory"
    return f"{amount:.9g} {name}"


class Placement:
    """The hosts, and the resources that each replica has taken there."""

    def __init__(self) -> None:
        self._freed = False  # there may be room that was not there before
        self._hosts: dict[str, PlacedHost] = {}
        self._at: dict[str, PlacedHost] = {}  # by replica

    def set_host(
        self, name: str, total: Needs | None, labels: Mapping[str, str] | None = None
    ) -> None:
        """Add a host, or change what it has.

        ``total`` None is no limit; empty, it is a gateway's.
        """
        host = self._hosts.get(name)
        if host is None:
            self._hosts[name] = PlacedHost(name, total, labels or {})
        else:
            host.total, host.labels = total, labels or {}
        self._freed = True

    def drop_host(self, name: str) -> None:
        """Forget a host, and what was taken there."""
        host = self._hosts.pop(name, None)
        self._at = {tag: at for tag, at in self._at.items() if at is not host}

    def open_host(self, name: str) -> None:
        """Let replicas be placed on a host."""
        self._hosts[name].is_open = True
        self._freed = True

    def close_host(self, name: str, why: str) -> None:
        """Place nothing on a host any more; what is there stays."""
        host = self._hosts[name]
        host.is_open, host.why_closed = False, why

    def take_freed(self) -> bool:
        """Return whether there may be more room than when this was last asked."""
        freed, self._freed = self._freed, False
        return freed

    def knows(self, host: str) -> bool:
        """Return whether there is such a host."""
        return host in self._hosts

    def with_host(self, host: str, error: str) -> str:
        """Return an error with the name of its host, where there are several hosts."""
        return error if len(self._hosts) < 2 else f"{error.rstrip()} (on host {host!r})"

    def is_open(self, host: str) -> bool:
        """Return whether replicas may be placed on a host."""
        known = self._hosts.get(host)
        return known is not None and known.is_open and not known.is_gateway

    def can_take_over(self, host: str) -> bool:
        """Return whether replicas may be placed on any host but this one."""
        return any(self.is_open(each) for each in self._hosts if each != host)

    def is_gateway(self, host: str) -> bool:
        """Return whether a host takes no replicas, whatever its state."""
        return host in self._hosts and self._hosts[host].is_gateway

    def take(
        self, replica: str, host: str, needs: Needs, devices: Devices | None = None
    ) -> Devices:
        """Count what a replica has, whether there was room or not; return its devices."""
        self._at[replica] = self._hosts[host]
        return self._hosts[host].take(replica, needs, devices)

    def give_back(self, replica: str) -> None:
        """Count a replica's part as free again; harmless when it has none."""
        host = self._at.pop(replica, None)
        if host is not None:
            host.give_back(replica)
            self._freed = True

    def choose(
        self, request: Request, siblings: Mapping[str, int], failed: Mapping[str, int] = _NONE
    ) -> str | None:
        """Return the host for one more replica, or None.

        ``siblings``, and how many starts have ``failed``, are by host.
        """
        names = self.fitting(request, siblings)
        if not names:
            return None

        def cost(host: PlacedHost) -> tuple[int, int, float, int, str]:
            name, free = host.name, host.free_part(request.needs)
            return failed.get(name, 0), siblings.get(name, 0), -free, len(host.held), name

        return min((self._hosts[name] for name in names), key=cost).name

    def fitting(self, request: Request, siblings: Mapping[str, int]) -> list[str]:
        """Return the hosts that can take one more replica now."""
        return [
            host.name
            for host in self._hosts.values()
            if not host.refusal(request, siblings.get(host.name, 0))
            and host.has_room(request.needs)
        ]

    def is_freer(self, host: str, other: str, needs: Needs) -> bool:
        """Return whether a host has no smaller share of what is needed free than another."""
        return self._hosts[host].free_part(needs) >= self._hosts[other].free_part(needs)

    def held(self) -> Counter[str]:
        """Return how many replicas each host has."""
        return Counter({host.name: len(host.held) for host in self._hosts.values()})

    def why_not(self, request: Request, siblings: Mapping[str, int]) -> str:
        """Return what stands in the way of one more replica, and what would help."""
        reasons: dict[str, str] = {}
        for host in self._hosts.values():
            refusal = host.refusal(request, siblings.get(host.name, 0))
            reasons[host.name] = refusal or host.why_no_room(request.needs)
        if len(reasons) == 1:
            return next(iter(reasons.values()))
        named = list(reasons.items())[:MAX_HOSTS_NAMED]
        text = "; ".join(f"host {name}: {reason}" for name, reason in named)
        others = len(reasons) - len(named)
        if others:
            text += f"; and {others} other host{'s' if others > 1 else ''}"
        return f"{text}; or another host joins"

    def shown(self, host: str | None = None) -> dict[str, dict[str, Any]]:
        """Return resource -> total and taken, of one host or of all that are open together."""
        if host is not None:
            return self._hosts[host].shown()
        sums: dict[str, dict[str, float]] = {}
        for each in self._hosts.values():
            for name, amounts in each.shown().items() if each.is_open else ():
                sum_ = sums.setdefault(name, {"total": 0.0, "taken": 0.0})
                for what in sum_:
                    sum_[what] = round(sum_[what] + amounts[what], 9)
        return sums


def anywhere(total: Needs | None = None) -> Placement:
    """Return a placement with one host that has no name, and no limit but ``total``."""
    placement = Placement()
    placement.set_host("", total)
    return placement
