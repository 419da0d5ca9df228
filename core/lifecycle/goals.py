"""Goals: changes under way, for which a client can wait."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from greenroom.core.records import GoalRecord

KEPT_ENDED = 100  # so that who asks late, or again after a restart, still learns the outcome

Subject = tuple[str, str]


class Progress(NamedTuple):
    """Where a change stands: still going on, done, or failed with an error."""

    done: bool = False
    error: str = ""
    exception: bytes | None = None


class Goals:
    """All goals. A newer goal for the same subject supersedes the older one, which fails."""

    def __init__(self, records: Mapping[str, GoalRecord]) -> None:
        # In the order of their last change, as far as it is known: see KEPT_ENDED.
        ordered = sorted(records.values(), key=lambda goal: (goal.created_at, goal.id))
        self._goals = {goal.id: goal for goal in ordered}
        self._pending = {goal.subject: goal.id for goal in ordered if goal.state == "pending"}
        self._changed: set[str] = set()

    def create(self, subject: Subject, what: str, wall_now: float) -> str:
        """Add a goal and return its id."""
        older = self.pending_for(subject)
        if older is not None:
            error = f"superseded by a later change of {' '.join(subject)}: {what}"
            self._put(replace(self._goals[older], state="failed", error=error))
        goal = GoalRecord(id=secrets.token_hex(8), subject=subject, what=what, created_at=wall_now)
        self._put(goal)
        return goal.id

    def pending(self) -> list[GoalRecord]:
        """Return the goals that have not ended."""
        return [self._goals[goal_id] for goal_id in self._pending.values()]

    def pending_for(self, subject: Subject) -> str | None:
        """Return the id of the subject's goal under way, if there is one."""
        return self._pending.get(subject)

    def get(self, goal_id: str) -> GoalRecord | None:
        """Return the goal, ended or not."""
        return self._goals.get(goal_id)

    def all(self) -> list[GoalRecord]:
        """Return all goals that are kept, oldest first."""
        return sorted(self._goals.values(), key=lambda goal: (goal.created_at, goal.id))

    def advance(self, progress: Callable[[Subject], Progress]) -> None:
        """End the goals whose subject is done or failed; drop those that ended first."""
        for goal in self.pending():
            now = progress(goal.subject)
            if now.error:
                self._put(replace(goal, state="failed", error=now.error, exception=now.exception))
            elif now.done:
                self._put(replace(goal, state="succeeded"))
        surplus = len(self._goals) - len(self._pending) - KEPT_ENDED
        if surplus > 0:
            ended = (goal.id for goal in self._goals.values() if goal.state != "pending")
            for goal_id in list(itertools.islice(ended, surplus)):
                del self._goals[goal_id]
                self._changed.add(goal_id)

    def take_changed(self) -> dict[str, GoalRecord | None]:
        """Return what to save since the last call; None for what is no longer kept."""
        changed, self._changed = self._changed, set()
        return {goal_id: self._goals.get(goal_id) for goal_id in changed}

    def _put(self, goal: GoalRecord) -> None:
        self._goals.pop(goal.id, None)
        self._goals[goal.id] = goal
        if goal.state == "pending":
            self._pending[goal.subject] = goal.id
        else:
            self._pending.pop(goal.subject, None)
        self._changed.add(goal.id)
