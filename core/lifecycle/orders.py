"""What each replica of a backend is sent, and until when it may take.

Theory of operation. Each state has a limit, and something that happens when it is over:

    starting      constructor_timeout_s; SILENT_START_S unreported    the start has failed
    running       health_check_timeout_s, while a check is open       a check is missed
    should_stop   RELEASE_TIMEOUT_S                                   a stop, whatever proxies hold
    stopping      the drain time and KILL_MARGIN_S                    Kill; SILENT_EXIT_S later gone

Until then the order of the state is repeated: starts and stops each RESEND_S, checks each period.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from greenroom.core.agenda import NEVER
from greenroom.core.config import BackendConfig, config_of_replica
from greenroom.core.effects import (
    CheckReplica,
    Effect,
    Kill,
    ReconfigureReplica,
    Start,
    StopReplica,
)
from greenroom.core.lifecycle.releases import is_newest
from greenroom.core.lifecycle.replicas import Replica, ReplicaState as S
from greenroom.core.records import BackendRecord

RESEND_S = 1.0
SILENT_START_S = 30.0  # a process that has not reported by then is taken for broken
KILL_MARGIN_S = 1.0  # past the drain time, before SIGKILL
SILENT_EXIT_S = 5.0  # past that; one that has never reported is then taken for gone
RELEASE_TIMEOUT_S = 5.0  # how long a slow proxy may hold up a stop
CHECKED_TOGETHER = 0.1  # of the period: a check may be early by this, to be sent with another


class Orders(NamedTuple):
    """The orders for a backend's replicas by its record and settings. Times are monotonic."""

    record: BackendRecord
    config: BackendConfig

    def ends_at(self, replica: Replica) -> float:
        """Return when the limit of the replica's state is over."""
        limit = _LIMITS.get(replica.state)
        return NEVER if limit is None else limit(self, replica)

    def due_at(self, replica: Replica) -> float:
        """Return when there is something to send a replica, if nothing happens before."""
        if replica.state is S.STARTING:
            return min(replica.ask_at, self.ends_at(replica))
        is_checked = replica.state is S.RUNNING and replica.check_sent_at is not None
        if is_checked or replica.state is S.SHOULD_STOP:
            return self.ends_at(replica)
        return NEVER if replica.state is S.LOST else replica.ask_at

    def next(self, replica: Replica, now: float, *, released: bool) -> list[Effect]:
        """Return what to send a replica; ``released`` once no router sends to those that go."""
        order = _ORDERS.get(replica.state)
        if order is not None:
            return order(self, replica, now)
        if replica.state is S.SHOULD_START:
            replica.become(S.STARTING, now)
            return self._start(replica, now)
        if replica.state is S.SHOULD_STOP and (released or now >= self.ends_at(replica)):
            replica.become(S.STOPPING, now)
            return self._stop(replica, now)
        is_wanted = is_newest(self.record, replica) and not self.record.deleting
        if replica.state is S.LOST and not is_wanted:
            replica.become(S.STOPPED, now)  # if it lives, it is asked to go when back
        return []

    def _await_start(self, replica: Replica, now: float) -> list[Effect]:
        if now < replica.ask_at:
            return []
        if replica.reported:  # it is busy starting, or its later report was lost
            replica.ask_at = now + self.config.health_check_period_s
            return [CheckReplica(replica=replica.tag, check_id=0, rank=replica.known_rank)]
        return self._start(replica, now)

    def _start(self, replica: Replica, now: float) -> list[Effect]:
        replica.ask_at = now + RESEND_S
        replica.sent_rank = replica.known_rank
        return [Start(replica.tag, self.record.tag)]

    def _keep(self, replica: Replica, now: float) -> list[Effect]:
        effects: list[Effect] = []
        newest = self.record.newest
        config_id = newest.config_id
        is_sent = max(replica.config_id, replica.sent_config_id) >= config_id
        if is_newest(self.record, replica) and not is_sent:
            replica.sent_config_id = config_id
            config = config_of_replica(newest.config)
            effects.append(
                ReconfigureReplica(replica=replica.tag, config=config, config_id=config_id)
            )
        # Planned with the period of its time: a period that was lowered since holds at once.
        replica.ask_at = min(replica.ask_at, now + self.config.health_check_period_s)
        # A check that is due soon is sent with those that are due now: a step costs more than it.
        ask_at = replica.ask_at - CHECKED_TOGETHER * self.config.health_check_period_s
        is_due = now >= ask_at or replica.sent_rank != replica.known_rank
        if replica.check_sent_at is None and is_due:
            replica.check_id += 1
            replica.check_sent_at = now
            replica.sent_rank = rank = replica.known_rank
            check = CheckReplica(replica=replica.tag, check_id=replica.check_id, rank=rank)
            effects.append(check)
        return effects

    def _await_exit(self, replica: Replica, now: float) -> list[Effect]:
        kill_at = self.ends_at(replica)
        if now < kill_at:
            return self._stop(replica, now) if now >= replica.ask_at else []
        if replica.process is None and now >= kill_at + SILENT_EXIT_S:
            replica.become(S.STOPPED, now)  # if it does come up, it is asked to go
            return []
        replica.ask_at = now + RESEND_S
        return [Kill(replica.tag)]

    def _stop(self, replica: Replica, now: float) -> list[Effect]:
        replica.ask_at = min(now + RESEND_S, self.ends_at(replica))
        return [StopReplica(replica=replica.tag, drain_s=self._drain_s(replica))]

    def _start_ends_at(self, replica: Replica) -> float:
        limit_s = self.config.constructor_timeout_s if replica.reported else SILENT_START_S
        return replica.since + limit_s

    def _check_ends_at(self, replica: Replica) -> float:
        sent_at = replica.check_sent_at
        return NEVER if sent_at is None else sent_at + self.config.health_check_timeout_s

    def _drain_s(self, replica: Replica) -> float:
        """Return how long it may finish its queries: it has none if no router ever knew it."""
        if self.record.force or not replica.may_have_served:
            return 0.0
        return self.config.graceful_shutdown_timeout_s


_LIMITS: dict[S, Callable[[Orders, Replica], float]] = {
    S.STARTING: Orders._start_ends_at,
    S.RUNNING: Orders._check_ends_at,
    S.SHOULD_STOP: lambda _, replica: replica.since + RELEASE_TIMEOUT_S,
    S.STOPPING: lambda own, replica: replica.since + own._drain_s(replica) + KILL_MARGIN_S,
}
_ORDERS: dict[S, Callable[[Orders, Replica, float], list[Effect]]] = {
    S.STARTING: Orders._await_start,
    S.RUNNING: Orders._keep,
    S.STOPPING: Orders._await_exit,
}
