"""Control groups: each replica has one of its own, where systemd has handed some on to Greenroom.

Theory of operation. A unit with ``Delegate=`` may make groups below its own, and with
``DelegateSubgroup=greenroom-host`` its processes begin in that one of them, as the kernel wants: a
group that hands memory and CPU on to others has no process of its own. A replica moves itself into
a group beside that one, which has its memory limit, and a weight by its CPUs for when the host has
more to do than it can. So the kernel ends only the replica that takes too much, with its children,
and counts that there. The host process reads the count, and removes groups that are empty.

Where nothing is handed on, as without systemd or before its version 254, there is no folder, and a
replica watches its memory on its own (replica/wear.py). See
https://docs.kernel.org/admin-guide/cgroup-v2.html and https://systemd.io/CGROUP_DELEGATION.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

from greenroom.actors.runtime.logs import replica_log

logger = logging.getLogger(__name__)

SUBGROUP = "greenroom-host"
ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
WEIGHT = 100  # of a CPU, as of a group that says nothing
MAX_WEIGHT = 10_000


def handed_on(root: Path = ROOT, own: Path = OWN) -> Path | None:
    """Return the folder in which groups may be made; None if the caller is in none of them."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::/"):
            folder = (root / line.removeprefix("0::/")).parent
            may_write = os.access(folder / "cgroup.subtree_control", os.W_OK)
            return folder if may_write and (folder / SUBGROUP).is_dir() else None
    return None


class Group:
    """The group of the calling process, a replica. Use :func:`enter`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def limit(self, memory_bytes: int | None) -> None:
        """Have the kernel end the replica where it needs more; None for no limit."""
        most = "max" if memory_bytes is None else str(memory_bytes)
        try:
            (self._folder / "memory.max").write_text(most, encoding="ascii")
        except OSError as error:
            logger.warning("%s: memory.max cannot be %s: %s", self._folder, most, error)


def enter(folder: Path, replica: str, num_cpus: float) -> Group | None:
    """Move the calling process into a group of its own; None, with a warning, if it cannot be."""
    group = folder / replica_log(replica)
    weight = min(max(round(WEIGHT * num_cpus), 1), MAX_WEIGHT) if num_cpus else WEIGHT
    try:
        (folder / "cgroup.subtree_control").write_text("+memory +cpu", encoding="ascii")
        try:
            _make_and_enter(group, weight)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
            _make_and_enter(group, weight)  # the host process found it empty just then
    except OSError as error:
        logger.warning("%s has no control group of its own: %s", replica, error)
        return None
    return Group(group)


def _make_and_enter(group: Path, weight: int) -> None:
    group.mkdir(exist_ok=True)
    (group / "cpu.weight").write_text(str(weight), encoding="ascii")
    (group / "memory.oom.group").write_text("1", encoding="ascii")
    (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def has_run_out_of_memory(folder: Path, replica: str) -> bool:
    """Return whether the kernel has killed a replica, or a child of it, for its limit."""
    try:
        events = (folder / replica_log(replica) / "memory.events").read_text(encoding="ascii")
    except OSError:
        return False
    kills = dict(line.split() for line in events.splitlines()).get("oom_kill", "0")
    return kills != "0"


def remove_empty(folder: Path) -> None:
    """Remove the groups of replicas that have ended: the kernel keeps those with processes."""
    for group in folder.iterdir():
        if group.is_dir() and group.name != SUBGROUP:
            with contextlib.suppress(OSError):
                group.rmdir()
