"""The pulse of a process, and the watch that ends processes that stand still.

Theory of operation. A process counts the beats of its message loop in a page of memory. The page is
an anonymous file (memfd), named after the process, that any process of the same user finds under
``/proc/<pid>/fd``: beating costs no system call, a check costs one, and neither touches a disk,
which may hang itself. The page ends with its process. A process without one, such as a user's
script, is never judged.

A process that watches another for its death also watches it for silence (:class:`SilenceWatch`);
core/silence.py decides when the silence has lasted too long. The process is then killed with
SIGKILL, and the usual steps after a death follow, such as starting another in its place. Several
processes may watch the same one; the first to decide kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.logs import RenamedLogs
from greenroom.actors.runtime.processes import (
    command_line,
    open_page,
    send_signal,
    shared_page,
    stat_fields,
)
from greenroom.core.silence import TICK_S, Doing, Silence, Ticks

logger = logging.getLogger(__name__)

_PAGE = struct.Struct("=QddQ?")
_STAT_STATE, _STAT_UTIME, _STAT_STIME = 0, 11, 12  # of proc(5), counted after the command
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COMPUTES = 0.1  # from this share of a CPU on


class Seen(NamedTuple):
    """What a page says."""

    beats: int
    at: float  # the time of the last one, by time.monotonic()
    patience_s: float  # how long watchers are to wait, whatever it does
    thread: int  # of the loop
    runs_user_code: bool


class Pulse:
    """The calling process's own; used on the loop's thread."""

    def __init__(self, *, runs_user_code: bool = False) -> None:
        self._page = shared_page("pulse", _PAGE.size)
        self._beats = 0
        self._patience_s = 0.0
        self._runs_user_code = runs_user_code
        self._logs = RenamedLogs()

    def beat(self) -> None:
        """Show that the loop goes on; it is also when logs that were renamed are opened again."""
        self._beats += 1
        self._write()
        self._logs.reopen()

    def keep_beating(self, loop: asyncio.AbstractEventLoop) -> None:
        """Beat on a loop while it runs, where there is no loop of ours."""
        self.beat()
        loop.call_later(TICK_S, self.keep_beating, loop)

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Ask watchers to wait for so long, around what may wait for a disk or a lock."""
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
    """The pulse of another process, for a watcher."""

    def __init__(self, process: Process, fd: int, path: str) -> None:
        self._process = process
        self._fd = fd
        self._path = path
        self._file = _identity(os.fstat(fd))
        self._cpu: tuple[float, float] | None = None  # used, and when

    @classmethod
    def find(cls, process: Process) -> OtherPulse | None:
        """Return the pulse of a process of this host; None where it has none, or is gone."""
        found = open_page(process, "pulse")
        return None if found is None else cls(process, *found)

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
        of_thread, fields = stat_fields(self._process.pid, thread), stat_fields(self._process.pid)
        state = of_thread[_STAT_STATE] if of_thread else ""
        ticks = sum(map(int, fields[_STAT_UTIME : _STAT_STIME + 1]))  # none where it has ended
        cpu_s, now = ticks / _TICKS_PER_S, time.monotonic()
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

    This is a single check: on a machine that stood still until now all processes seem silent.
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


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


MAX_PAUSE_TICKS = 64  # between two checks for the pulse of a process that has shown none yet


class _Watched:
    """A process that is watched."""

    def __init__(self) -> None:
        self.silence = Silence()
        self.pulse: OtherPulse | None = None
        self.is_logged = False
        self._ticks_left, self._pause = 0, 1  # until it is sought again, which takes ever longer

    def seek(self, find: Callable[[], OtherPulse | None]) -> None:
        """Find its pulse; one that has none may be about to begin, or never will."""
        self._ticks_left -= 1
        if self._ticks_left < 0:
            self.pulse, self._ticks_left = find(), self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE_TICKS)


class SilenceWatch:
    """The processes that one process watches; ``limit_s`` is how long one may stand still.

    A simulator gives its own ways to find the pulse of a process, to kill it, and to name it.
    """

    def __init__(
        self,
        limit_s: float,
        find_pulse: Callable[[Process], OtherPulse | None] = OtherPulse.find,
        send_signal: Callable[[Process, int], bool] = send_signal,
        command_line: Callable[[int], str] = command_line,
    ) -> None:
        self._limit_s = limit_s
        self._find_pulse = find_pulse
        self._send_signal = send_signal
        self._command_line = command_line
        self._ticks = Ticks()
        self._watched: dict[Process, _Watched] = {}

    def check(self, processes: Iterable[Process]) -> None:
        """Look at these, once in TICK_S, and kill what has been silent for too long."""
        wanted = dict.fromkeys(processes)
        for process in self._watched.keys() - wanted:
            self._let_go(process)
        passed_s = self._ticks.passed_s(time.monotonic())
        for process in wanted:
            watched = self._watched.get(process)
            if watched is None:
                watched = self._watched[process] = _Watched()
            if watched.pulse is None:
                watched.seek(partial(self._find_pulse, process))
            if watched.pulse is not None:
                self._judge(process, watched, watched.pulse, passed_s)

    def close(self) -> None:
        """Let go of all."""
        self.check(())

    def _let_go(self, process: Process) -> None:
        pulse = self._watched.pop(process).pulse
        if pulse is not None:
            pulse.close()

    def _judge(
        self, process: Process, watched: _Watched, pulse: OtherPulse, passed_s: float
    ) -> None:
        seen, silence = pulse.read(), watched.silence
        if silence.is_broken(seen.beats):
            pulse.heard()
        elif not pulse.is_current():  # the same process may be another program now
            self._let_go(process)
        elif silence.is_due(
            doing := pulse.doing(seen.thread),
            passed_s,
            self._limit_s,
            seen.patience_s,
            runs_user_code=seen.runs_user_code,
        ):
            if not watched.is_logged:  # what waits for the disk ends when that answers
                watched.is_logged = True
                self._log(process, doing, time.monotonic() - seen.at)
            try:
                self._send_signal(process, signal.SIGKILL)
            except OSError as error:  # no descriptor for it now; the next check tries again
                logger.warning("process %d could not be killed: %s", process.pid, error)

    def _log(self, process: Process, doing: Doing, silent_s: float) -> None:
        logger.error(
            "killing %s (pid %d): its message loop has been silent for %.1f s (limit %g s), "
            "and the process %s",
            self._command_line(process.pid) or "a process",
            process.pid,
            silent_s,
            self._limit_s,
            doing.value,
        )


def silent_among(processes: Mapping[Process, str]) -> list[dict[str, Any]]:
    """Return which of these processes, given with their roles, are silent; plain values.

    It blocks for a second where one seems to be: a machine that has just woken up looks the same.
    """
    seen = {each: at for each in processes if (at := silence_of(each)) is not None}
    if seen:
        time.sleep(TICK_S * 1.2)
    return [
        {"role": processes[each], "pid": each.pid, "silent_s": still[0], "doing": still[1].value}
        for each in seen
        if (still := silence_of(each)) is not None and still[0] > TICK_S * 2
    ]


def describe(silent: Mapping[str, Any]) -> str:
    """Return a line on one of :func:`silent_among`."""
    what = f"{silent['role']} (pid {silent['pid']}) is SILENT {silent['silent_s']:.0f} s"
    return f"{what}: its message loop does not run; it {silent['doing']}"
