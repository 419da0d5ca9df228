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

What ails a replica may be its host's or its GPU's. So what comes after one that went while it was
out begins PROBED, too, and costs one failure where nothing is mended, not those of another trial.

If the failures are the queries', a failed query of a trial was kept or sent away with equal chance.
The evidence against that is the capital of a gambler who begins with 1 and bets on which it was:
half of it on "kept" each time, as of a replica that alone fails, and half evenly over all chances
(a mixture, as in Robbins, "Statistical methods related to the law of the iterated logarithm",
Annals of Mathematical Statistics 41, 1970). The chance that it ever reaches EVIDENCE is at most
1/EVIDENCE in each trial, whenever it is checked.

None is ejected where half of those that could serve would be out, and where queries wait, some are
let in again until no more are. What a failure is, is for :func:`has_failed`. Queries that had no
choice of replicas, those with a session, a model or a preference, do not count, nor do mirrored
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import exp, inf, lgamma
from typing import NamedTuple

from greenroom.core.backoff import pause_s

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
    ends_at: float = inf  # the state; of WELL, the record
    rests_until: float = -inf  # no trial begins before
    window_at: float = -inf
    failures: int = 0  # within the window
    queries: int = 0  # of the trial, as are these
    kept: int = 0  # and failed here
    sent_away: int = 0  # and failed elsewhere
    in_vain: int = 0  # trials in a row
    ejections: int = 0
    probes_failed: int = 0  # in a row


