"""What a rollout may do: only what it was asked for, and only by what proxies have really counted.

A rollout decides on an endpoint's traffic by itself, so what a client may rely on follows what is
saved, as long as each save is a step that the last one allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from greenroom.actors.messages import admin as am
from greenroom.core import operations as ops
from greenroom.core.routing.tickets import Ended, Observer, Retried
from tests.simulation.scripted_code import FAILING

if TYPE_CHECKING:
    from tests.simulation.checks import Checks

UNDER_WAY, PROMOTED, WENT_BACK = "under way", "promoted", "went back"
INTERRUPTED = "interrupted"
QUERIES, ERRORS = 0, 1  # of a tally
_STATES: dict[type[ops.Operation], str] = {
    ops.AbortRollout: WENT_BACK,
    ops.PromoteRollout: PROMOTED,
}


class RolloutChecks(Observer):
    """Follows every endpoint's rollout from save to save."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._seen: dict[tuple[str, str], Counter[str]] = {}  # (endpoint, what) -> by backend

    # --- What proxies count -----------------------------------------------------------------------

    def retried(self, event: Retried) -> None:
        """See Observer."""
        self._count(event.ticket.endpoint, event.ticket.backend, is_bad=True)

    def ended(self, event: Ended) -> None:
        """See Observer."""
        endpoint, backend, status, took_s, _ = event
        if status != 499:
            is_bad = status >= 500 or status == 408
            self._count(endpoint, backend, is_bad=is_bad, count=len(took_s))

    def _count(self, endpoint: str, backend: str, *, is_bad: bool, count: int = 1) -> None:
        self._of(endpoint, QUERIES)[backend] += count
        self._of(endpoint, ERRORS)[backend] += count * is_bad

    def _of(self, endpoint: str, what: int) -> Counter[str]:
        return self._seen.setdefault((endpoint, str(what)), Counter())

    # --- Saves ------------------------------------------------------------------------------------

    def saved(self, name: str, old: Any, old_endpoint: Any) -> bool:
        """A rollout's record, or its endpoint's, has changed; tell whether it set the traffic."""
        new, endpoint = (self._checks.on_disk.get((kind, name)) for kind in ("rollout", "endpoint"))
        if new is None or endpoint is None:
            self._expect(name, new is None, "is still there without its endpoint")
            return False
        if new.state == UNDER_WAY:
            at = new.before
            self._expect(name, _alike(endpoint.traffic, at), f"changed {at} to {endpoint.traffic}")
        if new is old:
            return False
        if old is None or old.id != new.id:
            self._begun(name, old, new, old_endpoint)
            old = replace(new, step=-1, state=UNDER_WAY)  # its first step may come with it
        self._expect(name, old.state == UNDER_WAY, f"was {old.state}, and is changed: {new}")
        self._compare_counts(new)
        if new.state == UNDER_WAY:
            self._expect(name, new.step in {old.step, old.step + 1}, f"leaps to {new.step}")
            if new.step != old.step:
                self._advanced(old)
        else:
            self._ended(old, new, endpoint)
        return new.state in {UNDER_WAY, PROMOTED, WENT_BACK}

    def _begun(self, name: str, old: Any, new: Any, old_endpoint: Any) -> None:
        asked = self._checks.pending(name)
        message = f"began as {new}, after {old}, and {asked} was asked for"
        self._expect(name, old is None or old.state != UNDER_WAY, message)
        self._expect(name, isinstance(asked, ops.StartRollout), message)
        wanted = (asked.to, asked.steps, asked.hold_s, dict(old_endpoint.traffic))
        self._expect(name, (new.to, new.steps, new.hold_s, dict(new.before)) == wanted, message)
        self._reset(name)

    def _advanced(self, old: Any) -> None:
        """It took a step by itself: what it has seen has to be enough for that."""
        name = old.endpoint
        if old.step >= 0:
            queries = self._of(name, QUERIES)[old.to]
            enough = queries >= old.min_samples
            self._expect(name, enough, f"goes on from step {old.step} after {queries} queries")
            hopeless = self._checks.kind_of(old.to) == FAILING and "error_rate" in old.abort_if
            self._expect(name, not hopeless, "goes on though every query of the new one fails")
        self._checks.counts["rollout took a step"] += 1
        self._reset(name)

    def _ended(self, old: Any, new: Any, endpoint: Any) -> None:
        name, traffic = new.endpoint, dict(endpoint.traffic)
        by_request = "by request" in new.reason
        asked = self._checks.pending(name)
        self._expect(name, bool(new.reason), "ended without a reason")
        if by_request:
            self._expect(name, _STATES.get(type(asked)) == new.state, f"{new.reason}: {asked}")
        if new.state == PROMOTED:
            self._expect(name, traffic == {new.to: 1.0}, f"was promoted, with {traffic}")
            if not by_request:
                self._expect(name, new.steps[old.step + 1] == 1, f"was promoted at {old.step}")
                self._advanced(old)
        elif new.state == INTERRUPTED:
            self._expect(name, not isinstance(asked, ops.SetTraffic), f"gave way to {asked}")
        elif new.state == WENT_BACK:
            self._expect(name, traffic == dict(new.before), f"went back, with {traffic}")
            if new.reason.startswith("error_rate"):
                bad = self._of(name, ERRORS)[new.to]
                self._expect(name, bad > 0, f"went back with {bad} errors: {new.reason}")
        how = "by request" if by_request else "by itself"
        self._checks.counts[f"rollout {new.state} {how}"] += 1

    def _compare_counts(self, record: Any) -> None:
        """What was reported and added up is at most what has happened."""
        sums: dict[tuple[str, int], int] = Counter()
        for counted in record.counted.values():
            for backend, tally in counted.items():
                for what in (QUERIES, ERRORS):
                    sums[backend, what] += tally[what]
        for (backend, what), number in sums.items():
            seen = self._of(record.endpoint, what)[backend]
            message = f"has counted {number} queries of {backend}, and there were {seen}"
            self._expect(record.endpoint, number <= seen, message)

    def _reset(self, name: str) -> None:
        for what in (QUERIES, ERRORS):
            self._of(name, what).clear()

    def _expect(self, name: str, holds: bool, message: str) -> None:
        if not holds:
            self._checks.expect(False, f"the rollout of {name} {message}")

    # --- Answers ----------------------------------------------------------------------------------

    def blocks(self, request: ops.Operation, record: Any) -> bool:
        """Return whether a rollout, as it is on disk, forbids a request."""
        if record is None or record.state != UNDER_WAY:
            return False
        if isinstance(request, ops.DeleteBackend):
            return request.tag in (record.to, *record.before)
        if isinstance(request, ops.StartRollout):
            mine = (request.to, request.steps, request.hold_s, request.min_samples)
            same = (record.to, record.steps, record.hold_s, record.min_samples)
            settings = (request.abort_if, request.alpha, request.ready_timeout_s)
            return (mine, settings) != (
                same,
                (dict(record.abort_if), record.alpha, record.ready_timeout_s),
            )
        return isinstance(request, ops.SetTraffic)

    def answered(self, request: Any, reply: am.RequestReply) -> None:
        """A client was answered that its rollout was ended, or that there is none to end."""
        record = self._checks.on_disk.get(("rollout", request.endpoint))
        has_ended_so = record is not None and record.state == _STATES[type(request)]
        self._expect(
            request.endpoint,
            has_ended_so == (not reply.error_kind) or reply.error_kind == "GreenroomError",
            f"is {record}, and {request} was answered {reply}",
        )


def served(endpoint: Any, rollout: Any) -> Any:
    """Return an endpoint as proxies are to have it: with the traffic of its rollout."""
    if endpoint is None or rollout is None or rollout.state != UNDER_WAY:
        return endpoint
    return replace(endpoint, traffic=weights(rollout))


def weights(record: Any) -> dict[str, float]:
    """Return the traffic that a rollout under way stands for."""
    before = dict(record.before)
    if record.step < 0:
        return {record.to: 0.0, **before}
    left = 1.0 - record.steps[record.step]
    others = {tag: weight for tag, weight in before.items() if tag != record.to and weight}
    return {tag: left * weight / sum(others.values()) for tag, weight in others.items()} | {
        record.to: record.steps[record.step]
    }


def _alike(found: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    near = (abs(found.get(tag, -1.0) - weight) < 1e-9 for tag, weight in wanted.items())
    return found.keys() == wanted.keys() and all(near)
