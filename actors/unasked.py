"""Replicas that nobody has ever told anything: whoever had one made could not reach it any more.

An actor of ours is on record from its first message on. A replica whose controller was cut off, or
died, just after it had asked this host's admin for it may never get one: the controller starts
another elsewhere, forgets this one, and nobody knows that there is a process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection

from greenroom.actors.messages import Process
from greenroom.actors.processes import (
    RunRecords,
    child_pids,
    command_line,
    identify,
    send_signal,
)

_TITLE = "Replica "  # Thespian's for the process, until that gives itself another


class Unasked:
    """Finds them among an admin's children: those that were there, unknown, two looks in a row."""

    def __init__(self) -> None:
        self._suspected: frozenset[Process] = frozenset()

    def look(self, children: Collection[Process], known: Collection[int]) -> list[Process]:
        """Return the children that are to go; ``known`` are the pids of processes on record."""
        unknown = frozenset(child for child in children if child.pid not in known)
        found = sorted(unknown & self._suspected)
        self._suspected = unknown
        return found

    def end(self, admin: Process, records: RunRecords, on_ended: Callable[[Process], None]) -> None:
        """Kill what a look finds."""
        known = {process.pid for process in records.alive()}
        if os.getpid() not in known:
            return  # the records are gone, as with an unmounted volume: they say nothing of anybody
        pids = [pid for pid in child_pids(admin.pid) if command_line(pid).startswith(_TITLE)]
        children = [child for child in map(identify, pids) if child is not None]
        for child in self.look(children, known):
            if send_signal(child, signal.SIGKILL):
                on_ended(child)
