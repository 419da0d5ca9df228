"""Processes by pid: who they are, whether they live, and the records of those that run.

A pid alone is not an identity, because the kernel uses it again; a pid with its start time is. Each
process of a host's system leaves a record in the state dir's ``run/`` while it lives, so that
whoever starts or stops the system later finds all of them, whoever their parent was.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import setproctitle

from greenroom.actors.messages import Process
from greenroom.actors.state_dir import write_private

_STAT_STATE = 0
_STAT_START_TICKS = 19  # field 22 of proc(5), counted after the command's closing parenthesis


def identify(pid: int, incarnation: str = "") -> Process | None:
    """Return the live process ``pid``, or None when there is none (a zombie counts as none)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[_STAT_STATE] in "ZX":
        return None
    return Process(pid, int(fields[_STAT_START_TICKS]), incarnation)


def this_process() -> Process:
    """Identify the calling process, with a new random incarnation."""
    process = identify(os.getpid(), secrets.token_hex(8))
    assert process is not None, "the calling process is alive"
    return process


def is_alive(process: Process) -> bool:
    """Tell whether this very process, not a later one of the same pid, is alive."""
    now = identify(process.pid)
    return now is not None and now.start_ticks == process.start_ticks


def open_pidfd(process: Process) -> int | None:
    """Open a descriptor that becomes readable when the process ends; None when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if is_alive(process):
        return fd
    os.close(fd)
    return None


def send_signal(process: Process, number: int) -> bool:
    """Signal this very process; False when it is gone."""
    fd = open_pidfd(process)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def wait_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Wait until the processes are gone; return those that are not within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    left = [process for process in processes if is_alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(0.005)
        left = [process for process in left if is_alive(process)]
    return left


def kill_all(processes: Iterable[Process], timeout_s: float = 5.0) -> list[Process]:
    """SIGKILL the processes and wait; return those that outlive ``timeout_s``."""
    processes = list(processes)
    for process in processes:
        send_signal(process, signal.SIGKILL)
    return wait_gone(processes, timeout_s)


def command_line(pid: int) -> str:
    """Return a process's command line in one string, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def child_pids(pid: int) -> list[int]:
    """Return the pids of the direct children, of all the process's threads."""
    pids: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, children.read_text(encoding="ascii").split())
    return pids


def descendants(pids: Iterable[int]) -> list[Process]:
    """Return the processes that live under these, at any depth."""
    found: dict[int, Process] = {}
    frontier = list(pids)
    while frontier:
        new = {pid for parent in frontier for pid in child_pids(parent)} - set(found)
        children = {pid: process for pid in new if (process := identify(pid)) is not None}
        found.update(children)
        frontier = list(children)
    return list(found.values())


class RunRecords:
    """The records of a state dir's running processes, one small file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, process: Process, role: str, title: str | None = None, **more: str) -> None:
        """Record a process under its role and, for the calling one, show its title.

        ``more`` is what :meth:`details` returns.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = {"role": role, **process._asdict(), "more": more}
        write_private(self._path(process), json.dumps(record))
        if title is not None:
            setproctitle.setproctitle(f"greenroom: {title}")

    def remove(self, process: Process) -> None:
        """Forget a process; harmless when there is no record."""
        self._path(process).unlink(missing_ok=True)

    def alive(self) -> dict[Process, str]:
        """Return the recorded processes that live, with their roles; drop the other records."""
        found: dict[Process, str] = {}
        try:
            paths = list(self._folder.glob("*.json"))
        except PermissionError:
            return found  # somebody else's: nothing of ours can be there
        for path in paths:
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                role = record.pop("role")
                record.pop("more", None)
                process = Process(**record)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # removed meanwhile, or written by something else
            if is_alive(process):
                found[process] = role
            else:
                path.unlink(missing_ok=True)
        return found

    def with_role(self, *roles: str) -> list[Process]:
        """Return the recorded live processes of these roles."""
        return [process for process, role in self.alive().items() if role in roles]

    def details(self, role: str) -> list[dict[str, str]]:
        """Return what the live processes of a role have recorded besides."""
        found = []
        for process in self.with_role(role):
            with contextlib.suppress(OSError, ValueError):  # it ended meanwhile
                record = json.loads(self._path(process).read_text(encoding="utf-8"))
                found.append(dict(record.get("more") or {}))
        return found

    def mark_ready(self, process: Process) -> None:
        """Tell other starters that the system of this host process answers."""
        write_private(self._ready, self._path(process).stem)

    def unmark_ready(self) -> None:
        """Take back :meth:`mark_ready`; harmless when it was not said."""
        self._ready.unlink(missing_ok=True)

    def is_ready(self, process: Process) -> bool:
        """Tell whether the system of this host process answers."""
        try:
            return self._ready.read_text(encoding="utf-8") == self._path(process).stem
        except OSError:
            return False

    @property
    def _ready(self) -> Path:
        return self._folder / "host.ready"

    def _path(self, process: Process) -> Path:
        return self._folder / f"{process.pid}-{process.start_ticks}.json"
