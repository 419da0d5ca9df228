"""The metrics of one host: its router's, what its processes show of themselves, what they take."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from greenroom.actors.host.records import RunRecords
from greenroom.actors.messages.queries import Process
from greenroom.actors.runtime.processes import stat_fields
from greenroom.actors.runtime.shared_metrics import OtherMetrics
from greenroom.core.metrics import Family, Group, Kind

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UTIME, _STIME, _START, _RSS = 11, 12, 19, 21  # of proc(5), counted after the command


class HostMetrics:
    """Gathers them for a scrape; reading a process costs a few system calls and asks it nothing."""

    def __init__(self, records: RunRecords, host_name: str) -> None:
        self._records = records
        self._host = {"host": host_name}
        self._shown = OtherMetrics()
        self._booted_at = _booted_at()
        self._version = version("greenroom")

    def groups(self, router: list[Family]) -> list[Group]:
        """Return all metrics of this host, given the router's."""
        processes = self._records.described()
        self._shown.keep({process for process, _, _ in processes})
        groups: list[Group] = [(self._host, [*router, *self._of_processes(processes)])]
        for process, _, _ in processes:
            for labels, families in self._shown.read(process):
                groups.append(({**labels, **self._host}, families))
        return groups

    def _of_processes(self, processes: list[tuple[Process, str, dict[str, str]]]) -> list[Family]:
        starts = _family("gauge", "start_time_seconds", "When it started, since the epoch")
        cpu = _family("counter", "cpu_seconds_total", "CPU time that it has used")
        memory = _family(
            "gauge", "resident_memory_bytes", "Its memory, with what it shares with others"
        )
        for process, role, more in processes:
            fields = stat_fields(process.pid)
            if fields:
                values = (role, str(process.pid), more.get("tag", ""))
                used = int(fields[_UTIME]) + int(fields[_STIME])
                starts.samples[values] = self._booted_at + int(fields[_START]) / _TICKS_PER_S
                cpu.samples[values] = used / _TICKS_PER_S
                memory.samples[values] = float(int(fields[_RSS]) * _PAGE_BYTES)
        build = Family(
            "greenroom_build_info",
            "gauge",
            "1; its label says which version runs",
            ("version",),
            (),
            {(self._version,): 1.0},
        )
        return [build, starts, cpu, memory]


def _family(kind: Kind, name: str, description: str) -> Family:
    labels = ("role", "pid", "replica")
    return Family(f"greenroom_process_{name}", kind, description, labels, (), {})


def _booted_at() -> float:
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
