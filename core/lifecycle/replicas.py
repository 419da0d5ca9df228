"""What is observed of one replica, in the hands of its backend."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from greenroom.core.backoff import pause_s

# The life of a replica, as a table.
#
#     should_start --START--> starting --STARTED--> running --RETIRE--> should_stop --STOP-->
# stopping
#          |                     |  `--FAILED / RETIRE--------------------^                      |
#          `--RETIRE--> stopped <+--- EXITED, from every state in which there may be a process --+
#
#     starting, running --LOSE--> lost --FIND--> starting
#
# *should_start* is decided and saved, but nothing was done yet; *should_stop* still has its
# process, which finishes what it has once no router sends it more. *lost* is what may live on a
# host that cannot be reached. Nothing leaves *stopped*.


class ReplicaState(str, Enum):
    """Where a replica is in its life."""

    SHOULD_START = "SHOULD_START"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SHOULD_STOP = "SHOULD_STOP"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    LOST = "LOST"


class ReplicaEvent(str, Enum):
    """What can happen to a replica."""

    START = "START"  # its process is being made and told to start
    STARTED = "STARTED"  # its constructor returned
    FAILED = "FAILED"  # its constructor raised
    RETIRE = "RETIRE"  # it is no longer wanted
    STOP = "STOP"  # it has been told to stop
    EXITED = "EXITED"  # its process is gone
    LOSE = "LOSE"  # its host is lost
    FIND = "FIND"  # its host is back, and says that its process is there


S, E = ReplicaState, ReplicaEvent

TRANSITIONS: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (S.SHOULD_START, E.START): S.STARTING,
    (S.SHOULD_START, E.RETIRE): S.STOPPED,
    (S.STARTING, E.STARTED): S.RUNNING,
    (S.STARTING, E.FAILED): S.SHOULD_STOP,
    (S.STARTING, E.RETIRE): S.SHOULD_STOP,
    (S.STARTING, E.EXITED): S.STOPPED,
    (S.RUNNING, E.RETIRE): S.SHOULD_STOP,
    (S.RUNNING, E.EXITED): S.STOPPED,
    (S.SHOULD_STOP, E.STOP): S.STOPPING,
    (S.SHOULD_STOP, E.EXITED): S.STOPPED,
    (S.STOPPING, E.EXITED): S.STOPPED,
    (S.STARTING, E.LOSE): S.LOST,
    (S.RUNNING, E.LOSE): S.LOST,
    (S.LOST, E.FIND): S.STARTING,
    (S.LOST, E.EXITED): S.STOPPED,
}

LIVE = frozenset({S.SHOULD_START, S.STARTING, S.RUNNING})
LEAVING = frozenset({S.SHOULD_STOP, S.STOPPING})


class IllegalTransitionError(RuntimeError):
    """An event that cannot happen in this state: a bug in the caller."""


def next_state(state: ReplicaState, event: ReplicaEvent) -> ReplicaState:
    """Return the state after ``event``; raise IllegalTransitionError naming both otherwise."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(f"event {event.value} in state {state.value}") from None


@dataclass(slots=True, eq=False)
class Replica:
    """What is observed of one replica."""

    tag: str
    release: int = 1  # the number of the one that it runs
    host: str = ""
    state: ReplicaState = ReplicaState.SHOULD_START
    since: float = 0.0  # when it came to this state
    address: Any = None
    process: Any = None
    config_id: int = 0  # the newest that it has applied
    told_config_id: int = 0
    ongoing: int = 0
    ask_at: float = 0.0  # when to send again what its state asks for, or the next health check
    check_id: int = 0
    check_sent_at: float | None = None
    missed_checks: int = 0
    trouble: str = ""  # in its own words
    check_error: str = ""  # of the last health check, if it failed
    reported: bool = False
    recovering: bool = False  # known from the record only
    moving: bool = False  # to be replaced elsewhere

    def move(self, event: ReplicaEvent, now: float) -> None:
        """Take the table's transition."""
        self.state, self.since = next_state(self.state, event), now


# When a replica may be started after others have failed: soon at first, then less and less often.
#
# Failed starts are counted since the last success, apart for the newest release and for those
# before, so that old code that cannot start any more does not hold up the new. Those that were
# begun before another one failed count as one with that: a dependency that is down fails all of
# them at once.
#
# The death of a replica that ran says less of the code, for that had started: the first one is
# replaced at once, and no later one waits for longer than ``SERVED_BACKOFF_S``, however often it
# happens. Only what dies as soon as it runs, time after time, waits as failed starts do. What
# died with its host is not counted: that says nothing of the code.

BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
SERVED_BACKOFF_S = 1.0  # the longest pause of code that had started
REPLACE_S, MAX_REPLACE_S = 60.0, 300.0  # between replacements that mend nothing
STABLE_S = 30.0  # a replica that ran this long was no crash loop
BRIEF_S = 1.0  # one that ran for less has hardly served
BRIEF_LIVES = 20  # so many of these in a row are let pass
WITH_HOST_S = 3.0  # from a replica's end to that of its host: the one is heard of before the other


