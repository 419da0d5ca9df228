"""What faults of the leader, and of the database, cost three hosts that share a database.

`python -m benchmarks.faults --rounds 10`, as root: hosts a, b and c, a PostgreSQL server and its
synchronous standby are network namespaces around a switch in a process (tests/support/switch.py).
On each host four connections send a GET every 20 ms, of which some go to replicas of other hosts,
and one client makes changes all the time. Each round makes one fault and undoes it; a round takes
some 20 s, all of it an hour, and `--faults` leaves some out. `--json` keeps all rounds.

    no change for    from the fault to the next change that is acknowledged to any other host; where
                     nothing can be changed before, from the end of the fault
    longest wait     of a client on another host, between two of its changes that are acknowledged
    longest GET      on the other hosts; one that failed has not ended
    lost             changes that were acknowledged, and are not there when the fault is over
    by two           controllers that changed anything after their successor had
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.options import positive, run_main
from benchmarks.report import machine, table
from greenroom.actors.caller.connection import Connection
from greenroom.actors.runtime.settings import read_settings
from greenroom.core.errors import GreenroomError
from greenroom.core.operations import CreateToken, ListTokens, RevokeToken
from tests.support.cluster import ClusterHost
from tests.support.database import SharedDatabase, shared_database

APP = """
import asyncio
from greenroom import serve

@serve.deployment(num_replicas=3, max_ongoing_requests=2)
class Echo:
    async def __call__(self, request):
        await asyncio.sleep(0.01)
        return "hello"

app = Echo.bind()
"""
GETS = 4  # connections on each host
PAUSE_S = 0.02  # between two GETs of one
CHANGE_PAUSE_S = 0.15  # the last 200 changes are known, by which a repeated one is not made twice
LEAD_IN_S = 1.5
FAULT_S = 8.0  # until a fault is undone
LATER_S = 3.0
WHOLE_S = 60.0
SLOW_S = 2.0
DISK = "120m"

Undo = Callable[[], None]


# --- Changes, made on a host ----------------------------------------------------------------------


class Change(NamedTuple):
    """One that was asked for; ``ended_at`` is when it was acknowledged or refused."""

    name: str
    is_made: bool  # rather than taken back
    begun_at: float
    ended_at: float
    error: str


class Changer:
    """Makes tokens one after the other, and takes back each before the last, on a thread."""

    def __init__(self, environ: dict[str, str], stem: str) -> None:
        self._settings = read_settings(environ)
        self._stem = stem
        self._ending = threading.Event()
        self.changes: list[Change] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> list[Change]:
        """Let the change under way end; return all."""
        self._ending.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "a change was never answered"
        return self.changes

    def _run(self) -> None:
        connection = Connection.open(self._settings)
        number, last = 0, ""
        while not self._ending.wait(CHANGE_PAUSE_S):
            name = f"{self._stem}-{number}"
            number += 1
            if self._make(connection, name, is_made=True):
                if last:
                    self._make(connection, last, is_made=False)
                last = name
        connection.close()

    def _make(self, connection: Connection, name: str, *, is_made: bool) -> bool:
        begun_at, error = time.time(), ""
        made = CreateToken(name=name, digest="0" * 64, holder_role="viewer")
        try:
            connection.request(made if is_made else RevokeToken(name=name), timeout_s=30)
        except (GreenroomError, TimeoutError) as refusal:
            error = f"{type(refusal).__name__}: {refusal}"
        self.changes.append(Change(name, is_made, begun_at, time.time(), error))
        return not error


_changer: Changer | None = None


def begin_changes(environ: dict[str, str], stem: str) -> None:
    """Change things over and over. Called on a host."""
    global _changer  # noqa: PLW0603  # one per process
    _changer = Changer(environ, stem)


def end_changes() -> list[Change]:
    """End what :func:`begin_changes` began. Called on a host."""
    assert _changer is not None
    return _changer.stop()


def tokens(environ: dict[str, str]) -> list[str]:
    """Return the names of all tokens. Called on a host."""
    connection = Connection.open(read_settings(environ))
    with contextlib.closing(connection):
        return [each["name"] for each in connection.request(ListTokens(), timeout_s=20)]


# --- Faults of the leader -------------------------------------------------------------------------


def kill_leader(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Kill all processes of the leader's host at once."""
    leader.crash()

    def undo() -> None:
        leader.reboot()
        leader.start()

    return undo


