"""Run seeds: ``python -m tests.simulation --seeds 2000 --from 0``; exit code 1 at a failure.

A seed that fails replays exactly: ``python -m tests.simulation --seeds 1 --from SEED`` prints the
last steps before it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.simulation import outages
from tests.simulation.runs import outcome

Outcome = tuple[int, str, str, Counter[str]]  # see runs.outcome
CHUNK = 4  # runs that a process is given at once
RUNS_OF_A_PROCESS = 32  # each leaves some 3 MB
HASH_SEED = "0"  # sets of texts are walked through in the same order in every run


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first one")
    parser.add_argument("--only", type=int, nargs="+", help="these, instead")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--keep-going", action="store_true", help="after a failure, too; of each one line"
    )
    parser.add_argument("--digest", action="store_true", help="print one of each run")
    parser.add_argument("--hosts", type=int, default=0, help="how many; 0: as the seed says")
    parser.add_argument(
        "--store", default="", choices=["database"], help="that all hosts share; needs psycopg"
    )
    parser.add_argument(
        "--lying-disk", action="store_true", help="lose a save now and then, which must be noticed"
    )
    parser.add_argument(
        "--outages", action="store_true", help="instead: break one thing for hours or days"
    )
    options = parser.parse_args()
    if options.store:
        options.hosts = options.hosts or 3
    if options.lying_disk:
        options.hosts = 1  # hosts that share a store have another disk
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    gc.disable()  # it would close connections of the database that are left, at any time
    return _run_outages(options.processes) if options.outages else _run_all(options)


def _run_outages(count: int) -> int:
    longest_first = [(kind, hours) for hours in reversed(outages.HOURS) for kind in outages.KINDS]
    began, failures = time.perf_counter(), 0
    with multiprocessing.get_context("fork").Pool(count) as pool:
        for failure, tries in pool.starmap(outages.outcome, longest_first, chunksize=1):
            kind, hours = longest_first.pop(0)
            print(f"{kind} broken for {hours} h: {failure or f'healed, after {tries} tries'}")
            failures += bool(failure)
    print(f"outages: {failures} failed, {time.perf_counter() - began:.1f} s")
    return 1 if failures else 0


def _run_all(options: argparse.Namespace) -> int:
    began, failures = time.perf_counter(), 0
    counts: Counter[str] = Counter()
    seeds = options.only or range(options.first, options.first + options.seeds)
    for seed, failure, digest, counted in _outcomes(seeds, options):
        counts += counted
        if options.digest:
            print(seed, digest)
        if failure:
            failures += 1
            print(f"seed {seed} fails; replay: {_replay(seed, options)}")
            print(failure.rpartition("\n")[2] if options.keep_going else failure, flush=True)
            if not options.keep_going:
                return 1
    seconds = time.perf_counter() - began
    print(f"{len(seeds)} seeds from {seeds[0]}: {failures} failed, {seconds:.1f} s")
    for what, count in sorted(counts.items()):
        print(f"  {count:9} {what}")
    return 1 if failures else 0


def _replay(seed: int, options: argparse.Namespace) -> str:
    command = f"python -m tests.simulation --seeds 1 --from {seed}"
    if options.hosts:
        command += f" --hosts {options.hosts}"
    if options.store:
        command += f" --store {options.store}"
    return f"{command} --lying-disk" if options.lying_disk else command


def _outcomes(seeds: Sequence[int], options: argparse.Namespace) -> Iterator[Outcome]:
    run = functools.partial(
        outcome, hosts=options.hosts, lying_disk=options.lying_disk, store=options.store
    )
    if len(seeds) == 1:
        yield from map(run, seeds)
        return
    # What a run leaves is in cycles: to end the process costs less than to look for them.
    fork = multiprocessing.get_context("fork")
    with fork.Pool(options.processes, maxtasksperchild=RUNS_OF_A_PROCESS // CHUNK) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=CHUNK)


if __name__ == "__main__":
    sys.exit(main())
