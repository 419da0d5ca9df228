"""The failures of a backend's replicas, and how they delay the start of the next one.

Theory of operation. All failures are in one list, which is bounded. Those of one kind and release
are a *row*, until something good ends it. What follows from them is counted. What began before
another failure counts as one with it, because a missing dependency makes all starts fail at once.
Old code that no longer starts does not delay the new, because its release is another one.

A dependency that is down for some seconds should cost nothing, and a typo no more than seconds:
what has never run is tried for at least :data:`PATIENCE_S` after it first failed, and
:data:`MIN_TRIES` times, then failed. The last of the growing pauses ends with PATIENCE_S.

The death of a replica that ran says less about the code, because the code had started. The first
such replica is replaced at once, and later ones wait for a second at most. Only replicas that die
each time soon after they run wait as long as failed starts. What fails together with its host is
not counted, because it says nothing about the code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from greenroom.core.backoff import pause_s
from greenroom.core.lifecycle.replicas import Replica, RestartReason

PATIENCE_S, MIN_TRIES = 15.0, 3
STABLE_S = 30.0  # a replica that ran this long was no crash loop
BRIEF_S = 1.0  # one that ran for less has hardly served
REPLACE_S, MAX_REPLACE_S = 60.0, 300.0  # between replacements that mend nothing
WITH_HOST_S = 3.0  # a replica's end may be heard of this long before that of its host
AVOID_S = 600.0  # after a failed start, a host gets replicas only where no other takes them
KEPT = 100  # failures of a backend; many more in a row would lead to no longer pauses


@dataclass(slots=True, eq=False)
class Kind:
    """A kind of failures, and the pauses after those in a row: none after the first ``free``.

    Each pause is twice the one before. One that begins within ``patience_s`` after the first
    failure also ends within it. What had run for more than ``stable_s`` ends the row.
    """

    most_s: float = 0.0
    free: int = 0
    first_s: float = 0.1
    patience_s: float = 0.0
    stable_s: float = float("inf")


START = Kind(10.0, patience_s=PATIENCE_S)
START_HERE = Kind()  # that may go well on another host
DEATH = Kind(1.0, free=1, stable_s=STABLE_S)
BRIEF_LIFE = Kind(10.0, free=20, stable_s=BRIEF_S)
LOSS = Kind()  # of a replica that ran, while the update can be taken back
HEALTH = Kind(MAX_REPLACE_S, free=1, first_s=REPLACE_S)
EJECTION = Kind(MAX_REPLACE_S, free=1, first_s=REPLACE_S)
WEAR = Kind(MAX_REPLACE_S, free=1, first_s=REPLACE_S, stable_s=STABLE_S)
OF_STARTS = (START, DEATH, BRIEF_LIFE)  # after which starts wait


@dataclass(slots=True, eq=False)
class Failure:
    """One replica that has failed, or several together."""

    kind: Kind
    release: int
    at: float
    hosts: set[str]


class Failures:
    """The failures of one backend that count, and its restarts. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.restarts = dict.fromkeys(RestartReason, 0)  # since this controller began
        self.clear()

    def clear(self) -> None:
        """Begin anew with other code."""
        self._all: list[Failure] = []
        self.last_error = ""  # until all is well
        self.check_error = ""  # of the replica that was replaced last, until a fresh one passes

    def count_restart(self, replica: Replica, reason: RestartReason) -> None:
        """Count a replica that is replaced and was to go on: once, by the first reason."""
        if replica.replaced_for is None:
            replica.replaced_for = reason
            self.restarts[reason] += 1

    def add(self, kind: Kind, replica: Replica, now: float, ran_s: float = 0.0) -> None:
        """Count a failure of a replica in its present state, which has run for ``ran_s``."""
        row = self.row(kind, replica.release)
        if ran_s > kind.stable_s:
            self._drop(row)
        elif row and replica.since < row[-1].at:
            row[-1].hosts.add(replica.host)
        else:
            self._all.append(Failure(kind, replica.release, now, {replica.host}))
            del self._all[:-KEPT]

    def row(self, kind: Kind, release: int) -> list[Failure]:
        """Return the failures in a row, oldest first."""
        return [each for each in self._all if each.kind is kind and each.release == release]

    def pause_ends_at(self, release: int, *kinds: Kind) -> float:
        """Return the time before which nothing begins that may fail in these ways."""
        return max(_pause_ends_at(kind, self.row(kind, release)) for kind in kinds)

    def is_spent(self, release: int, most: int, now: float) -> bool:
        """Return whether enough starts failed, and for long enough, or ``most`` of them."""
        row = self.row(START, release)
        is_late = bool(row) and now >= row[0].at + PATIENCE_S
        return len(row) >= (min(most, MIN_TRIES) if is_late else most)

    def avoided(self, release: int, now: float) -> Counter[str]:
        """Return how often starts have failed, by host; long ago does not count."""
        lately = (each for each in self.row(START_HERE, release) if now - each.at < AVOID_S)
        return Counter(host for each in lately for host in each.hosts)

    def started(self, replica: Replica) -> None:
        """Avoid a host no more: a replica runs there."""
        self._uncount(replica.host, self.row(START_HERE, replica.release))

    def came_up(self) -> None:
        """Note that everything runs; a crash soon after coming up is still a crash loop."""
        self._drop(each for each in self._all if each.kind is START)
        self.last_error = ""

    def passed(self, began_at: float) -> None:
        """Note a good health check of a replica that has run since ``began_at``."""
        failed = [each for each in self._all if each.kind is HEALTH]
        if all(each.at <= began_at for each in failed):
            self._drop(failed)
            self.check_error = ""

    def host_gone(self, host: str, now: float) -> bool:
        """Uncount what has just failed with a host; return whether anything had.

        What starts lacked there may be there when it is back.
        """
        since = now - WITH_HOST_S
        with_it = [each for each in self._all if each.kind is START_HERE or each.at >= since]
        return self._uncount(host, with_it)

    def _uncount(self, host: str, failures: Iterable[Failure]) -> bool:
        found = [each for each in failures if host in each.hosts]
        for each in found:
            each.hosts.remove(host)
        self._drop(each for each in found if not each.hosts)
        return bool(found)

    def _drop(self, failures: Iterable[Failure]) -> None:
        over = set(failures)
        self._all = [each for each in self._all if each not in over]


def _pause_ends_at(kind: Kind, row: list[Failure]) -> float:
    if len(row) <= kind.free:
        return 0.0
    last_at, patient_until = row[-1].at, row[0].at + kind.patience_s
    ends_at = last_at + pause_s(len(row) - kind.free, kind.first_s, kind.most_s)
    return min(ends_at, patient_until) if last_at < patient_until else ends_at
