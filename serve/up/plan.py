"""What is to be done: a function of what is wanted and what was found, which touches nothing.

Theory of operation. A host is as it should be when its generation, a release with settings, is the
wanted one, it was healthy with that, and it is in the cluster. A step brings a host one of these
nearer, and can be repeated. So a run that was cut off needs no memory: the next one finds what is
left to do. Hosts that serve change one at a time, the one that leads last; those that do not yet,
or no longer, begin at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from greenroom.actors.transport.cluster_key import key_id
from greenroom.serve.up.hosts_file import WantedHost

RUNNING = "RUNNING"


class Does(StrEnum):
    """What a step does."""

    INSTALL = "install"
    START = "start"
    RESTART = "restart"
    REMOVE = "drain, stop and remove"
    DEPLOY = "deploy"


class Step(NamedTuple):
    """Something to do, on a host; ``why`` goes on with the sentence."""

    does: Does
    host: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.host}: {self.does}{self.why}"


class FoundHost(NamedTuple):
    """What there is on a host, by on_host.inspect; the defaults are those of a bare one."""

    python: str = ""
    wheels: Mapping[str, str] = {}
    releases: tuple[str, ...] = ()
    generation: str = ""
    healthy: str = ""
    key: str = ""
    hosts: Mapping[str, Any] = {}


class Found(NamedTuple):
    """What there is on the hosts of the file, by name, and what the cluster says of itself."""

    hosts: Mapping[str, FoundHost]
    report: Mapping[str, Any] = {}

    @property
    def leavers(self) -> list[str]:
        """The hosts that an earlier file had, and this one does not."""
        return [name for name in self.had if name not in self.hosts]

    @property
    def states(self) -> dict[str, str]:
        """The states of the hosts that are in the cluster."""
        return {each["name"]: each["state"] for each in self.report.get("hosts", ())}

    @property
    def leader(self) -> str:
        """The host that leads, or that alone can; "" where none is known."""
        now = str((self.report.get("controller") or {}).get("host") or "")
        return now or next((name for name, had in self.had.items() if had["leads"]), "")

    @property
    def had(self) -> dict[str, Any]:
        """The hosts that the last run had, as `record` of on_host.py keeps them."""
        return {name: had for host in self.hosts.values() for name, had in host.hosts.items()}

    @property
    def key(self) -> str:
        """The text of the cluster file, from the host that leads if it has one."""
        keys = {name: host.key for name, host in self.hosts.items() if host.key}
        return keys.get(self.leader) or next(iter(keys.values()), "")


def plan(wanted: Mapping[str, WantedHost], found: Found, leads: str) -> list[Step]:
    """Return the steps in their order; none where all is as it should be.

    ``leads`` is the host that leads, or that is to.
    """
    steps = [
        Step(Does.INSTALL, name, f" {host.release}")
        for name, host in wanted.items()
        if host.release not in found.hosts[name].releases
    ]
    is_led = found.states.get(leads) == RUNNING
    changes = [change for name in wanted if (change := _change(wanted[name], found))]
    # What starts comes before what restarts, for there is more room for replicas then.
    changes.sort(key=lambda step: ((step.host == leads) == is_led, step.does == Does.RESTART))
    steps += changes
    steps += [Step(Does.REMOVE, name, ", as the file does not name it") for name in found.leavers]
    return steps


def _change(wanted: WantedHost, found: Found) -> Step | None:
    name, generation = wanted.target.name, wanted.generation
    has = found.hosts[name]
    if not has.generation:
        return Step(Does.START, name)
    if has.generation != generation:
        old, is_other = _release(has.generation), not has.generation.startswith(wanted.release)
        why = f" from {old} to {wanted.release}" if is_other else " with other settings"
        return Step(Does.RESTART, name, why)
    if found.states.get(name) != RUNNING:
        return Step(Does.START, name, ", as it does not run")
    if has.healthy != generation:
        return Step(Does.START, name, ", as it was not healthy yet")
    return None


def _release(generation: str) -> str:
    return generation.rpartition("-")[0]


def problems(wanted: Mapping[str, WantedHost], found: Found) -> Iterator[str]:
    """Return what stands in the way, a line each."""
    pythons = {name: host.python for name, host in found.hosts.items()}
    if len(set(pythons.values())) > 1:
        named = ", ".join(f"{name} has {version}" for name, version in pythons.items())
        yield f"all hosts need the same minor release of Python: {named}; name one by `python:`"
    keys = {name: key_id(host.key.encode()) for name, host in found.hosts.items() if host.key}
    if len(set(keys.values())) > 1:
        named = ", ".join(f"{name} has {key}" for name, key in keys.items())
        yield (
            f"the hosts are of different clusters, by their cluster files: {named}; take some out "
            "with `greenroom down --delete` and a file of those, or copy state/cluster.key from "
            "another host if one has missed a `greenroom rotate-key`"
        )
    leader = found.leader
    if not leader or "GREENROOM_STORE" in wanted.get(leader, next(iter(wanted.values()))).environ:
        return
    if leader != next(iter(wanted)):
        yield (
            f"host {leader!r} leads and has the cluster's state: it must stay the first in the "
            "file, unless more hosts can lead, by the setting `store`"
        )
