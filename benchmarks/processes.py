"""Process trees and their memory, read from /proc."""

from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")


def _parents() -> tuple[dict[int, int], set[int]]:
    """Return pid -> parent pid of every process, and the zombies among them."""
    parents = {}
    zombies = set()
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        parents[int(entry.name)] = int(parent)
        if state in "ZX":
            zombies.add(int(entry.name))
    return parents, zombies


def descendants(pid: int) -> set[int]:
    """Return the pids of all living processes below `pid`, itself left out.

    /proc is not read in one moment: a child may be read before its parent's death and the parent
    after it. So zombies lead to children too; still, only waitpid can tell that nothing is left.
    """
    parents, zombies = _parents()
    children = defaultdict(list)
    for child, parent in parents.items():
        children[parent].append(child)
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = children[waiting.pop()]
        found.update(below)
        waiting.extend(below)
    return found - zombies


def pss_bytes(pids: set[int]) -> int:
    """Sum the proportional set sizes: private memory plus the share of what is shared."""
    total_kb = 0
    for pid in pids:
        try:
            lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kb * 1024


def title(pid: int) -> str:
    """Return the command line or title, or "gone"."""
    try:
        line = (PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return line.replace(b"\0", b" ").decode(errors="replace").strip()
