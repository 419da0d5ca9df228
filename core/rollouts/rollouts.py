"""Rollouts move an endpoint's traffic to a new backend step by step, or back if that fails.

Theory of operation. A step gives the new backend a share of the queries, by the same path as
``set_traffic``, and lasts for ``hold_s`` at least. Meanwhile every proxy counts the outcomes of the
endpoint's queries and reports them. After each report, :mod:`greenroom.core.rollouts.judging`
weighs the evidence:

    evidence of 1/alpha that a rule is broken              go back: the traffic is as it was before
    ready, held long enough, enough queries, and no rule
    with more evidence against the new backend than for    the next step; after the last, promoted
    else                                                   hold

So a rollout without traffic holds indefinitely. Each step needs all replicas of the new backend.
When none of them runs, the rollout holds, and goes back ``ready_timeout_s`` later, or at once if
the backend has failed. The last step is the promotion: without the old backend there is nothing to
compare with.

A rollout lies over its endpoint: routers get the endpoint's definition with the rollout's weights
(:class:`greenroom.core.lifecycle.endpoints.Overlay`), and the definition stays as it is. Going back
takes the overlay away; the promotion is one change of the definition. So the history and its undo
know nothing of steps. The overlay is worked out from the rollout's record.

Proxies count from the moment they hold a step's weights, which the long poll brings them together
with the step's name, and what they report is all that they have counted in it. So a controller that
restarts hears it again, from all proxies that live; of those that have died it knows what was saved
last, at a tenth of ``hold_s`` or :data:`SAVE_S` ago. Evidence so lost is missing, but not biased.

While a rollout is under way, other requests to set the traffic are refused. If the definition's
traffic changes in another way (a change is undone, an application deployed), the rollout ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from greenroom.core.agenda import HELD, NEVER
from greenroom.core.comparing.comparing import AllDifferences, Counts
from greenroom.core.errors import ConflictError, InvalidRequestError, UnknownNameError, last_line
from greenroom.core.lifecycle.backend import Backend
from greenroom.core.lifecycle.endpoints import Overlay, to_end_rollout
from greenroom.core.lifecycle.goals import Progress
from greenroom.core.lifecycle.history import Author
from greenroom.core.lifecycle.shown import trouble
from greenroom.core.lifecycle.state import Change, State
from greenroom.core.operations import StartRollout
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    ENDPOINT,
    ROLLOUT,
    CompareRecord,
    EndpointRecord,
    Records,
    RolloutRecord,
    is_candidates,
)
from greenroom.core.rollouts import judging
from greenroom.core.rollouts.judging import DIFFERENCE_RATE, PlainTally, Sample, Tally
from greenroom.core.routing.tables import ENDPOINT_PREFIX, ROLLOUT_PREFIX
from greenroom.core.transitions import follow

UNDER_WAY = "under way"
ENDED = PROMOTED, WENT_BACK, INTERRUPTED = "promoted", "went back", "interrupted"
NEXT = {UNDER_WAY: (UNDER_WAY, *ENDED), **dict.fromkeys(ENDED, (UNDER_WAY,))}  # by another one
SAVE_S = 5.0  # at most this often, what was counted is saved
BY_ITSELF = Author(user="greenroom")  # who makes the changes that a rollout decides on

Counted = Mapping[str, PlainTally]  # by backend
_NOTHING: Counted = {}


@dataclass(slots=True)
class Run:
    """What is known of an endpoint's rollout besides its record, which is in ``records`` alone."""

    state: State
    differences: AllDifferences
    records: Records[RolloutRecord]
    endpoint: str
    counted: dict[str, Counted] = field(default_factory=dict)  # by the proxy's incarnation
    held_since: float | None = None  # None while not every proxy holds the step's weights
    down_since: float | None = None  # None while the new backend runs
    saved_at: float | None = None  # or since when there is something to save
    why: str = ""
    evidence: dict[str, float] = field(default_factory=dict)
    answers: Counts = field(default_factory=Counts)
    new: Tally = field(default_factory=Tally)  # the sums of what was counted
    old: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        """Add up what was counted before."""
        for counted in self.counted.values():
            self._add(counted, 1)

    @property
    def record(self) -> RolloutRecord:
        """The newest record."""
        return self.records[self.endpoint]

    def count(self, proxy: str, counted: Counted) -> None:
        """Take all that a proxy has counted, in place of what it said before."""
        self._add(self.counted.get(proxy, _NOTHING), -1)
        self.counted[proxy] = counted
        self._add(counted, 1)

    def _add(self, counted: Counted, times: int) -> None:
        for tag, tally in counted.items():
            (self.new if tag == self.record.to else self.old).add(tally, times)

    def sample(self) -> Sample:
        """Return what was counted, for the judges."""
        record = self.record
        return Sample(
            new=self.new,
            old=self.old,
            share=record.steps[max(record.step, 0)],
            slowness=record.slowness,
            answers=self.answers,
        )

    def held_s(self, now: float) -> float:
        """Return for how long the step has stood."""
        return self.record.held_s if self.held_since is None else now - self.held_since

    @property
    def held_until(self) -> float:
        """Until when the step is to stand."""
        return NEVER if self.held_since is None else self.held_since + self.record.hold_s

    def reason_to_go_back(self, now: float) -> str:
        """Say why the traffic is to go back; empty where nothing speaks for that."""
        record = self.record
        compare = record.compares.get(record.to)
        is_mirrored = record.to in self.state.endpoints.served(self.endpoint).shadows
        self.answers = Counts()
        if DIFFERENCE_RATE in record.abort_if and compare is not None and is_mirrored:
            self.answers = self.differences.counts((self.endpoint, record.to, compare.id))
        return self._broken(now) or self._judge(now)

    def _broken(self, now: float) -> str:
        """Say why the new backend is out of the question; empty where it is not."""
        record, backend = self.record, self.state.backends.get(self.record.to)
        if backend is None or backend.record.deleting:
            return f"backend {record.to!r} was deleted"
        if backend.record.newest.number != record.release:
            return f"backend {record.to!r} was changed meanwhile, so what was seen is not of it"
        for part in self._parts():
            if part.record.failure:
                problem = f"backend {part.record.tag!r} could not be started"
                return f"{problem}: {last_line(trouble(part))}"
        if backend.running or not backend.wanted:
            self.down_since = None
            return ""
        if self.down_since is None:
            self.down_since = now
        if now < self.down_since + record.ready_timeout_s:
            return ""
        return f"no replica of {record.to!r} ran for {record.ready_timeout_s:g} s{_why(backend)}"

    def _judge(self, now: float) -> str:
        """Weigh the evidence."""
        record, held = self.record, self.state.long_poll.held_by_all
        if record.step < 0:
            return ""
        keys = ENDPOINT_PREFIX + self.endpoint, ROLLOUT_PREFIX + self.endpoint
        if self.held_since is None and all(map(held, keys)):
            self.held_since = now - record.held_s
        sample = self.sample()
        ratio = record.abort_if.get("p95_latency_ratio")
        if ratio is not None and record.slowness is None:
            slowness = judging.calibrate(sample.old, sample.new, ratio)
            if slowness is not None:
                record = replace(record, slowness=slowness, counted=dict(self.counted))
                self.records[self.endpoint] = record
                sample = sample._replace(slowness=slowness)
        self.evidence = judging.evidence_by_rule(record.abort_if, sample)
        if evidence_of(record, self.evidence) < 1 / record.alpha:
            return ""
        worst = max(self.evidence, key=lambda name: self.evidence[name])
        return f"{worst}: {judging.describe(worst, record.abort_if[worst], sample)}"

    def _parts(self) -> list[Backend]:
        """Return the new backend, with all others of a new version of an application."""
        backends = self.state.backends
        new = backends[self.record.to]
        application = new.record.application
        if application in {"", self.state.endpoints[self.endpoint].application}:
            return [new]
        return [backends[tag] for tag in sorted(self.state.backends_of(application))]

    def reason_to_hold(self, now: float) -> str:
        """Say why the step goes on; empty where it has shown enough, and all of the next is up."""
        for backend in self._parts():
            if not backend.converged:
                progress = f"{backend.running} of {backend.wanted} replicas run"
                return f"backend {backend.record.tag!r} is not ready: {progress}{_why(backend)}"
        record = self.record
        if record.step < 0:
            return ""
        if self.held_since is None:
            return "not every proxy has taken the step yet"
        sample = self.sample()
        if missing := judging.too_few(record.abort_if, sample, record.min_samples):
            return f"waits for traffic: {missing}"
        worst = max(self.evidence, key=lambda name: self.evidence[name])
        if self.evidence[worst] > judging.NO_EVIDENCE:
            finding = judging.describe(worst, record.abort_if[worst], sample)
            return f"in doubt about {worst}, so it waits for more queries: {finding}"
        progress = f"no objection so far; held for {self.held_s(now):.0f} of {record.hold_s:g} s"
        return progress if now < self.held_until else ""

    def save_counted(self, now: float) -> None:
        """Save now and then what was counted, for the next controller."""
        if self.held_since is None:
            return
        if self.saved_at is None:
            self.saved_at = now  # a controller that dies of each save gets to other things before
        if now < self.saved_at + max(self.record.hold_s / 10, SAVE_S):
            return
        self.saved_at = now
        counted = dict(self.counted)
        self.records[self.endpoint] = replace(self.record, held_s=self.held_s(now), counted=counted)

    def shown(self, now: float) -> dict[str, Any]:
        """Return where it stands and why, as plain values."""
        record, sample = self.record, self.sample()
        begun = record.step >= 0
        evidence = judging.evidence_by_rule(record.abort_if, sample) if begun else {}
        return {
            "to": record.to,
            "state": record.state,
            "why": self.why if record.state == UNDER_WAY else record.reason,
            "step": record.step + 1,
            "steps": list(record.steps),
            "traffic": dict(self.state.endpoints.served(self.endpoint).traffic),
            "held_s": round(self.held_s(now), 1),
            "hold_s": record.hold_s,
            "min_samples": record.min_samples,
            "new": judging.shown(sample.new),
            "old": judging.shown(sample.old),
            "evidence": evidence_of(record, evidence),
            "evidence_to_go_back": 1 / record.alpha,
            "rules": {
                name: {
                    "limit": limit,
                    "evidence": evidence_of(record, {name: evidence.get(name, 0.0)}),
                    "meaning": judging.RULES[name].meaning,
                    "finding": judging.describe(name, limit, sample) if begun else "",
                }
                for name, limit in record.abort_if.items()
            },
            "started_at": record.started_at,
        }


