"""The life of a replica.

    should_start ----> starting ----> running ----> should_stop ----> stopping
         |                |  `--failed, or not wanted---^                 |
         `--> stopped <---+--- its process has ended, whatever it was ----+

    starting, running --its host is lost--> lost --that is back, and it runs--> starting

A replica in *should_start* is decided and saved, but not started yet. One in *should_stop* still
has its process, which finishes its queries once no router sends it more. A *lost* replica may still
run on a host that cannot be reached. *stopped* is final.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from greenroom.core.devices import Devices
from greenroom.core.records import ReplicaRecord
from greenroom.core.transitions import follow


class ReplicaState(StrEnum):
    """The states of a replica."""

    SHOULD_START = "SHOULD_START"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SHOULD_STOP = "SHOULD_STOP"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    LOST = "LOST"


class RestartReason(StrEnum):
    """Why a replica is replaced that was to go on; a text about it begins with these words."""

    FAILED_START = "failed start"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out of memory"
    UNHEALTHY = "unhealthy"
    EJECTED = "ejected"
    HOST_LOST = "host lost"
    MAX_AGE = "max_age_s"
    MAX_QUERIES = "max_queries"
    MAX_MEMORY = "max_memory_bytes"
    MAX_GPU_MEMORY = "max_gpu_memory_bytes"

    @classmethod
    def parse(cls, text: str) -> RestartReason:
        """Return the reason that a replica or its host has given; CRASHED where it is none."""
        return next((each for each in cls if text.startswith(each)), cls.CRASHED)


S = ReplicaState

NEXT: dict[ReplicaState, tuple[ReplicaState, ...]] = {
    S.SHOULD_START: (S.STARTING, S.STOPPED),
    S.STARTING: (S.RUNNING, S.SHOULD_STOP, S.STOPPED, S.LOST),
    S.RUNNING: (S.SHOULD_STOP, S.STOPPED, S.LOST),
    S.SHOULD_STOP: (S.STOPPING, S.STOPPED),
    S.STOPPING: (S.STOPPED,),
    S.STOPPED: (),
    S.LOST: (S.STARTING, S.STOPPED),
}

LIVE = frozenset({S.SHOULD_START, S.STARTING, S.RUNNING})
LEAVING = frozenset({S.SHOULD_STOP, S.STOPPING})


class Rank(NamedTuple):
    """A replica's number among the living ones of its backend, all from 0."""

    rank: int
    node_rank: int  # of its host, among those that have any
    local_rank: int  # among those on its host
    world_size: int  # how many there are; 0 while that is not known


@dataclass(slots=True, eq=False)
class Replica:
    """The observed state of one replica."""

    tag: str
    release: int = 1  # the number of the release that it runs
    host: str = ""
    state: ReplicaState = ReplicaState.SHOULD_START
    since: float = 0.0  # when it came to this state
    address: Any = None
    process: Any = None
    config_id: int = 0  # the newest that it has applied
    sent_config_id: int = 0
    ongoing: int = 0
    ask_at: float = 0.0  # when to send again what its state asks for, or the next health check
    check_id: int = 0
    check_sent_at: float | None = None
    missed_checks: int = 0
    trouble: str = ""  # in its own words
    check_error: str = ""  # of the last health check, if it failed
    ejected_by: dict[str, int] = field(default_factory=dict)  # proxy -> how often in a row
    stats: Mapping[str, float] = field(default_factory=dict)  # of record_autoscaling_stats
    reported: bool = False
    recovering: bool = False  # known from the record only
    may_have_served: bool = False
    moving: bool = False  # to be replaced, by one elsewhere or a fresh one
    worn: str = ""  # why it is to be replaced by a fresh one
    worn_at: float = 0.0
    replaced_for: RestartReason | None = None
    devices: Devices = field(default_factory=dict)
    rank: Rank | None = None  # the last that it had among those that live
    sent_rank: tuple[int, int, int, int] | None = None

    @classmethod
    def recorded(cls, tag: str, record: ReplicaRecord, now: float) -> Replica:
        """Return one that may have a process: it is asked, as if it had just been started."""
        return cls(
            tag,
            record.release,
            record.host,
            S.STARTING,
            since=now,
            ask_at=now,
            recovering=True,
            may_have_served=True,
            devices=record.devices or {},
            rank=Rank(record.rank, 0, 0, 0),  # the rest is not known yet
        )

    @property
    def record(self) -> ReplicaRecord:
        """What is saved of it."""
        rank = 0 if self.rank is None else self.rank.rank
        devices = self.devices or None
        return ReplicaRecord(release=self.release, host=self.host, rank=rank, devices=devices)

    @property
    def ejections(self) -> int:
        """How often in a row it has got no queries for a while, as it fails where others do not."""
        return max(self.ejected_by.values(), default=0)

    @property
    def ejection(self) -> str:
        """The same in words."""
        times = f", {self.ejections} times in a row" if self.ejections > 1 else ""
        problem = f"{self.tag} fails where other replicas do not: for a while it gets no queries"
        return f"{problem}{times}; its log says why"

    def ejected(self, proxy: str, times: int) -> bool:
        """Note how often in a row a proxy has left it out; return whether that is new."""
        if self.ejected_by.get(proxy, 0) == times:
            return False
        self.ejected_by[proxy] = times
        if not times:
            del self.ejected_by[proxy]
        return True

    def host_back(self, now: float, *, is_running: bool) -> None:
        """Ask a lost replica that still has a process, now that its host is back."""
        if self.state is S.LOST:
            self.become(S.STARTING if is_running else S.STOPPED, now)
            if is_running:
                self.replaced_for = None
                self.recovering, self.reported, self.ask_at = True, False, now

    def why_ended(self, cause: str) -> str:
        """Return why its process has ended, by what it had said before or by ``cause``.

        A worn one may still run out of memory.
        """
        is_oom = RestartReason.parse(cause) is RestartReason.OUT_OF_MEMORY
        return cause if is_oom or not self.worn else self.worn

    @property
    def known_rank(self) -> tuple[int, int, int, int] | None:
        """The rank to send it, as a plain tuple; None while only the record is known."""
        return self.rank[:] if self.rank is not None and self.rank.world_size else None

    def become(self, state: ReplicaState, now: float) -> None:
        """Take a transition; raise IllegalTransitionError where the table has none."""
        self.state, self.since = follow(NEXT, self.state, state), now
        if state is S.RUNNING:
            self.may_have_served = True

    def retire(self, now: float) -> None:
        """Have it stop, as it is no longer wanted; one without a process has stopped."""
        self.become(S.STOPPED if self.state is S.SHOULD_START else S.SHOULD_STOP, now)


