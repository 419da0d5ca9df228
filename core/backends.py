"""One backend: its replicas, brought from what is observed to what is desired.

Theory of operation. The record (hard state) names the replicas that may have a process; it is saved
before a process is asked for, so that no restart of the controller can lose one. Each replica's
state (soft) follows the table in replica_states and is learnt anew by a new controller, which sends
Start to every recorded replica: a running one answers that it runs.

:meth:`Backend.reconcile` compares and takes the next steps; it is cheap to call, and safe at any
time. Stopping goes router first: a replica that is to go leaves the published table, and is told to
stop when every proxy holds the table without it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from understudy.core.config import BackendConfig
from understudy.core.effects import Check, Effect, Kill, Reconfigure, Start, Stop
from understudy.core.records import BackendRecord
from understudy.core.replica_states import LIVE, ReplicaEvent, ReplicaState, next_state
from understudy.core.tables import BackendTable, ReplicaTable

RESEND_START_S = 1.0
SILENT_START_S = 30.0  # a process that has not reported by then is taken for broken
KILL_MARGIN_S = 1.0  # past the drain time, before SIGKILL
RELEASE_TIMEOUT_S = 5.0  # how long a slow proxy may hold up a stop
BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
STABLE_S = 30.0  # a replica that ran this long was no crash loop
TRIES_PER_REPLICA = 3  # Ray Serve's rule: min(max_constructor_retry_count, 3 * num_replicas)
MAX_MISSED_CHECKS = 3


@dataclass(slots=True, eq=False)
class Replica:
    """What is observed of one replica."""

    tag: str
    state: ReplicaState = ReplicaState.SHOULD_START
    since: float = 0.0  # when it came to this state
    address: Any = None
    process: Any = None
    config_id: int = 0  # the newest that it has applied
    told_config_id: int = 0
    ongoing: int = 0
    ask_at: float = 0.0  # when to send Start again, or the next health check
    check_id: int = 0
    check_sent_at: float | None = None
    missed_checks: int = 0
    reported: bool = False

    def move(self, event: ReplicaEvent, now: float) -> None:
        """Take the table's transition."""
        self.state, self.since = next_state(self.state, event), now