class Rollouts:
    """The last rollout of each endpoint.

    One is reconciled when what it goes by has changed, or when it is due. ``now`` is monotonic
    seconds, ``wall_now`` those of the epoch.
    """

    def __init__(
        self, state: State, differences: AllDifferences, records: Mapping[str, RolloutRecord]
    ) -> None:
        self._state = state
        self._agenda = state.agenda
        self._differences = differences
        self.records = Records(ROLLOUT, records, state.changes)
        state.gone.endpoint.append(self._forget)
        for name in records.keys() - state.endpoints.keys():  # of a lost endpoint
            del self.records[name]
        self._runs: dict[str, Run] = {}
        for record in self.records.values():
            if record.state == UNDER_WAY:
                self._begin(record.endpoint)
        for run in self._runs.values():
            state.lay(run.record.endpoint, _overlay_of(run.record))
            self._publish(run.record)

    def _run(self, name: str) -> Run:
        record = self.records[name]
        run = Run(self._state, self._differences, self.records, name, dict(record.counted))
        run.answers = Counts(*record.answers)
        return run

    def _begin(self, endpoint: str) -> None:
        self._runs[endpoint] = self._run(endpoint)
        self._agenda.touch(ROLLOUT, endpoint)

    # --- Requests -------------------------------------------------------------------------------

    def start(
        self, asked: StartRollout, wall_now: float, candidate: Overlay | None = None
    ) -> Change:
        """Return what begins to move an endpoint's traffic; nothing if the traffic is there.

        The same call again while it is under way has the same goal. ``candidate`` is the shadow
        that a canary has besides.
        """
        state, endpoint, to = self._state, asked.endpoint, asked.to
        present = state.endpoint(endpoint)
        settings = asked.model_dump(exclude={"endpoint"})
        run = self._runs.get(endpoint)
        if run is not None:
            if {name: getattr(run.record, name) for name in settings} == settings:
                return Change(subject=(ROLLOUT, endpoint))
            raise ConflictError(f"{_named(run.record)} is under way; {to_end_rollout(endpoint)}")
        self.check_traffic(endpoint)
        if candidate is None:
            state.check_usable(f"rollout of endpoint {endpoint!r}: to", [to], present.application)
        if _others_of(present.traffic, to) == {}:
            return Change()
        shadows, compares = (candidate.shadows, candidate.compares) if candidate else ({}, {})
        if DIFFERENCE_RATE in asked.abort_if and not compares:
            compares = {to: _compared_anew(present, to)}

        def begin() -> None:
            record = RolloutRecord(
                id=secrets.token_hex(8),
                endpoint=endpoint,
                before=dict(present.traffic),
                release=state.backends[to].record.newest.number,
                started_at=wall_now,
                shadows=shadows,
                compares=compares,
                **settings,
            )
            # With its weight of 0 the new backend is in use, and cannot be deleted.
            self._put(record)
            self._begin(endpoint)

        subject, what = (ROLLOUT, endpoint), f"roll out to {to}"
        return Change(then=begin, subject=subject, what=what, is_entered=True)

    def end(self, endpoint: str, state: str) -> Change:
        """Return what ends it now as PROMOTED or as WENT_BACK; nothing when that has happened."""
        self._state.endpoint(endpoint)
        run, record = self._runs.get(endpoint), self.records.get(endpoint)
        if run is not None:
            how = "promoted" if state == PROMOTED else "aborted"
            return self._ended(run, state, f"it was {how} by request")
        if record is None or record.state != state:
            known = ", ".join(sorted(self._runs)) or "none"
            raise UnknownNameError(
                f"no rollout of endpoint {endpoint!r} is under way; of these there are: {known}"
            )
        return Change()

    def check_traffic(self, endpoint: str) -> None:
        """Raise ConflictError naming the rollout that decides on an endpoint's traffic."""
        run = self._runs.get(endpoint)
        if run is not None:
            raise ConflictError(f"{_named(run.record)} decides on it; {to_end_rollout(endpoint)}")
        if self._state.endpoints.overlay(endpoint) is not None:
            raise ConflictError(
                f"the new version of endpoint {endpoint!r} takes over, and has its traffic until "
                "then; wait for the goal of that deploy"
            )

    # --- What proxies report --------------------------------------------------------------------

    def reported(self, endpoint: str, token: str, proxy: str, counted: Counted) -> None:
        """Take all that a proxy has counted in a step; that of another step counts no more."""
        run = self._runs.get(endpoint)
        if run is not None and token == _token(run.record):
            run.count(proxy, counted)
            self._agenda.touch(ROLLOUT, endpoint)

    # --- Decisions ------------------------------------------------------------------------------

    def reconcile(self, endpoint: str, now: float, wall_now: float) -> None:
        """Take the next step of an endpoint's rollout, if it has one to take."""
        run = self._runs.get(endpoint)
        if run is not None:
            self._advance(run, now, wall_now)
            if self._runs.get(endpoint) is run:
                self._schedule(run, now)

    def _forget(self, endpoint: str) -> None:
        """End an endpoint's rollout without a word, for the endpoint is deleted."""
        if self.records.pop(endpoint, None) is not None:
            self._runs.pop(endpoint, None)
            self._agenda.touch(ROLLOUT, endpoint)
            self._state.long_poll.publish(ROLLOUT_PREFIX + endpoint, None)

    def _advance(self, run: Run, now: float, wall_now: float) -> None:
        record = run.record
        if self._state.endpoints[record.endpoint].traffic != record.before:
            self._leave(run, INTERRUPTED, "the traffic was changed otherwise")
        elif reason := run.reason_to_go_back(now):
            self._end(run, WENT_BACK, reason, wall_now)
        elif why := run.reason_to_hold(now):
            run.why = why
            run.save_counted(now)
        else:
            self._step(run, wall_now)

    def _schedule(self, run: Run, now: float) -> None:
        """Reconcile it when it is due, and after each change of what it goes by."""
        record, times, agenda = run.record, [NEVER, run.held_until], self._agenda
        backend = self._state.backends.get(record.to)
        agenda.upon((BACKEND, record.to), ROLLOUT, record.endpoint)
        if backend is not None and backend.record.application:
            application = backend.record.application
            agenda.upon((APPLICATION, application), ROLLOUT, record.endpoint)
        if run.held_since is None:
            agenda.upon(HELD, ROLLOUT, record.endpoint)
        if run.down_since is not None:
            times.append(run.down_since + record.ready_timeout_s)
        agenda.at(ROLLOUT, record.endpoint, min(due_at for due_at in times if due_at > now))

    def _step(self, run: Run, wall_now: float) -> None:
        step = run.record.step + 1
        if run.record.steps[step] == 1:
            self._end(run, PROMOTED, "no rule was broken in any step", wall_now)
            return
        record = replace(run.record, step=step, held_s=0.0, counted={}, slowness=None)
        self._put(record)
        self._begin(record.endpoint)
        self._publish(record)

    def _end(self, run: Run, state: str, reason: str, wall_now: float) -> None:
        """End it by itself: in the history is only what that defines."""
        change = self._ended(run, state, reason)._replace(is_entered=False)
        what = f"{_named(run.record)}: {state}: {reason}"
        self._state.apply(BY_ITSELF, what, change, wall_now)

    def _ended(self, run: Run, state: str, reason: str) -> Change:
        """Return what ends it; the promotion is one change of the endpoint's definition."""
        endpoint, wanted = run.record.endpoint, {}
        if state == PROMOTED and not is_candidates(run.record.to):
            present = self._state.endpoints[endpoint]
            wanted[ENDPOINT, endpoint] = replace(present, traffic={run.record.to: 1.0})
        return Change(wanted=wanted, then=lambda: self._leave(run, state, reason), is_entered=True)

    def interrupt(self, endpoint: str, reason: str) -> None:
        """End an endpoint's rollout where it stands, if one is under way."""
        if (run := self._runs.get(endpoint)) is not None:
            self._leave(run, INTERRUPTED, reason)

    def _leave(self, run: Run, state: str, reason: str) -> None:
        """Keep what is known of a rollout that is under way no more; its overlay goes."""
        record = replace(
            run.record,
            state=state,
            reason=reason,
            counted=dict(run.counted),
            held_s=0.0,
            answers=tuple(run.answers),
        )
        self._runs.pop(record.endpoint, None)
        self._put(record)
        self._state.long_poll.publish(ROLLOUT_PREFIX + record.endpoint, None)

    def _put(self, record: RolloutRecord) -> None:
        if (before := self.records.get(record.endpoint)) is not None:
            follow(NEXT, before.state, record.state)
        self.records[record.endpoint] = record
        if record.endpoint not in self._runs:
            self._agenda.touch(ROLLOUT, record.endpoint)  # that it has ended is of interest
        self._state.lay(record.endpoint, _overlay_of(record))

    def _publish(self, record: RolloutRecord) -> None:
        if record.step >= 0:
            self._state.long_poll.publish(ROLLOUT_PREFIX + record.endpoint, _token(record))

    # --- How they are shown ---------------------------------------------------------------------

    def progress(self, endpoint: str) -> Progress:
        """Tell how far an endpoint's rollout is; it fails by going back."""
        record = self.records.get(endpoint)
        if record is None:
            is_there = endpoint in self._state.endpoints or (ENDPOINT, endpoint) in self._state.lost
            what = "has no rollout any more: its record is lost" if is_there else "was deleted"
            return Progress(error=f"endpoint {endpoint!r} {what}")
        if record.state == UNDER_WAY:
            return Progress()
        if not self._state.long_poll.held_by_all(ENDPOINT_PREFIX + endpoint):
            return Progress(unheld=True)
        if record.state == PROMOTED:
            return Progress(done=True)
        return Progress(error=f"{_named(record)} {record.state}: {record.reason}")

    def describe(self, endpoint: str) -> str:
        """Return where an endpoint's rollout stands, in a few words."""
        run = self._runs.get(endpoint)
        if run is None:
            return ""
        record = run.record
        share = record.steps[record.step] if record.step >= 0 else 0.0
        return f"step {record.step + 1} of {len(record.steps)}, {share * 100:.4g} %: {run.why}"

    def status(self, now: float) -> dict[str, Any]:
        """Return endpoint -> where its last rollout stands and why, as plain values."""
        return {
            name: (self._runs.get(name) or self._run(name)).shown(now)
            for name in sorted(self.records)
        }