class Outliers:
    """The states of one backend's replicas. ``draw`` returns a random number in [0, 1)."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._records: dict[str, _Record] = {}  # of those that have failed lately
        self._in: dict[OutlierState, dict[str, None]] = {state: {} for state in OutlierState}
        self.on_trial = self._in[OutlierState.ON_TRIAL]
        self.probed = self._in[OutlierState.PROBED]
        self.ejected = self._in[OutlierState.EJECTED]
        self._due_at = inf  # when a state ends
        self._vacant: list[tuple[float, int]] = []  # until when, and ejections of those that went

    def __bool__(self) -> bool:
        """Return whether any replica has failed lately: else all are used as ever."""
        return bool(self._records)

    def state(self, replica: str) -> OutlierState:
        """Return how a replica is used."""
        record = self._records.get(replica)
        return OutlierState.WELL if record is None else record.state

    def is_out(self, replica: str) -> bool:
        """Return whether a replica gets no queries, but for probes."""
        return replica in self.ejected or replica in self.probed

    @property
    def out(self) -> list[str]:
        """The replicas that get no queries, but for probes; first those that are out longest."""
        return sorted([*self.ejected, *self.probed], key=lambda tag: self._records[tag].since)

    def ejections(self, replica: str) -> int:
        """Return how often in a row a replica has been ejected; 0 if it gets queries."""
        return 1 + self._records[replica].probes_failed if self.is_out(replica) else 0

    @property
    def decide(self) -> bool:
        """Whether each query matters to a trial or a probe, so that none goes by a lease."""
        return bool(self.on_trial or self.probed)

    def draw(self, replica: str) -> Trial:
        """Decide by chance whether a query is kept at a replica that is on trial."""
        return Trial(replica, self._draw() < 0.5)

    def ended(
        self, replica: str, trial: Trial | None, *, failed: bool, replicas: int, now: float
    ) -> str | None:
        """Learn of a query that had a choice of ``replicas``.

        Return the replica that gets no queries any more, or gets them again.
        """
        if replica in self.probed:
            record = self._records[replica]
            record.probes_failed = record.probes_failed + 1 if failed else 0
            if failed:
                self._eject(replica, record, now)
            else:
                self._becomes(replica, OutlierState.WELL, now, FORGIVEN_S)
            return replica
        if failed:
            self.failed(replica, 1, replicas=replicas, now=now)
        if trial is not None and trial.replica in self.on_trial:
            return self._tried(trial, failed=failed, most_out=replicas // 2, now=now)
        return None

    def failed(self, replica: str, times: int, *, replicas: int, now: float) -> None:
        """Count failures that are in no trial: a trial begins when there were enough."""
        if replicas < 2:
            return
        if replica not in self._records:
            self._records[replica] = _Record()
            self._becomes(replica, OutlierState.WELL, now, FORGIVEN_S)
        record = self._records[replica]
        if record.state is not OutlierState.WELL:
            return
        record.ends_at = max(record.ends_at, now + FORGIVEN_S)
        if now < record.rests_until:
            return
        if now - record.window_at > WINDOW_S:
            record.window_at, record.failures = now, 0
        record.failures += times
        if record.failures >= FAILURES:
            self._becomes(replica, OutlierState.ON_TRIAL, now, TRIAL_S)

    def check(self, now: float) -> None:
        """End trials and ejections that have had their time, and forget what is long ago."""
        if now < self._due_at:
            return
        self._due_at = inf
        for tag, record in list(self._records.items()):
            if now < record.ends_at:
                self._due_at = min(self._due_at, record.ends_at)
            elif record.state is OutlierState.EJECTED:
                self._becomes(tag, OutlierState.PROBED, now, inf)
            elif record.state is OutlierState.ON_TRIAL:
                self._acquit(tag, record, now)
            else:
                self.forget(tag)

    def let_in(self, most_out: int, now: float) -> list[str]:
        """Use replicas again, those that are out longest first, so that so many stay out."""
        out = self.out
        again = out[: max(len(out) - most_out, 0)]
        for tag in again:
            self._records[tag].probes_failed = 0
            self._becomes(tag, OutlierState.WELL, now, FORGIVEN_S)
        return again

    def came(self, replica: str, now: float) -> None:
        """Probe a new replica first if it may be the successor of one that was out."""
        vacant = [each for each in self._vacant if now < each[0]]
        if vacant and replica not in self._records:
            self._records[replica] = _Record(ejections=vacant.pop()[1])
            self._becomes(replica, OutlierState.PROBED, now, inf)
        self._vacant = vacant

    def went(self, replica: str, now: float) -> None:
        """Forget a replica that is gone."""
        if self.is_out(replica):
            self._vacant.append((now + FORGIVEN_S, self._records[replica].ejections))
        self.forget(replica)

    def forget(self, replica: str) -> None:
        """Forget a replica that has not failed for long."""
        record = self._records.pop(replica, None)
        if record is not None:
            del self._in[record.state][replica]

    def _tried(self, trial: Trial, *, failed: bool, most_out: int, now: float) -> str | None:
        """Count a query of a trial; return the replica if that ejects it."""
        record = self._records[trial.replica]
        record.queries += 1
        record.kept += failed and trial.is_kept
        record.sent_away += failed and not trial.is_kept
        if _is_evident(record.kept, record.sent_away) and len(self.out) < most_out:
            record.in_vain = 0
            self._eject(trial.replica, record, now)
            return trial.replica
        if record.queries >= TRIAL_QUERIES:
            self._acquit(trial.replica, record, now)
        return None

    def _eject(self, tag: str, record: _Record, now: float) -> None:
        record.ejections += 1
        lasts_s = pause_s(record.ejections, FIRST_S, LONGEST_S)
        self._becomes(tag, OutlierState.EJECTED, now, lasts_s)

    def _acquit(self, tag: str, record: _Record, now: float) -> None:
        record.in_vain += 1
        rest_s = pause_s(record.in_vain, FIRST_S, LONGEST_S)
        self._becomes(tag, OutlierState.WELL, now, rest_s + FORGIVEN_S)
        record.rests_until = now + rest_s

    def _becomes(self, tag: str, state: OutlierState, now: float, lasts_s: float) -> None:
        record = self._records[tag]
        self._in[record.state].pop(tag, None)
        self._in[state][tag] = None
        record.state, record.since, record.ends_at = state, now, now + lasts_s
        record.failures = record.queries = record.kept = record.sent_away = 0
        self._due_at = min(self._due_at, record.ends_at)


def _is_evident(kept: int, sent_away: int) -> bool:
    if kept <= sent_away:
        return False
    failed = kept + sent_away
    evenly = exp(lgamma(kept + 1) + lgamma(sent_away + 1) - lgamma(failed + 2))
    always = 0.0 if sent_away else 1.0
    return 2.0**failed * (evenly + always) / 2.0 >= EVIDENCE
