"""What of a history no correct system could have done. Nothing here is of the product.

- Acknowledged changes of each endpoint are linearizable.
- Each answer is by a version that was *in force* at some time between the request and its answer:
  one is from when the change that gave it weight was asked for, until the change that took its
  weight was acknowledged. The same holds for 404, which says that there is no endpoint.
- Each answer belongs to its request, and to a run that a replica has written down.
- No POST has run twice.
- No replica runs more requests at a time than it may.

A host that was kept from the others for long may serve by what it knew: its answers from then on
until it is back count as asked for when that began.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate

from tests.checker.histories import OK, REFUSED, UNKNOWN, History, Operation, Request, Run, Weights
from tests.checker.linearizability import Call, unexplained

Endpoint = tuple[str, Weights] | None  # the version that it was made with, and its traffic


def violations(history: History) -> list[str]:
    """Return what is wrong, one line each."""
    return [
        *_unexplained_changes(history.operations),
        *_wrong_versions(history),
        *_wrong_runs(history),
        *_crowded(history),
    ]


def _by_endpoint(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    found = defaultdict(list)
    for each in operations:
        found[each.endpoint].append(each)
    return found


# --- Changes --------------------------------------------------------------------------------------


def _unexplained_changes(operations: Iterable[Operation]) -> Iterator[str]:
    for endpoint, own in _by_endpoint(operations).items():
        calls = [Call(each.asked_at, each.answered_at, each) for each in own]
        stuck_at = unexplained(calls, None, _step)
        if stuck_at is not None:
            yield f"changes of {endpoint} are not linearizable: no order explains {stuck_at}"


def _step(state: Endpoint, operation: Operation) -> tuple[bool, Endpoint]:
    """Return whether an operation may end so, and the endpoint after it."""
    kind, outcome = operation.kind, operation.outcome
    traffic = None if state is None else state[1]
    if kind == "read":
        return traffic == operation.value, state
    is_refused, then = _changed(state, operation)
    if outcome == UNKNOWN:
        return True, then
    return is_refused == (outcome == REFUSED), then


def _changed(state: Endpoint, operation: Operation) -> tuple[bool, Endpoint]:
    """Return whether a change is refused, and the endpoint after it."""
    if operation.kind == "delete":
        return False, None
    assert operation.value is not None
    if operation.kind == "create":
        made_with = operation.value[0][0]
        if state is None:
            return False, (made_with, operation.value)
        return state[0] != made_with, state  # a repeat changes nothing
    return state is None, None if state is None else (state[0], operation.value)


# --- Versions in force ----------------------------------------------------------------------------


class _InForce:
    """When a version, or no endpoint, may have been in force."""

    def __init__(self, operations: Iterable[Operation], version: str | None) -> None:
        begins = [(-math.inf, -math.inf)] if version is None else []  # asked, answered
        ends = []  # answered, asked
        for each in operations:
            if each.kind == "read" or each.outcome == REFUSED:
                continue
            versions = [None] if each.value is None else [name for name, _ in each.value]
            if version in versions:
                begins.append((each.asked_at, each.answered_at))
            elif each.outcome == OK and not _may_change_nothing(each, version):
                ends.append((each.answered_at, each.asked_at))
        begins.sort()
        ends.sort()
        self._begins = [asked_at for asked_at, _ in begins]
        self._ends = [answered_at for answered_at, _ in ends]
        self._latest = list(accumulate((answered_at for _, answered_at in begins), max))
        self._last = list(accumulate((asked_at for _, asked_at in ends), max))

    def is_possible(self, since: float, until: float) -> bool:
        """Return whether it may have been in force at any moment between the two.

        So it is if a change that was asked for by then gave it weight, and no change that was asked
        for after that one's answer was acknowledged before.
        """
        begun = bisect_right(self._begins, until)
        ended = bisect_left(self._ends, since)
        if not begun:
            return False
        return not ended or self._latest[begun - 1] >= self._last[ended - 1]


def _may_change_nothing(operation: Operation, version: str | None) -> bool:
    """Return whether the endpoint may have been there already, with this version."""
    return operation.kind == "create" and version is not None


def _wrong_versions(history: History) -> Iterator[str]:
    operations = _by_endpoint(history.operations)
    known: dict[tuple[str, str | None], _InForce] = {}
    for request in history.requests:
        if request.status not in {200, 404}:
            continue
        version = request.text.split()[0] if request.status == 200 else None
        key = (request.endpoint, version)
        if key not in known:
            known[key] = _InForce(operations[request.endpoint], version)
        since = _known_since(history, request)
        if not known[key].is_possible(since, request.answered_at):
            what = "no endpoint" if version is None else f"version {version}"
            yield f"{what} was not in force at any time for {request}"


def _known_since(history: History, request: Request) -> float:
    own = [each for each in history.isolations if each.host == request.host]
    cut_at = [
        each.begun_at
        for each in own
        if each.begun_at <= request.answered_at and request.asked_at <= each.ended_at
    ]
    return min([request.asked_at, *cut_at])


# --- Runs -----------------------------------------------------------------------------------------


def _wrong_runs(history: History) -> Iterator[str]:
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    for run in history.runs:
        runs[run.id].append(run)
    for request in history.requests:
        own = runs[request.id]
        if request.method == "POST" and len(own) > 1:
            yield f"ran {len(own)} times: {request}, {own}"
        if request.status == 200:
            version, answered_id = request.text.split()
            if answered_id != request.id:
                yield f"has the answer to another request: {request}"
            elif version not in {run.version for run in own}:
                yield f"was answered by a version that never ran it: {request}, {own}"


def _crowded(history: History) -> Iterator[str]:
    """Yield the replicas that ran too many at a time, by their own clocks."""
    events = [(run.began_at, 1, run.process) for run in history.runs]
    events += [(run.ended_at, -1, run.process) for run in history.runs]
    ongoing: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for _, change, process in sorted(events):  # at the same moment, ends come first
        ongoing[process] += change
        most[process] = max(most[process], ongoing[process])
    for process, count in most.items():
        if count > history.limit:
            yield f"{process} ran {count} requests at a time, and may run {history.limit}"
