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


def _age(goal: GoalRecord) -> tuple[float, str]:
    return goal.created_at, goal.id


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

    Only those are looked at whose subject was touched: a turn costs what it touches.
    """

    def __init__(self, records: Mapping[str, GoalRecord]) -> None:
        # In the order in which they have ended, as far as it is known: see KEPT_ENDED.
        ordered = sorted(records.values(), key=_age)
        self._goals = {goal.id: goal for goal in ordered}
        self._pending = {goal.subject: goal.id for goal in ordered if goal.state == "pending"}
        self._changed: set[str] = set()
        self._ended = dict.fromkeys(goal.id for goal in ordered if goal.state != "pending")
        self._lately_ended: set[str] = set()
        self._touched = set(self._pending)
        self._unheld: set[Subject] = set()

    def touch(self, *subjects: Subject) -> None:
        """Look at these in the next step, if they have goals under way."""
        self._touched.update(subjects)

    def held(self) -> None:
        """Look at what waits for proxies: they hold more, or there are fewer."""
        self._touched |= self._unheld
        self._unheld = set()

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
        return sorted(self._goals.values(), key=_age)

    def advance(self, progress: Callable[[Subject], Progress]) -> None:
        """End the goals whose subject is done or failed; drop those that ended first."""
        touched = [self._goals[self._pending[s]] for s in self._touched & self._pending.keys()]
        self._touched = set()
        for goal in sorted(touched, key=_age):
            now = progress(goal.subject)
            if now.error:
                self._put(replace(goal, state="failed", error=now.error, exception=now.exception))
            elif now.done:
                self._put(replace(goal, state="succeeded"))
            elif now.unheld:
                self._unheld.add(goal.subject)
        for goal_id in list(itertools.islice(self._ended, max(len(self._ended) - KEPT_ENDED, 0))):
            del self._goals[goal_id], self._ended[goal_id]
            self._changed.add(goal_id)

    def take_changed(self) -> dict[str, GoalRecord | None]:
        """Return what to save since the last call; None for what is no longer kept."""
        changed, self._changed = self._changed, set()
        return {goal_id: self._goals.get(goal_id) for goal_id in changed}

    def take_ended(self) -> set[str]:
        """Return the ids of the goals that have ended since the last call."""
        ended, self._lately_ended = self._lately_ended, set()
        return ended

    def _put(self, goal: GoalRecord) -> None:
        self._goals[goal.id] = goal
        if goal.state == "pending":
            self._pending[goal.subject] = goal.id
            self._touched.add(goal.subject)
        else:
            self._pending.pop(goal.subject, None)
            self._ended[goal.id] = None
            self._lately_ended.add(goal.id)
        self._changed.add(goal.id)