def rank(living: Sequence[Replica]) -> None:
    """Give all living replicas of a backend their numbers, from 0 and without gaps.

    Each keeps the number that it has, unless an earlier one of the sequence has that, or it is as
    large as there are replicas.
    """
    free = dict.fromkeys(range(len(living)))
    numbers: dict[str, int] = {}
    for replica in living:
        if replica.rank is not None and replica.rank.rank in free:
            numbers[replica.tag] = replica.rank.rank
            del free[replica.rank.rank]
    unused = iter(free)
    hosts: dict[str, int] = {}
    on_host: Counter[str] = Counter()
    for replica in living:
        if replica.tag not in numbers:
            numbers[replica.tag] = next(unused)
    for replica in sorted(living, key=lambda each: numbers[each.tag]):
        host = replica.host
        node_rank = hosts.setdefault(host, len(hosts))
        replica.rank = Rank(numbers[replica.tag], node_rank, on_host[host], len(living))
        on_host[host] += 1


MAX_FAILURE = 64 * 1024  # bytes of a pickled exception, and characters of an error's text


def bounded(error: str, exception: bytes | None) -> tuple[str, bytes | None]:
    """Return a failure's text, and its pickled exception, as they may be reported and kept."""
    if exception is not None and len(exception) > MAX_FAILURE:
        exception = None  # its text says so
    if len(error) > MAX_FAILURE:
        half = MAX_FAILURE // 2 - 50  # the frames stand before the message, the cause after both
        left_out = f"... {len(error) - 2 * half} characters are left out ..."
        error = f"{error[:half]}\n{left_out}\n{error[-half:]}"
    return error, exception


Address = Any  # of actors, which are not known here
Process = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A replica's state, in its own words.

    ``queries_at`` is where it takes queries, once it has code.
    ``state`` is "idle" (no StartReplica yet), "starting", "running", "failed" (the constructor
    raised), "draining"; ``error`` is the constructor's, reconfigure's or check_health's, with its
    traceback; ``exception`` that exception, cloudpickled where it can be; ``lasts`` says whether
    to start it again would end in the same way; ``trouble`` is for status to show, ``stats`` what
    ``record_autoscaling_stats`` returned last. ``worn`` says why it is to be replaced, and begins
    with the :class:`RestartReason`.
    """

    replica: str
    process: Process
    state: str
    queries_at: Address | None = None
    config_id: int = 0
    check_id: int = 0
    ongoing: int = 0
    error: str = ""
    exception: bytes | None = None
    lasts: bool = False
    trouble: str = ""
    stats: dict[str, float] = field(default_factory=dict)
    worn: str = ""
