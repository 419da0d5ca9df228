"""Results as Markdown tables and as JSON."""

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

MIB = 1024 * 1024


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a Markdown table: the first column to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, rule)
    return "\n".join(_line(line, widths) for line in lines)


def by_size(figures: dict[int, dict[str, float]]) -> str:
    """Lay out milliseconds by what was done, a column for each number of backends."""
    header = ["milliseconds", *(f"{size:,} backends" for size in figures)]
    names = next(iter(figures.values()))
    return table(
        header, [[name, *(f"{each[name]:.3g}" for each in figures.values())] for name in names]
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = cells
    padded = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]
    return f"| {' | '.join(padded)} |"


def mib(size: float | None) -> str:
    return "-" if size is None else f"{size / MIB:.0f} MiB"


def machine() -> dict[str, object]:
    return {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_json(file: Path | None, results: dict[str, object]) -> None:
    if file:
        file.write_text(json.dumps(results, indent=2) + "\n")


def summarize(rounds: list[dict]) -> dict[str, dict]:
    """Return per number of connections the medians over rounds, and the errors of all of them."""
    by_connections: dict[str, dict] = {}
    for connections in rounds[0]["loads"] if rounds else ():
        loads = [r["loads"][connections] for r in rounds]
        middle = {k: median(x[k] for x in loads) for k in ("requests_per_s", "p50_ms", "p99_ms")}
        errors = {k: sum(x[k] for x in loads) for k in ("non_2xx", "socket_errors")}
        by_connections[connections] = middle | errors
    return by_connections


def http_tables(systems: dict[str, dict]) -> str:
    """Lay out load, then cost; `systems` holds rounds and installed_bytes by system name."""
    summaries = {name: summarize(s["rounds"]) for name, s in systems.items()}
    lead = summaries.get("greenroom", {})
    loads = []
    for connections in next((s for s in summaries.values() if s), {}):
        for name, summary in summaries.items():
            if summary:
                loads.append(_load_row(name, connections, summary[connections], lead))
    header = (
        "system",
        "conn",
        "requests/s",
        "p50 ms",
        "p99 ms",
        "non-2xx",
        "socket err",
        "Greenroom is",
    )
    costs = [_cost_row(name, s) for name, s in systems.items() if s["rounds"]]
    cost_header = ("system", "start to first 200", "idle PSS", "processes", "installed")
    return f"{table(header, loads)}\n\n{table(cost_header, costs)}"


def _load_row(name: str, connections: str, load: dict, lead: dict) -> tuple[str, ...]:
    ratio = "-"
    if lead and name != "greenroom" and load["requests_per_s"]:
        ratio = f"{lead[connections]['requests_per_s'] / load['requests_per_s']:.2f}x"
    return (
        name,
        connections,
        f"{load['requests_per_s']:.0f}",
        f"{load['p50_ms']:.2f}",
        f"{load['p99_ms']:.2f}",
        str(load["non_2xx"]),
        str(load["socket_errors"]),
        ratio,
    )


def _cost_row(name: str, system: dict) -> tuple[str, ...]:
    rounds = system["rounds"]
    return (
        name,
        f"{median(r['start_s'] for r in rounds):.2f} s",
        mib(median(r["idle_pss_bytes"] for r in rounds)),
        str(round(median(r["processes"] for r in rounds))),
        mib(system["installed_bytes"]),
    )
