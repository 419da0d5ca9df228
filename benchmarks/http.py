"""Load Greenroom and its peers with the same POSTed JSON echo: `python -m benchmarks.http`.

In each round every system is started, left idle, weighed, warmed up, loaded and ended, one at a
time; the next round begins with another one, so that none always has the same place in the round.
"""

import sys
import time

from benchmarks.loads import load, require_wrk
from benchmarks.options import parser, positive, prepare, run_main
from benchmarks.processes import pss_bytes
from benchmarks.report import http_tables, machine, write_json
from benchmarks.running import FAILURES, Running
from benchmarks.systems import System
from benchmarks.venvs import Venv

CONNECTIONS = (1, 16, 64)
SETTLE_S = 2.0


def measure(system: System, venv: Venv, *, seconds: int, warmup: int, new_heads: bool) -> dict:
    """Start one system, measure it in every way, end it."""
    with Running(system, venv) as running:
        time.sleep(SETTLE_S)
        pids = running.pids()
        measured: dict = {
            "start_s": running.start_s,
            "idle_pss_bytes": pss_bytes(pids),
            "processes": len(pids),
            "loads": {},
        }
        url = f"http://127.0.0.1:{running.port}{system.echo_path}"
        load(url, connections=16, seconds=warmup)
        for connections in CONNECTIONS:
            counted = load(url, connections=connections, seconds=seconds, new_heads=new_heads)
            measured["loads"][str(connections)] = counted
    return measured


def in_turn(venvs: dict[System, Venv], round_number: int) -> list[System]:
    systems = list(venvs)
    first = round_number % len(systems)
    return systems[first:] + systems[:first]


def main() -> int:
    options_parser = parser("http", __doc__.splitlines()[0])
    options_parser.add_argument("--rounds", type=positive, default=3)
    options_parser.add_argument("--seconds", type=positive, default=5, help="of each load")
    options_parser.add_argument(
        "--warmup", type=positive, default=2, help="seconds, before the loads"
    )
    options_parser.add_argument(
        "--new-heads", action="store_true", help="no two requests have the same head"
    )
    options = options_parser.parse_args()
    require_wrk()
    venvs = prepare(options)
    systems = {
        s.name: {"installed_bytes": v.installed_bytes, "rounds": []} for s, v in venvs.items()
    }
    failures = []
    results = {"machine": machine(), "seconds": options.seconds, "systems": systems}
    for number in range(options.rounds):
        for system in in_turn(venvs, number):
            print(f"round {number + 1} of {options.rounds}: {system.name}", file=sys.stderr)
            try:
                measured = measure(
                    system,
                    venvs[system],
                    seconds=options.seconds,
                    warmup=options.warmup,
                    new_heads=options.new_heads,
                )
            except FAILURES as error:
                failures.append(f"round {number + 1}: {error}")
            else:
                systems[system.name]["rounds"].append(measured)
    print(http_tables(systems))
    write_json(options.json, results | {"failures": failures})
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    run_main(main)
