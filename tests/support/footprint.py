"""What a system has of the machine: processes, descriptors, listening sockets, run records."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from greenroom.actors.runtime.processes import command_line, identify
from greenroom.actors.runtime.records import MARK, mark_of
from tests.support.systems import RunningSystem

# What may be under way: a connection being dialed, a file being written. Of sockets also a second
# connection with each of six peers: where two processes dial each other at once, both stay
# (tests/transport/test_links.py).
SLACK = {"sockets": 3 + 6, "others": 3}


def pids_of(running: RunningSystem) -> list[int]:
    """Return the pids of all live processes that were started for this state dir, recorded or not.

    A process belongs to it that inherited its environment, bears its mark, or has one of its files
    open. No one sign would do: a process title overwrites the environment that /proc shows.
    """
    state_dir, host_dir = running.settings.state_dir, running.settings.run_dir.parent
    signs = {
        f"GREENROOM_STATE_DIR={state_dir}".encode(),
        f"{MARK}={mark_of(host_dir)}".encode(),
    }
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        pid = int(folder.name)
        if pid == os.getpid() or identify(pid) is None:
            continue
        if signs & set(environ) or any(link.startswith(f"{state_dir}/") for link in _links(pid)):
            found.append(pid)
    return found


def unrecorded(running: RunningSystem) -> list[int]:
    """Return the live processes of the system that left no record."""
    recorded = {pid for _, pid in running.pids()}
    return [pid for pid in pids_of(running) if pid not in recorded]


def descriptors(running: RunningSystem) -> dict[str, int]:
    """Return how many sockets and others the process of each role has; of several, the most.

    Without those to /dev/null: a forked process has as many of them as its parent had descriptors.
    """
    most: Counter[str] = Counter()
    for role, pid in running.pids():
        held = _held(pid)
        sockets = sum(link.startswith("socket:") for link in held)
        for kind, count in (("sockets", sockets), ("others", len(held) - sockets)):
            most[f"{role}'s {kind}"] = max(most[f"{role}'s {kind}"], count)
    return dict(most)


def listed(running: RunningSystem, grown: Iterable[str]) -> str:
    """Return what the descriptors are of processes that hold more, for a failure's message."""
    roles = {name.partition("'")[0] for name in grown}
    lines = []
    for role, pid in running.pids():
        if role in roles:
            kinds = Counter(link.partition("[")[0] for link in _links(pid))
            watched = [_title(info) for info in Path(f"/proc/{pid}/fdinfo").iterdir()]
            lines.append(f"{role} {pid}: {dict(kinds)}, watches {sorted(filter(None, watched))}")
    return "\n".join(lines)


def _title(info: Path) -> str:
    """Return the title of the process that a pidfd is of, "dead" without one; "" for others."""
    try:
        found = re.search(r"^Pid:\s*(-?\d+)", info.read_text(), re.MULTILINE)
    except FileNotFoundError:  # closed meanwhile
        return ""
    return (command_line(int(found[1])) or "dead") if found else ""


def shared_listeners(running: RunningSystem) -> dict[str, list[int]]:
    """Return the actors' listening sockets that more than one process holds, with their pids."""
    names = {}
    for line in Path("/proc/net/unix").read_text(encoding="ascii", errors="replace").splitlines():
        fields = line.split()
        listens = fields[3] == "00010000"  # __SO_ACCEPTCON
        if listens and len(fields) > 7 and fields[7].startswith("@greenroom"):
            names[f"socket:[{fields[6]}]"] = fields[7]
    holders: dict[str, list[int]] = {}
    for pid in pids_of(running):
        for link in _links(pid):
            if link in names:
                holders.setdefault(names[link], []).append(pid)
    return {name: pids for name, pids in holders.items() if len(pids) > 1}


def stale_records(running: RunningSystem) -> list[str]:
    """Return the names of run records without a live process, and of half-written ones."""
    alive = {f"{pid}-" for _, pid in running.pids()}
    paths = [*running.settings.run_dir.glob("*.json"), *running.settings.run_dir.glob("*.tmp")]
    return [path.name for path in paths if not path.name.startswith(tuple(alive))]


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return whose descriptors are more than before."""
    return {
        name: (before[name], count)
        for name, count in after.items()
        if name in before and count > before[name] + SLACK[name.rpartition(" ")[2]]
    }


def _held(pid: int) -> list[str]:
    # Whose pulses a process holds depends on who is there; it lets go of them within a second.
    return [link for link in _links(pid) if link != os.devnull and "greenroom-pulse" not in link]


def _links(pid: int) -> list[str]:
    links = []
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                links.append(os.readlink(path))
            except OSError:
                continue
    except OSError:
        return []
    return links