def stop_leader(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Stop all processes of the leader's host, to go on later."""
    return leader.freeze()


def cut_off(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Cut the leader off from the hosts and the database."""
    leader.cut()
    return leader.heal


def cut_from_hosts(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Cut the leader off from the hosts, not from the database."""
    return leader.part(*_others(shared, leader))


def cut_from_database(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Cut the leader off from the database, not from the hosts."""
    return leader.part(*shared.machines)


def drop_sent(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Drop what the leader sends to the hosts, one way."""
    return leader.part(*_others(shared, leader), received=False)


def drop_received(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Drop what the hosts send to the leader, one way."""
    return leader.part(*_others(shared, leader), sent=False)


def _others(shared: SharedDatabase, leader: ClusterHost) -> list[ClusterHost]:
    return [host for host in shared.cluster.hosts if host is not leader]


# --- Faults of the database -----------------------------------------------------------------------


def restart_database(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Kill the server, and start it again at once."""
    shared.server.stop(now=True)
    shared.start_server()
    return lambda: None


def fail_over(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Kill the server, and have its standby take over at once."""
    shared.server.stop(now=True)
    former = shared.promote()
    return lambda: shared.follow(former)


def fail_over_silently(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Cut the server's machine off, and have its standby take over at once."""
    cut = shared.machine
    cut.cut()
    former = shared.promote()

    def undo() -> None:
        former.stop(now=True)
        cut.heal()
        shared.follow(former)

    return undo


def slow_down(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Have each change take two seconds longer: half on the way to the standby, half on ours."""
    slow = shared.machine
    slow.link(sent={"delay_s": SLOW_S / 2})
    return slow.heal


def fill_disk(shared: SharedDatabase, leader: ClusterHost) -> Undo:
    """Fill the disk of the server, which may not survive that."""
    return shared.fill_disk()


FAULTS: dict[str, tuple[str, Callable[[SharedDatabase, ClusterHost], Undo]]] = {
    "killed": ("leader killed", kill_leader),
    "stopped": ("leader stopped", stop_leader),
    "cut": ("leader cut off", cut_off),
    "cut-hosts": ("leader cut off from the hosts", cut_from_hosts),
    "cut-database": ("leader cut off from the database", cut_from_database),
    "drop-sent": ("what the leader sends is dropped", drop_sent),
    "drop-received": ("what the leader gets is dropped", drop_received),
    "restart": ("database restarted", restart_database),
    "failover": ("database failed over", fail_over),
    "silent-failover": ("the same, its machine cut off", fail_over_silently),
    "slow": ("database slow by 2 s", slow_down),
    "full": ("database full; from free space on", fill_disk),
}
LASTING = (fill_disk,)  # nothing can be changed until it is undone


# --- Rounds ---------------------------------------------------------------------------------------


class Round(NamedTuple):
    """What one fault has cost."""

    no_change_s: float
    longest_wait_s: float
    longest_get_s: float
    gets: int
    failed_gets: int
    refused: int  # changes, with a reason
    lost: int
    by_two: int
    message: str  # of what failed


_numbers = itertools.count()


def run_round(shared: SharedDatabase, make: Callable[[SharedDatabase, ClusterHost], Undo]) -> Round:
    """Make a fault, and undo it."""
    hosts = shared.cluster.hosts
    wait_until_whole(shared)
    leader = shared.leader()
    others = _others(shared, leader)
    changers = {host.label: host.another() for host in hosts}
    stem = f"t{next(_numbers)}"
    with contextlib.ExitStack() as loads:
        ends = [loads.enter_context(host.load("/", GETS, PAUSE_S)) for host in hosts]
        for host in hosts:
            changers[host.label].call(begin_changes, host.environ, f"{stem}{host.label}")
        time.sleep(LEAD_IN_S)
        begun_at = time.time()
        undo = make(shared, leader)
        time.sleep(max(begun_at + FAULT_S - time.time(), 0))
        undone_at = time.time()
        undo()
        time.sleep(LATER_S)
        living = others if make is kill_leader else hosts
        tallies = [end() for host, end in zip(hosts, ends, strict=True) if host in living]
    made = {host.label: changers[host.label].call(end_changes) for host in living}
    for changer in changers.values():
        changer.end()
    wait_until_whole(shared)
    of_others = [made[host.label] for host in others]
    if make in LASTING:
        begun_at = undone_at
    slowest = [t.slowest_s for h, t in zip(living, tallies, strict=True) if h is not leader]
    failures = [what for tally in tallies for _, _, what in tally.failures]
    texts = [text for tally in tallies for text in tally.texts]
    refused = [change.error for changes in made.values() for change in changes if change.error]
    return Round(
        longest_pause_s([c for changes in of_others for c in changes], begun_at),
        max(longest_pause_s(changes, begun_at) for changes in of_others),
        max(slowest),
        sum(tally.ok for tally in tallies),
        len(failures),
        len(refused),
        count_lost(shared, made.values()),
        count_by_two(hosts),
        str(Counter([*failures, *texts, *refused]).most_common(4)),
    )


def wait_until_whole(shared: SharedDatabase) -> None:
    """Wait until all hosts run, with three replicas on three hosts, and one controller."""

    def is_whole() -> bool:
        if not shared.runs_on_all():
            return False
        placed = shared.leader().replicas("default#Echo")
        if len(placed) == 3 and len(set(placed.values())) < 3:
            shared.leader().check("rebalance")
        return sorted(placed.values()) == ["a", "b", "c"]

    shared.cluster.wait_for(is_whole, WHOLE_S, "all hosts run")


def longest_pause_s(changes: Iterable[Change], begun_at: float) -> float:
    """Return the longest time without an acknowledged change, from the fault on."""
    times = sorted(change.ended_at for change in changes if not change.error)
    pauses = [b - max(a, begun_at) for a, b in itertools.pairwise(times) if b > begun_at]
    return max(pauses, default=float("inf"))


def count_lost(shared: SharedDatabase, all_changes: Iterable[list[Change]]) -> int:
    """Return how many changes are not there as they were acknowledged last."""
    leader = shared.leader()
    present = set(leader.call(tokens, leader.environ))
    lost = 0
    for changes in all_changes:
        last = {change.name: change for change in changes}  # as it was asked for last
        lost += sum(
            change.is_made != (change.name in present)
            for change in last.values()
            if not change.error
        )
    return lost


_SAVED = re.compile(r" (\d+) INFO change (\d+) by ")
_RECOVERED = re.compile(r" (\d+) INFO recovered \d+ backends, epoch (\d+)")


def count_by_two(hosts: list[ClusterHost]) -> int:
    """Return how often a controller gave a change the id of one of its successor's, or a later one.

    Their logs tell: each change is logged once it is saved, and ids go up by one.
    """
    ids: dict[str, list[int]] = {}  # by process
    epochs: dict[str, int] = {}
    for host in hosts:
        text = host.log("controller.log")
        for pid, change in _SAVED.findall(text):
            ids.setdefault(pid, []).append(int(change))
        epochs.update((pid, int(epoch)) for pid, epoch in _RECOVERED.findall(text))
    terms = [ids[pid] for pid in sorted(ids, key=lambda pid: epochs.get(pid, 0))]
    return sum(max(one) >= min(next_one) for one, next_one in itertools.pairwise(terms))


# --- The table ------------------------------------------------------------------------------------


def row_of(name: str, rounds: list[Round]) -> tuple[str, ...]:
    """Return medians and worst of times, and sums."""

    def times(which: str) -> str:
        values = [getattr(each, which) for each in rounds]
        return f"{statistics.median(values):.2f} / {max(values):.2f}"

    def total(which: str) -> str:
        return str(sum(getattr(each, which) for each in rounds))

    shown = (times(each) for each in ("no_change_s", "longest_wait_s", "longest_get_s"))
    sums = (total(each) for each in ("gets", "failed_gets", "refused", "lost"))
    return (name, str(len(rounds)), *shown, *sums, str(max(each.by_two for each in rounds)))


HEADS = (
    "fault; seconds are median / worst",
    "rounds",
    "no change for",
    "longest wait",
    "longest GET",
    "GETs",
    "failed",
    "refused",
    "lost",
    "by two",
)


def main() -> int:
    """Measure, and print."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--rounds", type=positive, default=10)
    options.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    options.add_argument("--json", type=Path, metavar="FILE", help="write all rounds here")
    given = options.parse_args()
    print(machine(), flush=True)
    measured: dict[str, list[Round]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        shared_database(Path(folder), standby=True, size=DISK) as shared,
    ):
        shared.cluster.start()
        shared.cluster.deploy(APP)
        for fault in given.faults:
            found, make = FAULTS[fault]
            for _ in range(given.rounds):
                one = run_round(shared, make)
                measured.setdefault(found, []).append(one)
                print(f"{time.strftime('%H:%M:%S')} {found}: {one}", flush=True)
                if given.json:
                    kept = {
                        name: [r._asdict() for r in rounds] for name, rounds in measured.items()
                    }
                    given.json.write_text(json.dumps(kept, indent=2) + "\n")
    print(table(HEADS, [row_of(name, rounds) for name, rounds in measured.items()]))
    return 0


if __name__ == "__main__":
    run_main(main)
