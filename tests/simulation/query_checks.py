"""What must hold of queries: when user code begins, when a caller is answered, and in the end."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

from greenroom.actors.caller.streams import StreamFailedError
from greenroom.actors.messages import queries as m
from tests.simulation.world import SimProcess

if TYPE_CHECKING:
    from tests.simulation.checks import Checks


class QueryChecks:
    """Follows every query from its caller to user code and back."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._expect = checks.expect
        self._queries: dict[str, tuple[m.Query, SimProcess]] = {}
        self._answers: Counter[str] = Counter()
        self._runs: Counter[tuple[str, str]] = Counter()  # by query and shadow, "" for none
        self._cancelled: set[str] = set()
        self.poisoned: set[str] = set()  # on which every router raises
        self._begun: set[str] = set()  # answered in parts, by some replica
        self._streams: dict[str, list[tuple[int, int]]] = {}  # being read: (run, parts in all)

    def submitted(self, uid: str, query: m.Query, caller: SimProcess) -> None:
        self._queries[uid] = (query, caller)

    def cancelled(self, uid: str) -> None:
        self._cancelled.add(uid)

    def began(self, code: Any, assignment: m.Assignment, running: int) -> None:
        """User code begins to run a query."""
        replica = code.process.actor
        uid = assignment.query.call.decode()
        backend = replica.tag.rpartition("#")[0] if assignment.caller is None else ""
        self._runs[uid, backend] += 1
        self._expect(
            _may_repeat(assignment.query) or self._runs[uid, backend] == 1,
            f"query {uid} may not be repeated, and runs again at {replica.tag} as a {backend!r}",
        )
        limit = replica.config["max_ongoing_requests"]
        self._expect(running <= limit, f"{replica.tag} runs {running} queries, above {limit}")
        self._expect(replica.state == "running", f"{replica.tag} is {replica.state}, and runs one")

    def answered(self, uid: str, answer: m.Answer) -> None:
        """A caller's user has an answer."""
        query, _ = self._queries[uid]
        self._answers[uid] += 1
        self._expect(self._answers[uid] == 1, f"query {uid} is answered again: {answer}")
        self._expect(uid not in self._cancelled, f"query {uid} is answered after it was cancelled")
        kind = getattr(answer, "kind", "done")
        self._checks.counts[f"query {kind}"] += 1
        if kind in {"done", "UserCodeError"}:
            is_value = isinstance(answer, m.ValueAnswer)
            said = pickle.loads(answer.value) if is_value else answer.text.encode()
            self._expect(said == query.call, f"query {uid} has the answer of {said!r}")
            self._expect(self._runs[uid, ""] > 0, f"query {uid} is answered, and never ran")
        elif kind == "GreenroomError":
            self._expect(not self._checks.simulation.faults.calm, f"query {uid} failed: {answer}")
        elif kind == "ReplicaUnavailableError":
            text = getattr(answer, "text", "")
            repeatable = _may_repeat(query)
            enough = "3 replicas died" in text or "as many as" in text
            may = enough if repeatable else not self._checks.simulation.faults.calm
            # What has begun is not repeated; and in calm times replicas die by their own code.
            may = may or uid in self._begun or "the replica died" in text
            self._expect(may, f"query {uid}, repeatable: {repeatable}, failed: {text}")
            if "out of memory" in text:
                self._expect(self._checks.counts["full"] > 0, f"query {uid} failed: {text}")
                self._checks.counts["query told of memory"] += 1

    # --- Streams ----------------------------------------------------------------------------------

    def begins_stream(self, uid: str) -> int:
        """User code begins to answer in parts; return how often it has run the query so far."""
        self._begun.add(uid)
        return self._runs[uid, ""]

    def stream_begun(self, uid: str) -> None:
        """A caller's user has an answer that comes in parts."""
        self._answers[uid] += 1
        self._expect(self._answers[uid] == 1, f"query {uid} is answered again: by a stream")
        self._expect(uid not in self._cancelled, f"query {uid} is answered after it was cancelled")
        self._streams[uid] = []

    def part(self, uid: str, data: bytes) -> None:
        """A caller's user has read the next parts, which may have come as one."""
        read = io.BytesIO(data)
        while read.tell() < len(data):
            self._one_part(uid, *pickle.load(read))

    def _one_part(self, uid: str, call: bytes, run: int, number: int, count: int) -> None:
        parts = self._streams[uid]
        parts.append((run, count))
        message = (
            f"query {uid} has part {number} of {count} of run {run} of {call!r}, after {parts}"
        )
        self._expect(call == self._queries[uid][0].call and number == len(parts) - 1, message)
        self._expect(set(parts) == {(run, count)}, message)

    def stream_ended(self, uid: str, outcome: object) -> None:
        """A caller's user has read a stream, or it broke off."""
        parts = self._streams.pop(uid)
        if isinstance(outcome, Exception):
            self._expect(isinstance(outcome, StreamFailedError), f"{uid}: {outcome!r}")
            outcome = "until it broke off"
        elif outcome == "to its end" and parts:
            count = parts[0][1]
            self._expect(len(parts) == count, f"query {uid} has {len(parts)} parts of {count}")
        self._checks.counts[f"stream read {outcome}"] += 1

    def unread(self) -> list[str]:
        """Return the streams that callers still read."""
        return [uid for uid in self._streams if self._queries[uid][1].alive]

    def unanswered(self) -> list[str]:
        """Return the queries of live callers that have no answer."""
        return [
            uid
            for uid, (_, caller) in self._queries.items()
            if caller.alive and uid not in self._cancelled and not self._answers[uid]
        ]

    def at_the_end(self) -> None:
        """Check that every live caller has its answers."""
        unanswered = self.unanswered()
        self._expect(not unanswered, f"queries {unanswered} have no answer")


def _may_repeat(query: m.Query) -> bool:
    """Tell it without the code that is checked; endpoints and deployments leave it open here."""
    return query.http_method == "GET" if query.retryable is None else query.retryable
