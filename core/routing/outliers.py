"""Which replicas of a backend fail where others would not: they get no queries for a while.

Theory of operation. The least loaded replica is chosen, so one that fails at once gets the most
queries of all. Its failures alone say little: some inputs fail everywhere, and who sends them could
have one replica after the other taken out. Nor do rates say it: who sends such inputs one by one
meets the same idle replica each time, while the others answer everybody else. Only chance tells
failures of a replica from those of queries. So a replica that has failed FAILURES times within
WINDOW_S is put on trial: where another has room, a coin decides which of the two gets the query.

    WELL      used as any other
    ON_TRIAL  until there is evidence, or for TRIAL_S, or for TRIAL_QUERIES; then WELL again, for a
              time that doubles with each trial that brought none
    EJECTED   gets no queries, for a time that doubles with each ejection
    PROBED    gets one query at a time: a failure ejects it again, any other answer makes it WELL

If the failures are the queries', a failed query of a trial was kept or sent away with equal chance.
The evidence against that is the capital of a gambler who bets on which it was, evenly over all
chances, beginning with 1 (a mixture, as in Robbins, "Statistical methods related to the law of the
iterated logarithm", Annals of Mathematical Statistics 41, 1970). The chance that it ever reaches
EVIDENCE is at most 1/EVIDENCE in each trial, whenever one looks.

At most half of the replicas that could serve are out at a time. What a failure is, is for
:func:`has_failed`. Queries that had no choice of replicas, those with a session, a model or a
preference, do not count, nor do mirrored ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf, lgamma, log
from typing import NamedTuple

FAILURES = 3
WINDOW_S = 30.0
TRIAL_S = 300.0
TRIAL_QUERIES = 500
EVIDENCE = 1e5
FIRST_S, LONGEST_S = 10.0, 300.0  # of an ejection, and of the rest after a trial
FORGIVEN_S = 600.0  # for so long earlier ejections make the next one longer
_NOT_ITS_OWN = frozenset({503, 504})  # has no room, what it calls has none, or the time is up


def has_failed(status: int) -> bool:
    """Return whether a status says that the replica has failed: not for load, time or inputs."""
    return status >= 500 and status not in _NOT_ITS_OWN


class OutlierState(Enum):
    """How a replica is used, by what is known of its failures."""

    WELL = auto()
    ON_TRIAL = auto()
    EJECTED = auto()
    PROBED = auto()


class Trial(NamedTuple):
    """What one query is to a trial: whether it was kept at this replica."""

    replica: str
    is_kept: bool


@dataclass(slots=True)
class _Record:
    state: OutlierState = OutlierState.WELL
    since: float = -inf
    lasts_s: float = 0.0  # an ejection; of WELL, how long no trial begins
    window_at: float = -inf
    failures: int = 0  # within the window
    queries: int = 0  # of the trial, as are these
    kept: int = 0  # and failed here
    sent_away: int = 0  # and failed elsewhere
    in_vain: int = 0  # trials in a row
    ejections: int = 0
    probes_failed: int = 0  # in a row

    def becomes(self, state: OutlierState, now: float, lasts_s: float = 0.0) -> None:
        self.state, self.since, self.lasts_s = state, now, lasts_s
        self.failures = self.queries = self.kept = self.sent_away = 0

    @property
    def is_out(self) -> bool:
        return self.state in {OutlierState.EJECTED, OutlierState.PROBED}

    def eject(self, now: float) -> None:
        lasts_s = min(FIRST_S * 2.0**self.ejections, LONGEST_S)
        self.ejections += 1
        self.in_vain = 0
        self.becomes(OutlierState.EJECTED, now, lasts_s)

    def acquit(self, now: float) -> None:
        lasts_s = min(FIRST_S * 2.0**self.in_vain, LONGEST_S)
        self.in_vain += 1
        self.becomes(OutlierState.WELL, now, lasts_s)


class Outliers:
    """The states of one backend's replicas. ``draw`` returns a random number in [0, 1)."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._records: dict[str, _Record] = {}  # of those that have failed lately

    def __bool__(self) -> bool:
        """Return whether any replica has failed lately: else all are used as ever."""
        return bool(self._records)

    def state(self, replica: str) -> OutlierState:
        """Return how a replica is used."""
        record = self._records.get(replica)
        return OutlierState.WELL if record is None else record.state

    def is_out(self, replica: str) -> bool:
        """Return whether a replica gets no queries, but for probes."""
        record = self._records.get(replica)
        return record is not None and record.is_out

    @property
    def out(self) -> list[str]:
        """The replicas that get no queries, but for probes; first those that are out longest."""
        since = {tag: record.since for tag, record in self._records.items() if record.is_out}
        return sorted(since, key=since.__getitem__)

    def ejections(self, replica: str) -> int:
        """Return how often in a row a replica has been ejected; 0 if it gets queries."""
        record = self._records.get(replica)
        return 1 + record.probes_failed if record is not None and record.is_out else 0

    @property
    def decide(self) -> bool:
        """Whether each query matters to a trial or a probe, so that none goes by a lease."""
        states = {record.state for record in self._records.values()}
        return not states.isdisjoint({OutlierState.ON_TRIAL, OutlierState.PROBED})

    def draw(self, replica: str) -> Trial:
        """Decide by chance whether a query is kept at a replica that is on trial."""
        return Trial(replica, self._draw() < 0.5)

    def all_in(self, state: OutlierState) -> list[str]:
        """Return the replicas that are used in one way; not for WELL, as those are not all here."""
        return [tag for tag, record in self._records.items() if record.state is state]

    def ended(
        self, replica: str, trial: Trial | None, *, failed: bool, replicas: int, now: float
    ) -> str | None:
        """Learn of a query that had a choice of ``replicas``.

        Return the replica that gets no queries any more, or gets them again.
        """
        record = self._records.get(replica)
        if record is not None and record.state is OutlierState.PROBED:
            if failed:
                record.probes_failed += 1
                record.eject(now)
            else:
                record.probes_failed = 0
                record.becomes(OutlierState.WELL, now)
            return replica
        if failed:
            self.failed(replica, 1, replicas=replicas, now=now)
        if trial is not None and (tried := self._records.get(trial.replica)) is not None:
            return self._tried(tried, trial, failed=failed, most_out=replicas // 2, now=now)
        return None

    def failed(self, replica: str, times: int, *, replicas: int, now: float) -> None:
        """Count failures that are in no trial: a trial begins when there were enough."""
        if replicas < 2:
            return
        record = self._records.setdefault(replica, _Record())
        if record.state is not OutlierState.WELL or now < record.since + record.lasts_s:
            return
        if now - record.window_at > WINDOW_S:
            record.window_at, record.failures = now, 0
        record.failures += times
        if record.failures >= FAILURES:
            record.becomes(OutlierState.ON_TRIAL, now)

    def look(self, now: float) -> None:
        """End trials and ejections that have had their time, and forget what is long ago."""
        for tag, record in list(self._records.items()):
            age = now - record.since
            if record.state is OutlierState.EJECTED and age >= record.lasts_s:
                record.becomes(OutlierState.PROBED, now)
            elif record.state is OutlierState.ON_TRIAL and age >= TRIAL_S:
                record.acquit(now)
            elif (
                record.state is OutlierState.WELL
                and age > record.lasts_s + FORGIVEN_S
                and now - record.window_at > WINDOW_S
            ):
                del self._records[tag]

    def let_in(self, most_out: int, now: float) -> list[str]:
        """Use replicas again, those that are out longest first, so that so many stay out."""
        out = self.out
        again = out[: max(len(out) - most_out, 0)]
        for tag in again:
            self._records[tag].probes_failed = 0
            self._records[tag].becomes(OutlierState.WELL, now)
        return again

    def forget(self, replica: str) -> None:
        """Forget a replica that is gone."""
        self._records.pop(replica, None)

    def _tried(
        self, record: _Record, trial: Trial, *, failed: bool, most_out: int, now: float
    ) -> str | None:
        """Count a query of a trial; return the replica if that ejects it."""
        if record.state is not OutlierState.ON_TRIAL:
            return None
        record.queries += 1
        record.kept += failed and trial.is_kept
        record.sent_away += failed and not trial.is_kept
        if _is_evident(record.kept, record.sent_away) and len(self.out) < most_out:
            record.eject(now)
            return trial.replica
        if record.queries >= TRIAL_QUERIES:
            record.acquit(now)
        return None


def _is_evident(kept: int, sent_away: int) -> bool:
    if kept <= sent_away:
        return False
    failed = kept + sent_away
    ways = lgamma(kept + 1) + lgamma(sent_away + 1) - lgamma(failed + 2)
    return failed * log(2.0) + ways >= log(EVIDENCE)
