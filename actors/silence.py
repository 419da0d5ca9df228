"""Ends processes that stand still: whoever watches for death watches for silence, too.

What a death brings about, such as another process in its place, is there already, so all that a
hang needs is SIGKILL. Several may watch the same process; one of them is the first.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable, Mapping
from typing import Any

from greenroom.actors.messages import Process
from greenroom.actors.processes import command_line, send_signal
from greenroom.actors.pulse import OtherPulse, silence_of
from greenroom.core.silence import TICK_S, Doing, Silences

logger = logging.getLogger(__name__)

MAX_PAUSE_TICKS = 64  # between two looks for the pulse of a process that has shown none yet


class SilenceWatch:
    """The processes that one process watches; ``limit_s`` is how long one may stand still."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._silences = Silences(limit_s)
        self._pulses: dict[Process, OtherPulse] = {}
        self._missing: dict[Process, tuple[int, int]] = {}  # ticks until the next look, and pause
        self._told: set[Process] = set()

    def look(self, processes: Iterable[Process]) -> None:
        """Look at these, once in TICK_S, and kill what has been silent for too long."""
        watched = dict.fromkeys(processes)
        self._keep(set(watched))
        self._silences.tick(time.monotonic())
        for process in watched:
            pulse = self._pulse_of(process)
            if pulse is not None:
                self._judge(process, pulse)

    def close(self) -> None:
        """Let go of all."""
        self._keep(set())

    def _keep(self, watched: set[Process]) -> None:
        self._silences.keep({*watched})
        for process in self._pulses.keys() - watched:
            self._pulses.pop(process).close()
        for process in self._missing.keys() - watched:
            del self._missing[process]
        self._told &= watched

    def _pulse_of(self, process: Process) -> OtherPulse | None:
        """Return a process's pulse; one that has none may be about to begin, or never will."""
        if process in self._pulses:
            return self._pulses[process]
        left, pause = self._missing.get(process, (0, 1))
        if left:
            self._missing[process] = (left - 1, pause)
            return None
        pulse = OtherPulse.find(process)
        if pulse is None:
            self._missing[process] = (pause, min(2 * pause, MAX_PAUSE_TICKS))
        else:
            self._missing.pop(process, None)
            self._pulses[process] = pulse
        return pulse

    def _judge(self, process: Process, pulse: OtherPulse) -> None:
        seen = pulse.read()
        if self._silences.beats(process, seen.beats):
            pulse.heard()
        elif not pulse.is_current():  # the same process may be another program now
            self._pulses.pop(process).close()
        elif self._silences.is_due(
            process,
            doing := pulse.doing(seen.thread),
            seen.patience_s,
            runs_user_code=seen.runs_user_code,
        ):
            self._end(process, doing, time.monotonic() - seen.at)

    def _end(self, process: Process, doing: Doing, silent_s: float) -> None:
        if process not in self._told:  # what waits for the disk ends when that answers
            self._told.add(process)
            logger.error(
                "killing %s (pid %d): its message loop has been silent for %.1f s (limit %g s), "
                "and the process %s",
                command_line(process.pid) or "a process",
                process.pid,
                silent_s,
                self._limit_s,
                doing.value,
            )
        try:
            send_signal(process, signal.SIGKILL)
        except OSError as error:  # no descriptor for it now; the next look tries again
            logger.warning("process %d could not be killed: %s", process.pid, error)


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


def told(silent: Mapping[str, Any]) -> str:
    """Return a line on one of :func:`silent_among`."""
    what = f"{silent['role']} (pid {silent['pid']}) is SILENT {silent['silent_s']:.0f} s"
    return f"{what}: its message loop does not run; it {silent['doing']}"
