"""Long runs, as root: ``python -m tests.checker --minutes 10``; exits with 1 at a violation.

The seed decides what clients ask for and which faults are made, but not when: that is up to the
machine, so that a seed does not replay. The history of a round that fails is kept.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.checker.defects import DEFECTS
from tests.checker.faults import KINDS
from tests.checker.runs import Plan, running


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checker", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=3, choices=[1, 3])
    parser.add_argument("--round", type=float, default=30.0, help="seconds of a round")
    parser.add_argument("--faults", nargs="+", default=(), choices=KINDS, help="these kinds alone")
    parser.add_argument("--defect", default="", choices=["", *DEFECTS], help="planted before")
    parser.add_argument("--keep", type=Path, help="a folder for histories that fail")
    options = parser.parse_args()
    until = time.monotonic() + options.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(
            folder=Path(folder),
            hosts=options.hosts,
            seed=options.seed,
            round_s=options.round,
            faults=tuple(options.faults),
            planted=options.defect,
        )
        with running(plan) as run:
            totals: Counter[str] = Counter()
            while time.monotonic() < until:
                verdict = run.round()
                totals += verdict.counts()
                print(f"round {run.rounds}: {shown(verdict.counts())}", flush=True)
                if verdict.violations:
                    print(*verdict.faults, *verdict.violations[:20], sep="\n")
                    if options.keep:
                        shutil.copytree(folder, options.keep, ignore_dangling_symlinks=True)
                    return 1
            print(f"{run.rounds} rounds without a violation: {shown(totals)}")
    return 0


def shown(counts: Counter[str]) -> str:
    """Return counts in one line."""
    return ", ".join(f"{count} {what}" for what, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
