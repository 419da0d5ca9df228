"""Kill one process of each system with SIGKILL under load: `python -m benchmarks.survival`.

Each kill gets a freshly started system and 32 connections. The load is GETs, which may be repeated,
so a system has the right to hide the death; LitServe and Mosec take only POSTs and get those.
The pause is the longest time without a good answer after the kill.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator

from benchmarks import BenchmarkError
from benchmarks.options import parser, positive, prepare, run_main
from benchmarks.processes import title
from benchmarks.report import machine, table, write_json
from benchmarks.running import FAILURES, Running
from benchmarks.storm import Times, request_bytes, storm
from benchmarks.systems import System, Victim
from benchmarks.venvs import Venv

HEADER = (
    "system",
    "killed",
    "by",
    "responses",
    "failed",
    "non-2xx",
    "reset or refused",
    "unanswered",
    "pause",
)


def find(tree: object, path: tuple[str, ...]) -> Iterator[int]:
    """Follow a path through `greenroom status --json`; lists are entered, `*` takes every key."""
    if isinstance(tree, list):
        for item in tree:
            yield from find(item, path)
    elif not path:
        if isinstance(tree, int):
            yield tree
    elif isinstance(tree, dict):
        branches = tree.values() if path[0] == "*" else [tree.get(path[0])]
        for branch in branches:
            yield from find(branch, path[1:])


def victim_pid(running: Running, victim: Victim) -> int:
    """Return the pid to kill, which is certain to be one of the system's own processes."""
    if victim.where:
        pid = next(find(running.status(), victim.where), None)
    else:
        pid = running.user_code_pid()
    if pid not in running.pids():
        raise BenchmarkError(f"{running.system.name}: no {victim.name} found to kill (pid {pid})")
    return pid


def survive(system: System, venv: Venv, victim: Victim, *, connections: int, times: Times) -> dict:
    """Start the system, kill the victim under load, and return what the clients saw."""
    with Running(system, venv, victim) as running:
        pid = victim_pid(running, victim)
        process = title(pid)
        body = running.alive_body()
        request = request_bytes(
            system.alive_method, system.alive_path, json.dumps(body).encode() if body else b""
        )
        counts, pause_s = asyncio.run(
            storm(
                running.port,
                request,
                connections=connections,
                kill=lambda: os.kill(pid, signal.SIGKILL),
                times=times,
            )
        )
    return {
        "system": system.name,
        "killed": victim.name,
        "process": process,
        "method": system.alive_method,
        "responses": counts.total,
        "failed": counts.failed,
        "non_2xx": counts.non_2xx,
        "connection_errors": counts.connection_errors,
        "unanswered": counts.unanswered,
        "pause_s": pause_s,
    }


def row(result: dict, give_up_s: float) -> tuple[str, ...]:
    pause_s = result["pause_s"]
    texts = ("system", "killed", "method")
    numbers = ("responses", "failed", "non_2xx", "connection_errors", "unanswered")
    pause = f"never in {give_up_s:.0f} s" if pause_s is None else f"{pause_s:.2f} s"
    return (*(result[k] for k in texts), *(str(result[k]) for k in numbers), pause)


def main() -> int:
    options_parser = parser("survival", __doc__.splitlines()[0])
    options_parser.add_argument("--connections", type=positive, default=32)
    options = options_parser.parse_args()
    times = Times()
    results: list[dict] = []
    failures: list[str] = []
    for system, venv in prepare(options).items():
        for victim in system.victims:
            print(f"{system.name}: {victim.name}", file=sys.stderr)
            try:
                seen = survive(system, venv, victim, connections=options.connections, times=times)
            except FAILURES as error:
                failures.append(str(error))
            else:
                results.append(seen)
    print(table(HEADER, (row(result, times.give_up_s) for result in results)))
    write_json(options.json, {"machine": machine(), "kills": results, "failures": failures})
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    run_main(main)