def _compared_anew(endpoint: EndpointRecord, to: str) -> CompareRecord:
    """Return a new comparison like the endpoint's: what was found earlier does not count."""
    compare = endpoint.compares.get(to)
    if compare is None:
        raise InvalidRequestError(
            f"abort_if[{DIFFERENCE_RATE!r}]: no answers of {to!r} are compared with those of "
            f"endpoint {endpoint.name!r}; first: shadow_traffic({endpoint.name!r}, {to!r}, 0.1, "
            'compare="json")'
        )
    return replace(compare, id=secrets.token_hex(4))


def evidence_of(record: RolloutRecord, by_rule: Mapping[str, float]) -> float:
    """Return the mean over all rules and judged steps; see core/rollouts/judging.py."""
    return sum(by_rule.values()) / (len(record.abort_if) * max(len(record.steps) - 1, 1))


def _token(record: RolloutRecord) -> str:
    return f"{record.id}.{record.step}"


def _named(record: RolloutRecord) -> str:
    return f"rollout of endpoint {record.endpoint!r} to {record.to!r}"


def _why(backend: Backend) -> str:
    text = last_line(trouble(backend))
    return f": {text}" if text else ""


def _overlay_of(record: RolloutRecord) -> Overlay | None:
    if record.state != UNDER_WAY:
        return None
    return Overlay(_weights_at(record), record.shadows, record.compares)


def _weights_at(record: RolloutRecord) -> dict[str, float]:
    """Return the traffic of a rollout under way: the old backends share what the new one leaves."""
    if record.step < 0:
        return {record.to: 0.0} | dict(record.before)
    share = record.steps[record.step]
    others = _others_of(record.before, record.to)
    of_all = sum(others.values())
    return {tag: weight / of_all * (1 - share) for tag, weight in others.items()} | {
        record.to: share
    }


def _others_of(traffic: Mapping[str, float], to: str) -> dict[str, float]:
    """Return the weights of the backends that a rollout takes traffic from."""
    return {tag: weight for tag, weight in traffic.items() if tag != to and weight > 0}
