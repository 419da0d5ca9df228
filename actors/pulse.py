"""The pulse of a process: a page of memory in which its message loop counts its beats.

Theory of operation. The page is an anonymous file (memfd), named after the process, that any
process of the same user finds under ``/proc/<pid>/fd``: beating costs no system call, looking costs
one, and neither touches a disk, which may hang itself. The page ends with its process. A process
without one, such as a user's script, is never judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from greenroom.actors.messages import Process
from greenroom.core.silence import TICK_S, Doing

logger = logging.getLogger(__name__)

_PAGE = struct.Struct("=QddQ?")
_STAT_STATE, _STAT_UTIME, _STAT_STIME = 0, 11, 12  # of proc(5), counted after the command
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COMPUTES = 0.1  # from this share of a CPU on


class Seen(NamedTuple):
    """What a page says."""

    beats: int
    at: float  # the time of the last one, by time.monotonic()
    patience_s: float  # how long the process is to be let be, whatever it does
    thread: int  # of the loop
    runs_user_code: bool


class Pulse:
    """The calling process's own; used on the loop's thread."""

    def __init__(self, *, runs_user_code: bool = False) -> None:
        # Not written through a descriptor: user code may close all, and open others.
        try:
            self._page = _shared_page()
        except OSError as error:
            logger.warning("this process cannot show its pulse, so nobody sees it hang: %s", error)
            self._page = mmap.mmap(-1, _PAGE.size)
        self._beats = 0
        self._patience_s = 0.0
        self._runs_user_code = runs_user_code

    def beat(self) -> None:
        """Show that the loop goes on."""
        self._beats += 1
        self._write()

    def keep_beating(self, loop: asyncio.AbstractEventLoop) -> None:
        """Beat on a loop while it runs, where there is no :class:`greenroom.actors.loop.Loop`."""
        self.beat()
        loop.call_later(TICK_S, self.keep_beating, loop)

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Ask to be let be for so long, around what may wait for a disk or a lock."""
        before, self._patience_s = self._patience_s, seconds
        self._write()
        try:
            yield
        finally:
            self._patience_s = before
            self._write()

    def _write(self) -> None:
        thread = threading.get_native_id()
        now = time.monotonic()
        _PAGE.pack_into(
            self._page, 0, self._beats, now, self._patience_s, thread, self._runs_user_code
        )


class OtherPulse:
    """The pulse of another process, for who watches it."""

    def __init__(self, process: Process, fd: int, path: str) -> None:
        self._process = process
        self._fd = fd
        self._path = path
        self._file = _identity(os.fstat(fd))
        self._cpu: tuple[float, float] | None = None  # used, and when

    @classmethod
    def find(cls, process: Process) -> OtherPulse | None:
        """Return the pulse of a process of this host; None where it has none, or is gone."""
        folder = f"/proc/{process.pid}/fd"
        wanted = f"/memfd:{_name(process.pid)} (deleted)"
        try:
            for number in sorted(map(int, os.listdir(folder))):  # it is among the first
                path = f"{folder}/{number}"
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(path) == wanted:
                        return cls(process, os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)
        except OSError:
            return None  # it is gone, or somebody else's
        return None

    def read(self) -> Seen:
        """Return what it says now."""
        return Seen(*_PAGE.unpack(os.pread(self._fd, _PAGE.size, 0)))

    def is_current(self) -> bool:
        """Return whether the process still has it, and did not become another program."""
        try:
            return _identity(os.stat(self._path)) == self._file
        except OSError:
            return False

    def doing(self, thread: int) -> Doing:
        """Return what the process does, between the last call and this one."""
        state, _ = _stat(f"/proc/{self._process.pid}/task/{thread}/stat")
        _, cpu_s = _stat(f"/proc/{self._process.pid}/stat")
        now = time.monotonic()
        before, self._cpu = self._cpu, (cpu_s, now)
        if state in {"t", ""}:  # or it is not to be seen
            return Doing.HELD
        if state == "D":
            return Doing.DISK
        computes = before is not None and cpu_s - before[0] >= _COMPUTES * (now - before[1])
        return Doing.BUSY if computes or state == "R" else Doing.STILL

    def heard(self) -> None:
        """Measure anew from the next silence on."""
        self._cpu = None

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)


def silence_of(process: Process) -> tuple[float, Doing] | None:
    """Return for how many seconds a process has been silent, and what it does; None if it beats.

    For a reader who looks once: on a machine that stood still until now all look silent.
    """
    pulse = OtherPulse.find(process)
    if pulse is None:
        return None
    try:
        seen = pulse.read()
        silent = time.monotonic() - seen.at
        if not seen.beats or silent < 2 * TICK_S:
            return None
        return silent, pulse.doing(seen.thread)
    finally:
        pulse.close()


def _shared_page() -> mmap.mmap:
    fd = os.memfd_create(_name(os.getpid()))
    try:
        os.ftruncate(fd, _PAGE.size)
        return mmap.mmap(fd, _PAGE.size)
    finally:
        os.close(fd)  # the mapping has one of its own


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _name(pid: int) -> str:
    return f"greenroom-pulse-{pid}"


def _stat(path: str) -> tuple[str, float]:
    """Return the state letter and the CPU time of a process or thread; ("", 0) when it is gone."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return "", 0.0
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[_STAT_UTIME]) + int(fields[_STAT_STIME])
    return fields[_STAT_STATE], ticks / _TICKS_PER_S
