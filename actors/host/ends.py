"""How a host's processes ended: exit code or signal, and what they logged last.

Only its parent learns a process's exit status. That is the actor system's admin, which records each
in a small file of the run folder, by the process's address (:func:`record_end`). The host process
reads it when the controller asks (:class:`Ends`), and removes what nobody has asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path

from greenroom.actors.runtime.cgroups import has_run_out_of_memory, remove_empty
from greenroom.actors.runtime.logs import last_lines, replica_log
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.transport.addresses import ProcessAddress
from greenroom.core.lifecycle.replicas import RestartReason

RECORDED_WITHIN_S = 0.3  # the admin hears of the end when the controller does
CHECK_EVERY_S = 0.005
KEPT_S = 60.0
SHOWN_LINES, SHOWN_LENGTH = 3, 200
_CRASH = "Fatal Python error"  # how faulthandler's report begins, whose end says the least
_SUFFIX = ".end"
VMSTAT = Path("/proc/vmstat")
COUNT_EVERY_S = 2.0


def record_end(folder: Path, address: ProcessAddress, status: int) -> None:
    """Record how a process ended: its exit code, or the negative number of a signal."""
    with contextlib.suppress(OSError):  # then its end stays unexplained
        _path(folder, address).write_text(str(status), encoding="ascii")


class Ends:
    """What a host process reports of ends on its host."""

    def __init__(
        self, settings: HostSettings, vmstat: Path = VMSTAT, groups: Path | None = None
    ) -> None:
        self._settings = settings
        self._vmstat = vmstat
        self._groups = groups  # see runtime/cgroups.py
        self._killed = self._killed_before = self._kills_for_memory()

    async def cause(self, replica: str, address: ProcessAddress) -> str:
        """Return how a replica's process ended, as a part of a sentence; "" where unknown."""
        status = await self._status(_path(self._settings.run_dir, address))
        if status is None:
            return ""
        how = f"exit code {status}" if status >= 0 else self._describe_signal(-status, replica)
        last = self._last_lines(replica)
        return f"{how}; its log ends with: {last}" if last else how

    async def _status(self, path: Path) -> int | None:
        """Take a record once it is there, and whole; None if it does not come in time."""
        deadline = time.monotonic() + RECORDED_WITHIN_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                status = int(path.read_text(encoding="ascii"))
                path.unlink()
                return status
            await asyncio.sleep(CHECK_EVERY_S)
        return None

    async def count(self) -> None:
        """Take the kernel's count, every COUNT_EVERY_S.

        An end is its doing only where it has killed just now: before the last count is long ago.
        """
        self._killed_before, self._killed = self._killed, self._kills_for_memory()

    def tidy(self, kept_s: float = KEPT_S) -> None:
        """Remove records that nobody has asked for: of processes that were to end."""
        before = time.time() - kept_s
        for path in self._settings.run_dir.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before:
                    path.unlink()
        if self._groups is not None:
            remove_empty(self._groups)

    def _describe_signal(self, number: int, replica: str) -> str:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        if number != signal.SIGKILL:
            return name
        before = self._killed_before
        self._killed_before = self._killed = self._kills_for_memory()
        is_own = self._groups is not None and has_run_out_of_memory(self._groups, replica)
        if not is_own and self._killed <= before:
            return name
        return f"{RestartReason.OUT_OF_MEMORY}: {name} by the kernel"

    def _kills_for_memory(self) -> int:
        """Return how many processes of this machine the kernel has killed for lack of memory."""
        try:
            lines = self._vmstat.read_text(encoding="ascii").splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def _last_lines(self, replica: str) -> str:
        lines = last_lines(self._settings.logs_dir / f"{replica_log(replica)}.log")
        crashes = [at for at, line in enumerate(lines) if line.startswith(_CRASH)]
        begin = crashes[-1] if crashes else -SHOWN_LINES
        return " | ".join(line[:SHOWN_LENGTH] for line in lines[begin:][:SHOWN_LINES])


def _path(folder: Path, address: ProcessAddress) -> Path:
    return folder / f"{address.number}{_SUFFIX}"  # which no other process of the host ever has
