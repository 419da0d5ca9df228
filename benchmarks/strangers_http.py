"""HTTP requests while strangers crowd the system's port: ``python -m benchmarks.strangers_http``.

One replica answers the POSTed echo over 1, 16 and 64 connections, by turns without strangers and
with those of :mod:`benchmarks.strangers` at the port at which other hosts would join.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from benchmarks.apps.greenroom_app import app
from benchmarks.loads import load, require_wrk
from benchmarks.options import positive, run_main
from benchmarks.own_system import own_system
from benchmarks.report import machine, table
from benchmarks.strangers import THERE, beside
from greenroom import serve

CONNECTIONS = (1, 16, 64)
BORNE_S = 6  # longer than a stranger is


def measure(url: str, seconds: int) -> dict[int, dict[str, float]]:
    return {each: load(url, connections=each, seconds=seconds) for each in CONNECTIONS}


def rows(phases: dict[str, list[dict[int, dict[str, float]]]]) -> list[list[str]]:
    """Return, per number of connections, the medians without and with strangers."""
    found = []
    for connections in CONNECTIONS:
        row = [str(connections)]
        for name in ("requests_per_s", "p50_ms", "p99_ms"):
            quiet, crowd = (
                statistics.median(each[connections][name] for each in rounds)
                for rounds in phases.values()
            )
            row += [f"{quiet:.4g}", f"{crowd:.4g}", f"{crowd / quiet:.2f}x"]
        found.append(row)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=positive, default=4, help="of each load")
    options = parser.parse_args()
    require_wrk()
    os.environ |= {"GREENROOM_BIND": THERE, "GREENROOM_HTTP_HOST": "127.0.0.1"}
    phases: dict[str, list[dict[int, dict[str, float]]]] = {"quiet": [], "crowd": []}
    with own_system() as port:
        serve.run(app, route_prefix="/")
        url = f"http://127.0.0.1:{port}/"
        key = Path(os.environ["GREENROOM_STATE_DIR"]) / "cluster.key"
        where = ("--port", os.environ["GREENROOM_ADMIN_PORT"], "--key-file", str(key))
        load(url, connections=16, seconds=options.seconds)
        for number in range(1, options.rounds + 1):
            phases["quiet"].append(measure(url, options.seconds))
            with beside(*where, "--crowd", THERE) as said:
                phases["crowd"].append(measure(url, options.seconds))
            print(f"round {number}: strangers made {said[0]} connections/s", file=sys.stderr)
            time.sleep(BORNE_S)
    print(machine())
    head = ["connections"]
    for name in ("requests/s", "p50 ms", "p99 ms"):
        head += [name, "with strangers", "ratio"]
    print(table(head, rows(phases)))
    return 0


if __name__ == "__main__":
    run_main(main)