class Backend:
    """A backend's record and its replicas.

    ``changed`` is set when the record was replaced and needs saving.
    """

    def __init__(self, record: BackendRecord, now: float) -> None:
        self.record = record
        self.config = BackendConfig(**record.config)
        self.changed = False
        # Recorded replicas may have a process already: they are asked, as if just told to start.
        self.replicas = {
            tag: Replica(tag, state=ReplicaState.STARTING, since=now, ask_at=now)
            for tag in record.replicas
        }
        self._failures = 0  # constructors that raised or died, since the last success
        self._last_error = ""
        self._last_exception: bytes | None = None
        self._crashes = 0
        self._start_at = 0.0  # no new replica before

    # --- What is wanted -------------------------------------------------------------------------

    def update(self, **changes: Any) -> None:
        """Replace fields of the record."""
        self.record = replace(self.record, **changes)
        self.changed = True

    def set_config(self, config: BackendConfig) -> bool:
        """Take a new config; False when it is the present one."""
        if config == self.config:
            return False
        self.config = config
        self.update(config=config.model_dump(), config_id=self.record.config_id + 1)
        return True

    def delete(self, *, force: bool = False) -> None:
        """Have all replicas stopped, then the backend gone; with ``force`` without draining."""
        if not self.record.deleting or (force and not self.record.force):
            self.update(deleting=True, force=force or self.record.force)

    def try_again(self) -> None:
        """Start anew after it was given up."""
        self._failures, self._start_at = 0, 0.0
        self.update(failure="", exception=None)

    @property
    def wanted(self) -> int:
        """How many replicas there should be."""
        return 0 if self.record.deleting or self.record.failure else self.config.num_replicas

    @property
    def settled(self) -> bool:
        """Whether exactly the wanted replicas run, with the newest config."""
        live = [r for r in self.replicas.values() if r.state in LIVE]
        return len(live) == self.wanted and all(
            r.state is ReplicaState.RUNNING and r.config_id >= self.record.config_id for r in live
        )

    @property
    def trouble(self) -> str:
        """The last error of a constructor or a death, while it is not overcome; else ''."""
        return self.record.failure or (self._last_error if not self.settled else "")

    def table(self) -> BackendTable:
        """Return what routers are told."""
        config = self.config
        running = [r for r in self.replicas.values() if r.state is ReplicaState.RUNNING]
        return BackendTable(
            tag=self.record.tag,
            replicas=tuple(
                ReplicaTable(tag=r.tag, address=r.address, process=r.process) for r in running
            ),
            max_ongoing_requests=config.max_ongoing_requests,
            max_queued_requests=config.max_queued_requests,
            request_timeout_s=config.request_timeout_s,
            unavailable="it could not be started" if self.record.failure else "",
        )

    # --- What is observed -----------------------------------------------------------------------

    def reported(
        self,
        tag: str,
        state: str,
        *,
        address: Any,
        process: Any,
        config_id: int,
        check_id: int,
        ongoing: int,
        error: str,
        exception: bytes | None,
        now: float,
    ) -> None:
        """Take a replica's report of itself."""
        replica = self.replicas.get(tag)
        if replica is None or replica.state is ReplicaState.STOPPED:
            return
        replica.reported = True
        replica.address, replica.process, replica.ongoing = address, process, ongoing
        if check_id:
            self._checked(replica, check_id, error, now)
            return
        if error and replica.state is ReplicaState.RUNNING and config_id > replica.config_id:
            self._last_error = error  # reconfigure raised; the replica goes on as it is
        replica.config_id = max(config_id, replica.config_id)
        if replica.state is not ReplicaState.STARTING:
            return
        if state == "running":
            replica.move(ReplicaEvent.STARTED, now)
            replica.ask_at = now + self.config.health_check_period_s
            self._started(now)
        elif state in {"failed", "draining"}:
            replica.move(ReplicaEvent.FAILED, now)
            if state == "failed":
                self._failed(error, exception, now)

    def exited(self, tag: str, now: float) -> None:
        """Take note that a replica's process is gone."""
        replica = self.replicas.get(tag)
        if replica is None or replica.state in {ReplicaState.STOPPED, ReplicaState.SHOULD_START}:
            return
        before, lived_s = replica.state, now - replica.since
        replica.move(ReplicaEvent.EXITED, now)
        if before is ReplicaState.STARTING:
            self._failed("its process died while it was starting", None, now)
        elif before is ReplicaState.RUNNING:
            self._crashes = 0 if lived_s > STABLE_S else self._crashes + 1
            self._last_error = "a replica's process died"
            if self._crashes > 1:
                self._start_at = now + _backoff(self._crashes - 1)

    def _started(self, _now: float) -> None:
        if self.settled:
            self._failures = 0
            self._last_error = ""
            if not self.record.ran:
                self.update(ran=True)

    def _failed(self, error: str, exception: bytes | None, now: float) -> None:
        self._failures += 1
        self._last_error, self._last_exception = error, exception
        self._start_at = now + _backoff(self._failures)
        limit = min(
            self.config.max_constructor_retry_count, TRIES_PER_REPLICA * self.config.num_replicas
        )
        if not self.record.ran and self._failures >= limit and not self.record.failure:
            self.update(failure=error, exception=exception)

    def _checked(self, replica: Replica, check_id: int, error: str, now: float) -> None:
        if check_id != replica.check_id or replica.state is not ReplicaState.RUNNING:
            return
        replica.check_sent_at = None
        replica.ask_at = now + self.config.health_check_period_s
        self._count_check(replica, missed=bool(error))
        if error:
            self._last_error = error

    def _count_check(self, replica: Replica, *, missed: bool) -> None:
        replica.missed_checks = replica.missed_checks + 1 if missed else 0

    # --- The next steps -------------------------------------------------------------------------

    def reconcile(self, released: Callable[[], bool], now: float) -> list[Effect]:
        """Take the next steps toward what is wanted."""
        self._choose(now)
        effects: list[Effect] = []
        for replica in list(self.replicas.values()):
            step = self._STEPS[replica.state]
            effects += step(self, replica, released, now)
        tags = tuple(t for t, r in self.replicas.items() if r.state is not ReplicaState.STOPPED)
        if tags != self.record.replicas:
            self.replicas = {tag: self.replicas[tag] for tag in tags}
            self.update(replicas=tags)
        return effects

    def due_at(self) -> float:
        """Return when :meth:`reconcile` has something to do, if nothing happens before."""
        times = [self._due_at(replica) for replica in self.replicas.values()]
        if sum(r.state in LIVE for r in self.replicas.values()) < self.wanted:
            times.append(self._start_at)
        return min(times, default=float("inf"))

    def _due_at(self, replica: Replica) -> float:
        if replica.state is ReplicaState.STARTING:
            return float("inf") if replica.reported else replica.ask_at
        if replica.state is ReplicaState.RUNNING:
            sent_at = replica.check_sent_at
            if sent_at is None:
                return replica.ask_at
            return sent_at + self.config.health_check_timeout_s
        if replica.state is ReplicaState.SHOULD_STOP:
            return replica.since + RELEASE_TIMEOUT_S
        return replica.ask_at

    def _choose(self, now: float) -> None:
        live = [r for r in self.replicas.values() if r.state in LIVE]
        surplus = len(live) - self.wanted
        if surplus > 0:
            live.sort(key=lambda r: (r.state is ReplicaState.RUNNING, -r.since))
            for replica in live[:surplus]:
                replica.move(ReplicaEvent.RETIRE, now)
        elif surplus < 0 and now >= self._start_at:
            for _ in range(-surplus):
                tag = f"{self.record.tag}#{secrets.token_hex(3)}"
                self.replicas[tag] = Replica(tag, since=now)

    def _start(self, replica: Replica, _released: Any, now: float) -> Iterable[Effect]:
        replica.move(ReplicaEvent.START, now)
        replica.ask_at = now + RESEND_START_S
        return [Start(replica.tag, self.record.tag)]

    def _await_start(self, replica: Replica, _released: Any, now: float) -> Iterable[Effect]:
        if replica.reported or now < replica.ask_at:
            return []
        if now - replica.since > SILENT_START_S:
            replica.move(ReplicaEvent.FAILED, now)
            self._failed("its process did not report", None, now)
            return [Kill(replica.tag)]
        replica.ask_at = now + RESEND_START_S
        return [Start(replica.tag, self.record.tag)]

    def _keep(self, replica: Replica, _released: Any, now: float) -> Iterable[Effect]:
        effects: list[Effect] = []
        sent_at = replica.check_sent_at
        if sent_at is not None and now - sent_at > self.config.health_check_timeout_s:
            replica.check_sent_at = None
            self._count_check(replica, missed=True)
        if replica.missed_checks >= MAX_MISSED_CHECKS:
            self._last_error = f"{replica.tag} failed {MAX_MISSED_CHECKS} health checks"
            replica.move(ReplicaEvent.RETIRE, now)
            return []
        if max(replica.config_id, replica.told_config_id) < self.record.config_id:
            replica.told_config_id = self.record.config_id
            effects.append(Reconfigure(replica.tag, self.record.tag))
        if replica.check_sent_at is None and now >= replica.ask_at:
            replica.check_id += 1
            replica.check_sent_at = now
            replica.ask_at = now + self.config.health_check_period_s
            effects.append(Check(replica.tag, replica.check_id))
        return effects

    def _release(
        self, replica: Replica, released: Callable[[], bool], now: float
    ) -> Iterable[Effect]:
        if not (released() or now - replica.since > RELEASE_TIMEOUT_S):
            return []
        replica.move(ReplicaEvent.STOP, now)
        replica.ask_at = now + RESEND_START_S
        return [Stop(replica.tag, self._drain_s())]

    def _await_exit(self, replica: Replica, _released: Any, now: float) -> Iterable[Effect]:
        if now - replica.since > self._drain_s() + KILL_MARGIN_S:
            return [Kill(replica.tag)]
        if now < replica.ask_at:
            return []
        replica.ask_at = now + RESEND_START_S
        return [Stop(replica.tag, self._drain_s())]

    def _drain_s(self) -> float:
        return 0.0 if self.record.force else self.config.graceful_shutdown_timeout_s

    def _stopped(self, _replica: Replica, _released: Any, _now: float) -> Iterable[Effect]:
        return []

    _STEPS = {  # noqa: RUF012  # a table, never changed
        ReplicaState.SHOULD_START: _start,
        ReplicaState.STARTING: _await_start,
        ReplicaState.RUNNING: _keep,
        ReplicaState.SHOULD_STOP: _release,
        ReplicaState.STOPPING: _await_exit,
        ReplicaState.STOPPED: _stopped,
    }


def _backoff(failures: int) -> float:
    return min(BACKOFF_S * 2.0 ** (failures - 1), MAX_BACKOFF_S)
