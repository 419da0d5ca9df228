"""Goals: changes under way, for which a client can wait."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from greenroom.core.agenda import Agenda
from greenroom.core.records import Changes, GoalRecord, Key, Records
from greenroom.core.transitions import follow

GOAL = "goal"
PENDING, SUCCEEDED, FAILED = "pending", "succeeded", "failed"
NEXT = {PENDING: (SUCCEEDED, FAILED), SUCCEEDED: (), FAILED: ()}
# Digits of an id: a number and, as the record of the last one may be lost, random ones, which are
# all that there was before.
NUMBER, RANDOM = 8, 16
KEPT_ENDED = 100  # so that who asks late, or again after a restart, still learns the outcome


def _made(goal_id: str) -> tuple[int, str]:
    return len(goal_id), goal_id


class Progress(NamedTuple):
    """Where a change stands: still going on, done, or failed with an error.

    It is ``unheld`` when it is done but for the proxies, some of which do not know it yet.
    """

    done: bool = False
    error: str = ""
    exception: bytes | None = None
    unheld: bool = False


class Goals:
    """All goals. A newer goal for the same subject supersedes the older one, which fails.

    That one has ended is an event: ``(GOAL, id)``. Goals are in the order of their numbers, in
    which they were made: a clock may be set.
    """

    def __init__(self, saved: Mapping[str, GoalRecord], changes: Changes, agenda: Agenda) -> None:
        # In the order in which they have ended, as far as it is known: see KEPT_ENDED.
        ordered = [saved[goal_id] for goal_id in sorted(saved, key=_made)]
        self._last = int(ordered[-1].id[:-RANDOM] or "0", 16) if ordered else 0
        self._agenda = agenda
        self._goals = Records(GOAL, {goal.id: goal for goal in ordered}, changes)
        self._pending = {goal.subject: goal.id for goal in ordered if goal.state == PENDING}
        self._ended = dict.fromkeys(goal.id for goal in ordered if goal.state != PENDING)
        agenda.touch(GOAL, *self._pending.values())

    def create(self, subject: Key, what: str, wall_now: float) -> str:
        """Add a goal and return its id."""
        older = self.pending_for(subject)
        if older is not None:
            error = f"superseded by a later change of {' '.join(subject)}: {what}"
            self._put(replace(self._goals[older], state=FAILED, error=error))
        self._last += 1
        goal_id = f"{self._last:0{NUMBER}x}{secrets.token_hex(RANDOM // 2)}"
        goal = GoalRecord(id=goal_id, subject=subject, what=what, created_at=wall_now)
        self._put(goal)
        return goal.id

    def pending(self) -> list[GoalRecord]:
        """Return the goals that have not ended."""
        return [self._goals[goal_id] for goal_id in self._pending.values()]

    def pending_for(self, subject: Key) -> str | None:
        """Return the id of the subject's goal under way, if there is one."""
        return self._pending.get(subject)

    def get(self, goal_id: str) -> GoalRecord | None:
        """Return the goal, ended or not."""
        return self._goals.get(goal_id)

    def all(self) -> list[GoalRecord]:
        """Return all goals that are kept, oldest first."""
        return list(self._goals.values())

    def advance(self, goal: GoalRecord, now: Progress) -> None:
        """End a goal whose subject is done or has failed."""
        if now.error:
            self._put(replace(goal, state=FAILED, error=now.error, exception=now.exception))
        elif now.done:
            self._put(replace(goal, state=SUCCEEDED))

    def _put(self, goal: GoalRecord) -> None:
        if (before := self._goals.get(goal.id)) is not None:
            follow(NEXT, before.state, goal.state)
        self._goals[goal.id] = goal
        if goal.state == PENDING:
            self._pending[goal.subject] = goal.id
            self._agenda.touch(GOAL, goal.id)
            return
        self._pending.pop(goal.subject, None)
        self._ended[goal.id] = None
        self._agenda.happened((GOAL, goal.id))
        while len(self._ended) > KEPT_ENDED:
            first = next(iter(self._ended))
            del self._goals[first], self._ended[first]
