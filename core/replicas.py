"""What is observed of one replica, in the hands of its backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from greenroom.core.replica_states import ReplicaEvent, ReplicaState, next_state


@dataclass(slots=True, eq=False)
class Replica:
    """What is observed of one replica."""

    tag: str
    release: int = 1  # the number of the one that it runs
    host: str = ""
    state: ReplicaState = ReplicaState.SHOULD_START
    since: float = 0.0  # when it came to this state
    address: Any = None
    process: Any = None
    config_id: int = 0  # the newest that it has applied
    told_config_id: int = 0
    ongoing: int = 0
    ask_at: float = 0.0  # when to send again what its state asks for, or the next health check
    check_id: int = 0
    check_sent_at: float | None = None
    missed_checks: int = 0
    trouble: str = ""  # in its own words
    check_error: str = ""  # of the last health check, if it failed
    reported: bool = False
    recovering: bool = False  # known from the record only
    moving: bool = False  # to be replaced elsewhere

    def move(self, event: ReplicaEvent, now: float) -> None:
        """Take the table's transition."""
        self.state, self.since = next_state(self.state, event), now