class _Row:
    """Failures in a row; the first ``free`` ones are followed by a start at once."""

    def __init__(self, most_s: float, free: int = 0, first_s: float = BACKOFF_S) -> None:
        self.count = 0
        self.start_at = 0.0  # no new replica before
        self._free = free
        self._first_s, self._most_s = first_s, most_s
        self.last_at = float("-inf")
        self._recent: list[tuple[float, set[str]]] = []  # when, and on which hosts

    def add(self, host: str, began_at: float, now: float) -> None:
        """Count what began then and has failed now, unless it began before the last failure."""
        self._recent = [each for each in self._recent if each[0] >= now - WITH_HOST_S]
        if began_at < self.last_at:
            if self._recent:
                self._recent[-1][1].add(host)
            return
        self.count += 1
        self.last_at = now
        self._recent.append((now, {host}))
        if self.count > self._free:
            self.start_at = now + pause_s(self.count - self._free, self._first_s, self._most_s)

    def forgive(self, host: str, now: float) -> int:
        kept = [
            (at, hosts - {host} if at >= now - WITH_HOST_S else hosts) for at, hosts in self._recent
        ]
        kept = [(at, hosts) for at, hosts in kept if hosts]
        forgiven, self._recent = len(self._recent) - len(kept), kept
        if forgiven:
            self.count = max(self.count - forgiven, 0)
            self.start_at = min(self.start_at, now)
        return forgiven

    def clear(self) -> None:
        self.count, self.start_at, self._recent = 0, 0.0, []
        self.last_at = float("-inf")


class _Failures:
    """What has failed of one release, or of those before it."""

    def __init__(self) -> None:
        self.starts = _Row(MAX_BACKOFF_S)
        self.deaths = _Row(SERVED_BACKOFF_S, free=1)
        self.brief_lives = _Row(MAX_BACKOFF_S, free=BRIEF_LIVES)

    @property
    def rows(self) -> tuple[_Row, _Row, _Row]:
        return self.starts, self.deaths, self.brief_lives

    @property
    def start_at(self) -> float:
        return max(row.start_at for row in self.rows)

    def died(self, host: str, began_at: float, now: float) -> None:
        for row, long_s in ((self.deaths, STABLE_S), (self.brief_lives, BRIEF_S)):
            if now - began_at > long_s:
                row.clear()
            else:
                row.add(host, began_at, now)


class Retries:
    """Counts one backend's failures. ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self.last_error = ""
        self._newest, self._old = _Failures(), _Failures()
        self._ended = _Row(MAX_BACKOFF_S)  # replicas of a release that ran, while it may go back
        self._unhealthy = _Row(MAX_REPLACE_S, free=1, first_s=REPLACE_S)
        self.check_error = ""  # of the replica that was replaced last, until a fresh one passes

    @property
    def failures(self) -> int:
        """How many starts of the newest release have failed, those at the same time as one."""
        return self._newest.starts.count

    @property
    def ended(self) -> int:
        """How many replicas of the newest release ran, and were lost, amid its update."""
        return self._ended.count

    @property
    def start_at(self) -> float:
        """Before when no new replica of the newest release is to start."""
        return self._newest.start_at

    @property
    def start_old_at(self) -> float:
        """Before when none of an earlier release is to start."""
        return self._old.start_at

    def begin_anew(self) -> None:
        """Forget what the newest release did: there is another one, or it is asked for again."""
        self._newest = _Failures()
        self._ended.clear()
        self._unhealthy.clear()
        self.last_error = self.check_error = ""

    def went_back(self) -> None:
        """Count an earlier release as the newest again."""
        self._newest, self._old = self._old, _Failures()
        self._ended.clear()

    def came_up(self) -> None:
        """Take note that everything runs; what crashes soon after it came up is still a loop."""
        self._newest.starts.clear()
        self._ended.clear()
        self._old = _Failures()
        self.last_error = ""

    def failed(self, error: str, host: str, began_at: float, now: float) -> None:
        """Count a failed start of the newest release, begun at ``began_at``."""
        self._newest.starts.add(host, began_at, now)
        self.last_error = error

    def old_failed(self, error: str, host: str, began_at: float, now: float) -> None:
        """Count a failed start of an earlier release."""
        self._old.starts.add(host, began_at, now)
        self.last_error = error

    def died(
        self, error: str, host: str, began_at: float, now: float, *, old: bool = False
    ) -> None:
        """Count the death of a replica that ran, of an earlier release if it is ``old``."""
        (self._old if old else self._newest).died(host, began_at, now)
        self.last_error = error

    def ended_amid_update(self, host: str, began_at: float, now: float) -> None:
        """Count a replica that ran and was lost while its release may be taken back."""
        self._ended.add(host, began_at, now)

    @property
    def replace_at(self) -> float:
        """Before when what answers, and fails its health checks, is not to be replaced."""
        return self._unhealthy.start_at

    def replaced(self, error: str, host: str, began_at: float, now: float) -> None:
        """Count a replica that is replaced because it failed its health checks."""
        self._unhealthy.add(host, began_at, now)
        self.check_error = self.last_error = error

    def passed(self, began_at: float) -> None:
        """Take note of a good health check, by a replica that has run since ``began_at``."""
        if began_at >= self._unhealthy.last_at:
            self._unhealthy.clear()
            self.check_error = ""

    def host_lost(self, host: str, now: float) -> bool:
        """Count no more what has just died on a host that is lost; tell whether anything had."""
        rows = (*self._newest.rows, *self._old.rows, self._ended)
        return sum([row.forgive(host, now) for row in rows]) > 0
